"""The Dockerfile is pinned, does not run as root, names only existing files, and passes hadolint and shellcheck."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guards.dockerfile import ROOT, is_sent, steps

TEXT = (ROOT / "Dockerfile").read_text()
IGNORED = (ROOT / ".dockerignore").read_text()
SCRIPTS = sorted((ROOT / "tools" / "image").glob("*.sh"))
PINNED = re.compile(r"[a-z0-9./-]+:[0-9][\w.-]*@sha256:[0-9a-f]{64}")


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
