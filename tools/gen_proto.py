"""Generate `baton/rpc/<version>/` from `proto/baton/<version>/*.proto`.

    python tools/gen_proto.py             # regenerate; needs tools/proto-requirements.txt (`make proto`)
    python tools/gen_proto.py --check     # check that the committed code fits these proto files; needs nothing
    python tools/gen_proto.py --diff      # regenerate elsewhere and compare byte by byte

protoc writes imports such as `from baton.v1 import common_pb2`; the modules live one package deeper, as
`baton.rpc.v1.common_pb2`, so the import lines are rewritten. Names on the wire stay `baton.v1`.
`GENERATED.sha256` in the same folder records the digests of all inputs and outputs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "proto"
TARGET = Path("baton/rpc")
REQUIREMENTS = Path("tools/proto-requirements.txt")
MANIFEST = "GENERATED.sha256"
IMPORT = re.compile(r"^(from|import) baton\.(v\d+)\b", re.MULTILINE)
MODULE = re.compile(r"'baton\.(v\d+\.\w+_pb2)'")
INIT = '"""Generated from proto/baton/{version} by tools/gen_proto.py; do not edit."""\n'


def proto_files() -> list[Path]:
    """The wire contracts, as sorted paths relative to `proto/`."""
    return sorted(path.relative_to(PROTO_ROOT) for path in PROTO_ROOT.glob("baton/v*/*.proto"))


def run_protoc(protos: Iterable[Path], out: Path) -> None:
    """Let protoc write messages, services and their type stubs below `out`."""
    outputs = ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO_ROOT}"]
    command += [f"--{name}={out}" for name in outputs] + [str(path) for path in protos]
    plugins = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    done = subprocess.run(command, env={**os.environ, "PATH": plugins}, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"protoc failed (set up its environment with `make proto`):\n{done.stderr.strip()}")


def is_empty_service(path: Path) -> bool:
    """True for the `_pb2_grpc` module of a proto file without a service."""
    proto = PROTO_ROOT / "baton" / path.parent.name / (path.name.split("_pb2_grpc")[0] + ".proto")
    return "_pb2_grpc." in path.name and not re.search(r"^\s*service\s", proto.read_text(), re.MULTILINE)


def rewritten(source: str) -> str:
    """`source` with imports of `baton.vN` turned into imports of `baton.rpc.vN`."""
    moved = MODULE.sub(r"'baton.rpc.\1'", IMPORT.sub(r"\1 baton.rpc.\2", source))
    lines = (line.rstrip() for line in moved.splitlines())
    return "\n".join(lines).rstrip() + "\n"


def place(generated: Path, root: Path) -> Iterator[Path]:
    """Move protoc's files from `generated` below `root`, and yield their paths relative to `root`."""
    for source in sorted((generated / "baton").glob("v*/*_pb2*")):
        if is_empty_service(source):
            continue
        relative = TARGET / source.parent.name / source.name
        (root / relative).parent.mkdir(parents=True, exist_ok=True)
        (root / relative).write_text(rewritten(source.read_text()))
        yield relative


def digests(root: Path, paths: Iterable[Path]) -> list[str]:
    """One `sha256  path` line per file, as `sha256sum` prints them."""
    return [f"{hashlib.sha256((root / path).read_bytes()).hexdigest()}  {path.as_posix()}" for path in sorted(paths)]


def manifest(root: Path, version: str) -> str:
    """Return the digests of the inputs and outputs of `version`, from the files as they are now."""
    sources = [Path("proto") / path for path in proto_files() if path.parent.name == version]
    inputs = digests(ROOT, [*sources, REQUIREMENTS, Path("tools/gen_proto.py")])
    folder = root / TARGET / version
    names = {path for pattern in ("*.py", "*.pyi") for path in folder.glob(pattern)}
    return "\n".join(inputs + digests(root, (path.relative_to(root) for path in names))) + "\n"


def versions() -> list[str]:
    """The versions of the API, such as `v1`."""
    return sorted({path.parent.name for path in proto_files()})


def generate(root: Path) -> None:
    """Write the generated packages below `root`, in the place of older ones."""
    protos = proto_files()
    if not protos:
        raise SystemExit(f"no proto files below {PROTO_ROOT}/baton")
    with tempfile.TemporaryDirectory() as scratch:
        run_protoc(protos, Path(scratch))
        placed = set(place(Path(scratch), root))
    for version in versions():
        folder = root / TARGET / version
        for path in folder.glob("*_pb2*"):
            if path.relative_to(root) not in placed:
                path.unlink()
        (folder / "__init__.py").write_text(INIT.format(version=version))
        (folder / MANIFEST).write_text(manifest(root, version))
    print(f"{len(placed)} files from {len(protos)} proto files")


def stale() -> list[str]:
    """The reasons why the committed code is not what the proto files give; empty when it is."""
    reasons = []
    for version in versions():
        recorded = ROOT / TARGET / version / MANIFEST
        before = set(recorded.read_text().splitlines()) if recorded.exists() else set()
        now = set(manifest(ROOT, version).splitlines())
        reasons += sorted({line.split("  ", 1)[1] for line in before ^ now})
    return reasons


def differing() -> list[str]:
    """The generated files that a fresh run of protoc would change, add or remove."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        generate(fresh)
        names = {
            path.relative_to(root)
            for root in (ROOT, fresh)
            for version in versions()
            for path in (root / TARGET / version).glob("*.*")
        }
        return [str(name) for name in sorted(names) if read(ROOT / name) != read(fresh / name)]


def read(path: Path) -> bytes | None:
    """The content of `path`, None when there is none."""
    return path.read_bytes() if path.exists() else None


def report(reasons: list[str]) -> int:
    """Say whether the generated code is fresh; the exit code."""
    if not reasons:
        print("generated code is fresh")
        return 0
    print("generated code is stale, run `make proto`; changed since it was made:", file=sys.stderr)
    print("\n".join(f"  {reason}" for reason in reasons), file=sys.stderr)
    return 1


def main() -> int:
    """Parse the command line and do what it asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare digests only; needs no generator")
    parser.add_argument("--diff", action="store_true", help="regenerate elsewhere and compare")
    options = parser.parse_args()
    if options.check:
        return report(stale())
    if options.diff:
        return report(differing())
    generate(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
