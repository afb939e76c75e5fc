"""The contents of the wheel and the sdist. The SDK works alone in an otherwise empty environment."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.guards.test_constraints import needed

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("baton", "router", "prefill_workers", "decode_workers", "kvtransfer")
SERVER_ONLY = ("torch", "ray", "pydantic", "typer", "redis", "numpy")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("distributions")]


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command without environment variables that refer to this tree or environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    return subprocess.run(list(map(str, command)), cwd=cwd, env=clean, text=True, capture_output=True, check=False)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


def borrow(name: str, site: Path) -> None:
    """Link the files of the installed distribution `name` into `site`, without a package index."""
    for file in metadata.files(name) or []:
        if ".." not in file.parts and file.suffix != ".pyc":
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(Path(str(file.locate())).resolve())


@pytest.fixture(scope="module")
def sdk_env(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment that has only the wheel and its base dependencies."""
    home = tmp_path_factory.mktemp("sdk")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    for name in needed("baton-serve"):
        borrow(name, Path(site))
    command = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel)
    done = run(*command)
    assert done.returncode == 0, done.stderr
    return home / "bin"


def test_the_wheel_ships_every_module_the_page_and_nothing_else(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = {name.split("/")[0] for name in names}
    assert {folder for folder in folders if not folder.endswith(".dist-info")} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    here = {path for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    page = set((ROOT / "router/dashboard/static").iterdir())
    assert page
    assert {str(path.relative_to(ROOT)) for path in here | page} - names == set()


def test_the_sdist_can_be_worked_with(dist: Path):
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    wanted = {"Makefile", "constraints.txt", "LICENSE", "README.md", "tests/conftest.py", "tools/budget.py"}
    wanted |= {"proto/baton/v1/inference.proto", "configs/local.yaml", "models/demo/config.json"}
    wanted |= {"configs/schema.json", "Dockerfile", ".dockerignore", "tools/image/wheel.sh"}
    assert wanted - names == set()


def test_base_dependencies_are_the_sdk_alone():
    light = {"grpcio", "grpcio-status", "protobuf", "googleapis-common-protos", "typing-extensions"}
    direct = {Requirement(each) for each in metadata.requires("baton-serve") or ()}
    assert {each.name for each in direct if each.marker is None} | needed("baton-serve") <= light


def test_the_sdk_alone_imports(sdk_env: Path, tmp_path: Path):
    code = f"""
import importlib.util, baton, baton.client
assert "site-packages" in baton.__file__, baton.__file__
print(*(name for name in {SERVER_ONLY!r} if importlib.util.find_spec(name)))
"""
    done = run(sdk_env / "python", "-c", code, cwd=tmp_path)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [], "")


def test_the_command_says_what_to_install(sdk_env: Path, tmp_path: Path):
    done = run(sdk_env / "baton", "--help", cwd=tmp_path)
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1
    assert "baton-serve[server" in done.stderr
