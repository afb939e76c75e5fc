"""The sdist and its wheel: contents, the SDK alone, and the wheel of `make wheel` where no C compiler is.

Only one level of kernels is compiled here. The hook compiles each level in the same way. test_image.py serves with such
a wheel and asks the doctor for the origin of its kernels.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from baton.engine.kernels.cpu.compiler import machine
from tests.guards.test_constraints import needed
from tests.support.compiled_kernels import caching_compiler
from tests.support.time_factor import scaled

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("baton", "router", "prefill_workers", "decode_workers", "kvtransfer")
SERVER_ONLY = ("torch", "ray", "pydantic", "typer", "redis", "numpy")
BUILT = "baton/engine/kernels/cpu/built"
LOAD = "from baton.engine.kernels.cpu.compiler import load_library; print(*(load_library(one)._name for one in {!r}))"
COMPILES = "avx2" in machine().flags and bool(shutil.which("cc") or shutil.which("gcc"))
with_kernels = pytest.mark.skipif(not COMPILES, reason="this machine has no avx2, or no C compiler")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("distributions")]


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command without environment variables that refer to this tree or environment."""
    own = ("PYTHON", "VIRTUAL_ENV", "BATON")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(own)} | (env or {})
    argv = list(map(str, command))
    return subprocess.run(argv, cwd=cwd, env=clean, text=True, capture_output=True, check=False, timeout=scaled(600))


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from that sdist, with kernels if they can be compiled here."""
    out = tmp_path_factory.mktemp("dist")
    kernels = {"BATON_WHEEL_KERNELS": "avx2", "CC": caching_compiler()} if COMPILES else {}
    done = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, env=kernels)
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


def install(wheel: Path, python: Path) -> None:
    command = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel)
    done = run(*command)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def sdk_env(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment that has only the wheel and its base dependencies."""
    home = tmp_path_factory.mktemp("sdk")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    for name in needed("baton-serve"):
        borrow(name, Path(site))
    install(wheel, python)
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
    wanted |= {
        "configs/schema.json",
        "Dockerfile",
        ".dockerignore",
        "tools/image/wheel.sh",
        "tools/image/wheel_hook.py",
    }
    wanted |= {"models/demo/model.safetensors", "baton/engine/kernels/cpu/kernels.c"}
    assert wanted - names == set()
    assert not any(name.startswith(("shared/", ".venv", "dist/")) for name in names)


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


# --- the wheel with kernels and the demo model


@dataclass(frozen=True)
class Installed:
    """Runs commands of an environment in an empty folder, without a compiler, at one level."""

    site: Path
    bin: Path
    empty: Path
    state: Path

    def __call__(self, name: str, *args: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.empty), "CC": "", "BATON_CPU_LEVEL": "avx2", "BATON_HOME": str(self.state)}
        return run(self.bin / name, *args, cwd=self.empty, env=env)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """An environment that has the wheel, and the other distributions of this one."""
    home = tmp_path_factory.mktemp("env")
    venv.create(home, with_pip=False, symlinks=True)
    install(wheel, home / "bin" / "python")
    (site,) = home.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # read after the wheel, and without its .pth files
    (empty := home / "empty").mkdir()
    return Installed(site, home / "bin", empty, home / "state")


@with_kernels
def test_the_wheel_is_for_one_platform_and_has_kernels_and_the_demo(wheel: Path):
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    names = zipfile.ZipFile(wheel).namelist()
    kernels = sorted(Path(name).name.rpartition("-")[0] for name in names if name.startswith(BUILT))
    assert kernels == ["bf16-avx2", "f32-avx2"]
    assert {"baton/shipped/configs/local.yaml", "baton/shipped/models/demo/model.safetensors"} <= set(names)


@with_kernels
def test_kernels_of_the_wheel_are_loaded_without_a_compiler(installed: Installed):
    done = installed("python", "-c", LOAD.format(("bf16", "f32")))
    assert [Path(name).parent for name in done.stdout.split()] == [installed.site / BUILT] * 2, done.stderr
    assert not installed.state.exists()


@with_kernels
def test_the_demo_runs_outside_the_repository(installed: Installed):
    done = installed("baton", "demo", "--no-stay", "--set", "ray.address=none")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prefill-0" in done.stdout


@with_kernels
def test_kernels_of_other_sources_are_not_loaded(installed: Installed):
    """The last test here, because it changes the installed sources."""
    with (installed.site / BUILT).parent.joinpath("common.h").open("a") as file:
        file.write("\n")
    done = installed("python", "-c", LOAD.format(("f32",)))
    assert "no C compiler was found" in done.stderr
