"""The wheel of `make wheel`, installed where no C compiler is: its kernels are loaded, and `baton demo` runs.

Only one level is compiled here. The hook compiles each level in the same way.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.engine.kernels.cpu.compiler import machine
from tests.support.time_factor import scaled

ROOT = Path(__file__).resolve().parents[2]
BUILT = "baton/engine/kernels/cpu/built"
LOAD = "from baton.engine.kernels.cpu.compiler import load_library; print(load_library('{}')._name)"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("distributions"),
    pytest.mark.skipif("avx2" not in machine().flags, reason="this processor has no avx2"),
]


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    own = ("PYTHON", "VIRTUAL_ENV", "BATON")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    argv = list(map(str, command))
    return subprocess.run(
        argv, cwd=cwd, env=clean | env, text=True, capture_output=True, check=False, timeout=scaled(600)
    )


@dataclass(frozen=True)
class Installed:
    """Runs commands of an environment in an empty folder, without a compiler, at one level."""

    site: Path
    bin: Path
    empty: Path
    state: Path

    def __call__(self, name, *args):
        env = {"PATH": str(self.empty), "CC": "", "BATON_CPU_LEVEL": "avx2", "BATON_HOME": str(self.state)}
        return run(self.bin / name, *args, cwd=self.empty, **env)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    done = run(*command, cwd=ROOT, BATON_WHEEL_KERNELS="avx2")
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def sdist(wheel):
    return next(wheel.parent.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment that has the wheel, and the other distributions of this one."""
    home = tmp_path_factory.mktemp("env")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    command = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel)
    done = run(*command, cwd=home)
    assert done.returncode == 0, done.stderr
    (site,) = home.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # read after the wheel, and without its .pth files
    (empty := home / "empty").mkdir()

    return Installed(site, home / "bin", empty, home / "state")


def test_the_wheel_is_for_one_platform_and_has_kernels_and_the_demo(wheel):
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    names = zipfile.ZipFile(wheel).namelist()
    kernels = sorted(Path(name).name.rpartition("-")[0] for name in names if name.startswith(BUILT))
    assert kernels == ["bf16-avx2", "f32-avx2"]
    assert {"baton/shipped/configs/local.yaml", "baton/shipped/models/demo/model.safetensors"} <= set(names)


@pytest.mark.parametrize("element", ["bf16", "f32"])
def test_kernels_of_the_wheel_are_loaded_without_a_compiler(installed, element):
    done = installed("python", "-c", LOAD.format(element))
    assert Path(done.stdout.strip()).parent == installed.site / BUILT, done.stderr
    assert not installed.state.exists()


def test_the_doctor_names_their_origin(installed):
    findings = json.loads(installed("baton", "doctor", "--json").stdout)
    assert "compiled for avx2 (bf16, f32), in the wheel" in str(findings)


def test_the_demo_runs_outside_the_repository(installed):
    done = installed("baton", "demo", "--no-stay", "--set", "ray.address=none")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prefill-0" in done.stdout


def test_serve_answers_http_outside_the_repository(installed):
    """As a newcomer does it: `baton serve` on the shipped model, then a first request."""
    free = [f"--set=router.{name}=127.0.0.1:0" for name in ("grpc", "metrics")]
    try:
        started = installed("baton", "serve", "--port", "0", "--detach", *free)
        assert started.returncode == 0, started.stdout + started.stderr
        (base,) = re.findall(r"HTTP +(http://\S+)/v1", started.stdout)
        body = json.dumps({"prompt": "The color of dog", "max_tokens": 8, "temperature": 0}).encode()
        asked = urllib.request.Request(f"{base}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=scaled(60)) as reply:
            assert json.load(reply)["choices"][0]["text"] == " can vary widely"
    finally:
        assert installed("baton", "down", "--name", "serve").returncode == 0


def test_the_sdist_has_what_a_wheel_is_made_of(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"models/demo/model.safetensors", "configs/local.yaml", "tools/image/wheel_hook.py"} <= names
    assert any(name.startswith("baton/engine/kernels/cpu/") and name.endswith(".c") for name in names)
    assert not any(name.startswith(("shared/", ".venv", "dist/")) for name in names)


def test_kernels_of_other_sources_are_not_loaded(installed):
    """The last test here, because it changes the installed sources."""
    with (installed.site / BUILT).parent.joinpath("common.h").open("a") as file:
        file.write("\n")
    done = installed("python", "-c", LOAD.format("f32"))
    assert "no C compiler was found" in done.stderr
