"""Tutorials and how-to pages name what exists, and their programs are valid; tests/e2e/test_tutorials.py runs them."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from baton import errors
from baton.config.loading import known_keys, load_config
from tests.guards.documents import Document
from tools.log_events import events

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


def named(page: str, pattern: str) -> set[str]:
    """Return the names of this form that a page has in backticks."""
    return {found for said in document(page).code() for found in re.findall(pattern, said.text)}


def test_troubleshooting_names_errors_events_and_keys_that_exist():
    page = "docs/how-to/troubleshoot.md"
    text = (ROOT / page).read_text(encoding="utf-8")
    events_named = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"events? (?:`\w+`(?:, )?)+", text))))
    assert len(events_named) >= 10
    assert events_named <= set(events())
    classes = named(page, r"^([A-Z][a-z]+[A-Z]\w+|Overloaded|Unauthenticated)(?=$|:)")
    assert len(classes) >= 10
    assert all(issubclass(getattr(errors, name), errors.BatonError) for name in classes)
    keys = named(page, r"^((?:router|prefill|decode|transfer|ledger|security|model|redis|ray)\.[a-z_.]+)$")
    assert len(keys) >= 10
    assert keys <= set(known_keys())


def test_metric_names_exist():
    metrics = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    for page in ("docs/how-to/troubleshoot.md", "docs/how-to/from-vllm.md"):
        assert not [name for name in named(page, r"^baton_\w+$") if f"`{name}`" not in metrics]
    table = (ROOT / "docs/how-to/from-vllm.md").read_text(encoding="utf-8").split("\n## Metrics\n")[1].split("\n## ")[0]
    same = [row for row in table.splitlines() if "| same name" in row]
    names = [name for row in same for name in re.findall(r"`(vllm:\w+)`", row)]
    assert len(names) >= 15
    assert not [name for name in names if f"`{name}`" not in metrics]


def test_options_of_vllm_lead_to_keys_that_exist():
    text = (ROOT / "docs/how-to/from-vllm.md").read_text(encoding="utf-8")
    sections = "|".join(sorted({key.partition(".")[0] for key in known_keys() if "." in key}))
    keys = set(re.findall(rf"`((?:{sections})\.[a-z_.]+)(?:`|:)", text))
    assert len(keys) >= 20
    assert keys <= set(known_keys())
