"""The programs and cluster files of tutorials and how-to pages are valid; tests/e2e/test_tutorials.py runs them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

from baton.config.loading import load_config
from tests.guards.documents import Document

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ("first-cluster", "own-model", "openai-clients", "watch-a-request", "kill-a-worker")
PAGES = [*(f"docs/tutorials/{name}.md" for name in TUTORIALS), "docs/how-to/from-vllm.md"]


def document(name: str) -> Document:
    return Document(name, (ROOT / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PAGES)
def test_programs_and_cluster_files_are_valid(name, tmp_path):
    for language, text in document(name).fences():
        if language == "python":
            ast.parse(text, name)
        elif language == "yaml":
            file = tmp_path / "cluster.yaml"
            tree = yaml.safe_load(text)
            file.write_text(yaml.safe_dump(tree | {"model": tree["model"] | {"path": "oracle"}}), encoding="utf-8")
            assert load_config(file, [], {}).name == tree["name"]


def test_each_tutorial_is_known_and_cleans_up():
    """A tutorial that is not in the list would not run, and one without `baton down` leaves a cluster behind."""
    assert sorted(TUTORIALS) == sorted(path.stem for path in (ROOT / "docs/tutorials").glob("*.md"))
    for name in TUTORIALS:
        fences = document(f"docs/tutorials/{name}.md").fences()
        lines = [line for language, text in fences if not language for line in text.splitlines()]
        starts, ends = (sum(line.startswith(start) for line in lines) for start in ("baton up", "baton down"))
        assert starts == ends > 0, name
