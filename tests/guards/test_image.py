"""The Dockerfile: rules and linters, and its steps below a folder that replaces the image's root.

It is pinned, does not run as root, and names only existing files. system.sh does not run here, because it needs root
and apt.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import dropwhile
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

import pytest

from baton.engine.kernels.cpu.compiler import machine
from tests.support.compiled_kernels import caching_compiler

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
IGNORED = (ROOT / ".dockerignore").read_text()
SCRIPTS = sorted((ROOT / "tools" / "image").glob("*.sh"))
PINNED = re.compile(r"[a-z0-9./-]+:[0-9][\w.-]*@sha256:[0-9a-f]{64}")
HOME = "/opt/baton"
BORROWED = ["bash", "tools/image/dependencies.sh", HOME]
NEEDS_A_SYSTEM = ["bash", "tools/image/system.sh"]
BUILDERS = sysconfig.get_path("purelib")  # where pip finds wheel builders without an index
PYTHONS_OWN = ("PYTHON", "VIRTUAL_ENV", "BATON")


class Step(NamedTuple):
    """An instruction. `flags` follow its name with --; `words` are the rest, split like a shell."""

    name: str
    flags: list[str]
    words: list[str]


def steps(text: str) -> list[Step]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, *rest = shlex.split(line)
        words = list(dropwhile(lambda word: word.startswith("--"), rest))
        flags = [word.removeprefix("--") for word in rest[: len(rest) - len(words)]]
        found.append(Step(name, flags, words))
    return found


def is_sent(path: str, ignored: str) -> bool:
    """Return whether .dockerignore (`ignored`) sends `path` to the builder. The last matching line counts."""
    parts = path.split("/")
    above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    sent = True
    for line in (line for line in ignored.splitlines() if line and not line.startswith("#")):
        pattern = line.removeprefix("!").removeprefix("**/")
        names = parts if "**/" in line else above
        if any(fnmatchcase(name, pattern) for name in names):
            sent = line.startswith("!")
    return sent


def mistakes(text: str) -> list[str]:
    """Return a Dockerfile's violations of this repository's rules."""
    found, stages, user = [], set(), "root"
    for name, flags, words in steps(text):
        match name:
            case "FROM":
                if words[0] not in stages and not PINNED.fullmatch(words[0]):
                    found.append(f"{words[0]} is not pinned by version and digest")
                stages.add(words[2])
                user = "root"
            case "USER":
                user = words[0]
            case "ADD" | "ENTRYPOINT":
                found.append(f"{name} is not used here")
            case "COPY" if not flags:
                found += [f"{source} is not there" for source in words[:-1] if not is_given(source)]
            case "RUN":
                script = words[words.index("bash") + 1] if "bash" in words else ""
                if not script.startswith("tools/image/") or not is_given(script):
                    found.append(f"RUN {' '.join(words)}: not a script in tools/image")
    if not re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", user):
        found.append(f"USER {user}: must be numbers, and not root")
    return found


def is_given(source: str) -> bool:
    """Return whether the builder receives this file or folder of the repository."""
    return (ROOT / source).exists() and is_sent(source, IGNORED)


def test_the_dockerfile_keeps_the_rules():
    assert mistakes(TEXT) == []


def test_the_builder_is_given_what_it_needs_and_no_more():
    unwanted = "models models/coin/config.json .git/config .venv/bin/pip baton/__pycache__/a.pyc tokens.yaml".split()
    sent = [path for path in ("baton/cli/app.py", "models/demo/config.json", *unwanted) if is_sent(path, IGNORED)]
    assert sent == ["baton/cli/app.py", "models/demo/config.json"]


def ask(linter: str, *args: str, text: str) -> str:
    program = Path(sys.executable).parent / linter
    if not program.exists():
        pytest.skip(f"{linter} is not here; where it has a wheel, make setup installs it")
    return subprocess.run([str(program), *args, "-"], input=text, text=True, capture_output=True, check=False).stdout


def test_hadolint_has_nothing_to_say():
    assert ask("hadolint", "--no-color", "--failure-threshold", "style", text=TEXT) == ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say_of_a_step(script: Path):
    text = script.read_text()
    assert text.startswith("#!/bin/bash\n# ")
    assert "set -euo pipefail" in text.splitlines()
    assert ask("shellcheck", text=text) == ""


# --- the steps


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
            self.env |= {"PIP_NO_INDEX": "1", "BATON_WHEEL_KERNELS": "avx2", "CC": caching_compiler()}

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
        is_ours = entry.name.startswith(("baton_serve", "_baton_serve", "_editable_impl_baton", "__editable__"))
        if not is_ours and not (there / entry.name).exists():
            (there / entry.name).symlink_to(entry)


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "borrows",
    [
        # In the group of test_distributions.py, which compiles the same kernels.
        pytest.param(
            True,
            id="borrowed",
            marks=[pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("distributions")],
        ),
        # A gigabyte from an index, and a minute or more: not in `make test`.
        pytest.param(False, id="fresh", marks=[pytest.mark.chaos, pytest.mark.timeout(1200)]),
    ],
)
def test_the_steps_make_something_that_serves(tmp_path: Path, borrows: bool):
    image = Image(tmp_path / "root", borrows)
    (tmp_path / "root" / "tmp").mkdir(parents=True)
    image.build(TEXT)
    scripts = [words[1] for words in image.ran]
    assert scripts == [f"tools/image/{name}.sh" for name in ("dependencies", "system", "wheel", "install")]
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
    has_avx2 = "avx2" in machine().flags
    image.env["BATON_CPU_LEVEL"] = "avx2" if has_avx2 else "none"  # the level of the wheel: nothing more is compiled
    doctor = image.call(["baton", "doctor", "--json"], elsewhere, BATON_HOME=str(tmp_path / "d"))
    assert not has_avx2 or "compiled for avx2 (bf16, f32), in the wheel" in doctor.stdout
    free = [word for listener in ("grpc", "metrics") for word in ("--set", f"router.{listener}=127.0.0.1:0")]
    model = ["baton", "serve", str(home / "models" / "demo"), "--port", "0", "--detach"]
    image.env["BATON_HOME"] = str(tmp_path / "state")
    served = image.call([*model, *free], elsewhere)
    try:
        assert served.returncode == 0, served.stdout + served.stderr
        url = re.findall(r"curl -s (\S+)/chat/completions", served.stdout)[0]
        asked = Request(f"{url}/completions", json.dumps({"prompt": "The color of dog", "temperature": 0}).encode())
        asked.add_header("content-type", "application/json")
        with urlopen(asked) as answer:
            assert "can vary widely" in json.loads(answer.read())["choices"][0]["text"]
    finally:
        image.call(["baton", "down"], elsewhere)
    assert files(home) == before, "the image must do without writing in itself"
