"""The Dockerfile's steps, run below a folder that replaces the image's root, without system.sh (needs root and apt)."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.guards.dockerfile import ROOT, steps

HOME = "/opt/baton"
BORROWED = ["bash", "tools/image/dependencies.sh", HOME]
NEEDS_A_SYSTEM = ["bash", "tools/image/system.sh"]
BUILDERS = sysconfig.get_path("purelib")  # where pip finds wheel builders without an index
PYTHONS_OWN = ("PYTHON", "VIRTUAL_ENV", "BATON")


@dataclass
class Image:
    """The folder of all stages. They share one, because environments contain their path, and no paths conflict."""

    root: Path
    borrows: bool
    folder: Path = Path("/")
    env: dict[str, str] = field(default_factory=dict)
    ran: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.env = {name: text for name, text in os.environ.items() if not name.startswith(PYTHONS_OWN)}
        self.env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the base image's python3
        if self.borrows:
            self.env["PIP_NO_INDEX"] = "1"

    def at(self, path: str) -> Path:
        """Return the path here of a path in the image."""
        return self.root / (self.folder / path).relative_to("/")

    def build(self, text: str) -> None:
        for name, flags, words in steps(text):
            match name:
                case "WORKDIR":
                    self.folder = Path(words[0])
                    self.at(".").mkdir(parents=True, exist_ok=True)
                case "COPY" if flags:
                    assert words[0] == words[1], "the stages share one folder"
                case "COPY":
                    self.copy(words[:-1], words[-1])
                case "ENV":
                    self.env |= dict(self.below(word).split("=", 1) for word in words)
                case "RUN":
                    self.run(words, flags)

    def copy(self, sources: list[str], to: str) -> None:
        for source in sources:
            target = self.at(to) / Path(source).name if to.endswith("/") else self.at(to)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / source, target)

    def run(self, words: list[str], flags: list[str]) -> None:
        for flag in flags:
            mount = dict(part.split("=", 1) for part in flag.removeprefix("mount=").split(","))
            if "from" not in mount:
                self.at(mount["target"]).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / mount["source"], self.at(mount["target"]))
        self.ran.append(words)
        if self.borrows and words == BORROWED:
            borrow(self.at(HOME))
        elif words != NEEDS_A_SYSTEM:
            builders = {"PYTHONPATH": BUILDERS} if self.borrows and words[1] == "tools/image/wheel.sh" else {}
            done = self.call([self.below(word) for word in words], self.at("."), **builders)
            assert done.returncode == 0, done.stdout + done.stderr

    def below(self, text: str) -> str:
        """Replace the image's paths in `text` by those below the folder, and $PATH by this process's."""
        text = re.sub(rf"(?<![\w.])(?=({HOME}|/dist|/tmp)\b)", str(self.root), text)
        return text.replace("$PATH", self.env["PATH"])

    def call(self, command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=folder, env=self.env | more, text=True, capture_output=True, check=False)


def borrow(home: Path) -> None:
    """Create an environment with links to this one's packages except Baton, without a package index."""
    venv.create(home, with_pip=True, symlinks=True)
    here, there = Path(sysconfig.get_path("purelib")), next(home.glob("lib/python*/site-packages"))
    for entry in there.iterdir():
        if not entry.name.startswith("pip"):  # venv's other packages are older than the linked ones
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for entry in here.iterdir():
        is_ours = entry.name.startswith(("baton_serve", "_editable_impl_baton", "__editable__"))
        if not is_ours and not (there / entry.name).exists():
            (there / entry.name).symlink_to(entry)


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "borrows",
    [
        pytest.param(True, id="borrowed", marks=pytest.mark.slow),
        # A gigabyte from an index, and a minute or more: not in `make test`.
        pytest.param(False, id="fresh", marks=[pytest.mark.chaos, pytest.mark.timeout(1200)]),
    ],
)
def test_the_steps_make_something_that_serves(tmp_path: Path, borrows: bool):
    image = Image(tmp_path / "root", borrows)
    (tmp_path / "root" / "tmp").mkdir(parents=True)
    image.build((ROOT / "Dockerfile").read_text())
    scripts = [words[1] for words in image.ran]
    assert scripts == [f"tools/image/{name}.sh" for name in ("dependencies", "wheel", "system", "install")]
    home, elsewhere = image.at(HOME), tmp_path / "elsewhere"
    elsewhere.mkdir()
    before = files(home)
    where = image.call(["python", "-c", "import baton.cli; print(baton.cli.__file__)"], elsewhere)
    assert where.stdout.startswith(f"{home}/lib/"), where.stdout + where.stderr
    assert image.call(["baton", "--help"], elsewhere).returncode == 0
    for folder, file in ((home, "configs/local.yaml"), (elsewhere, str(home / "configs" / "no-ray.yaml"))):
        checked = image.call(["baton", "config", "validate", file], folder)
        assert checked.stdout.startswith(f"{file}: ok"), checked.stdout + checked.stderr
    shown = image.call(["baton", "config", "show", str(home / "configs" / "local.yaml")], elsewhere)
    assert f"path: {home}/models/demo" in shown.stdout
    answered = image.call(["baton", "demo", "-c", str(home / "configs" / "no-ray.yaml")], elsewhere)
    assert answered.returncode == 0, answered.stdout + answered.stderr
    assert "can vary widely" in answered.stdout
    assert files(home) == before, "the image must do without writing in itself"
