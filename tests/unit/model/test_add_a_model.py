"""docs/how-to/add-a-model.md, followed: its blocks of code add a family that equals transformers."""

import re
from pathlib import Path
from typing import Any

import pytest

from baton.engine.models.families import FAMILIES
from tests.unit.model import checkpoints
from tests.unit.model.test_families import assert_equals_transformers

PAGE = Path(__file__).resolve().parents[3] / "docs/how-to/add-a-model.md"


@pytest.mark.slow
def test_the_page_adds_a_family(tmp_path: Path, monkeypatch, seed: int):
    family, variants = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(family.splitlines()) <= 50, "as the page has it, with the row of the table"
    found: dict[str, Any] = {"Variant": checkpoints.Variant}
    exec(family, found)
    [(name, row)] = found["FAMILIES"].items()
    assert name not in FAMILIES
    monkeypatch.setitem(FAMILIES, name, row)
    exec(variants, found)
    monkeypatch.setitem(checkpoints.CLASSES, name, found["CLASSES"][name])
    for key, variant in found["NATIVE"].items():
        assert_equals_transformers(variant, tmp_path / key, seed)
