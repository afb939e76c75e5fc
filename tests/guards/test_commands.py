"""The commands that people are told to type exist, and CI runs the same ones."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {
    *("help", "setup", "proto", "fmt", "check", "test", "without-kernels", "chaos", "stress", "demo", "bench", "clean"),
}
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")


def targets() -> set[str]:
    """The targets of the Makefile that `make help` lists."""
    return set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def code(markdown: str) -> str:
    """What stands in fences and between backticks."""
    fences = re.findall(r"^```.*?$(.*?)^```", markdown, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL))
    return "\n".join(fences + spans)


def told_targets(document: str) -> set[str]:
    """The make targets that `document` tells people to use."""
    lines = re.findall(r"^\W*make ([a-z][\w -]*)", code((ROOT / document).read_text()), re.MULTILINE)
    return {word for line in lines for word in line.split()}


def test_every_target_is_there():
    assert targets() == TARGETS


def test_documents_name_existing_targets():
    unknown = {document: told_targets(document) - targets() for document in DOCUMENTS}
    assert not any(unknown.values()), unknown


def test_readme_tells_how_to_start():
    assert {"demo", "check", "test"} <= told_targets("README.md")


def test_ci_runs_the_commands_of_the_readme():
    assert (ROOT / ".ci/run").read_text().splitlines()[-1] == "make check test"


def test_version_is_the_same_everywhere():
    import baton

    assert baton.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
