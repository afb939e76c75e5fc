"""docs/reference/openai.md has each accepted field, each rejected field and each error code."""

import re
from pathlib import Path

import pytest

from router.openai import errors, parsing
from router.openai.schema import ChatBody, CompletionBody, StreamOptions

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs/reference/openai.md").read_text()


def first_cells(title: str) -> set[str]:
    """Return the names in the first column of a chapter's tables."""
    chapter = TEXT[TEXT.index(f"\n## {title}\n") :].partition("\n## ")[2].partition("\n## ")[0]
    rows = [line for line in chapter.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([\w.\[\]]+)`", row.split("|")[1])}


FIELDS = first_cells("Request fields")


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_each_field_has_a_row(body):
    assert set(body.model_fields) - {"stream_options"} <= FIELDS
    assert {f"stream_options.{name}" for name in StreamOptions.model_fields} <= FIELDS
    assert set(parsing._REFUSED[body]) <= FIELDS


def test_each_row_is_of_a_field():
    known = {name for body in (CompletionBody, ChatBody) for name in (*body.model_fields, *parsing._REFUSED[body])}
    assert {re.split(r"[.\[]", name)[0] for name in FIELDS} <= known


def test_each_error_has_a_row_with_its_status_type_and_code():
    rows = [line for line in TEXT.splitlines() if re.match(r"\| \d{3}", line)]
    for status, kind, code in errors.ANSWERS.values():
        if status != 499:
            assert any(line.startswith(f"| {status}") and f"`{kind}`" in line and f"`{code}`" in line for line in rows)
    assert any(line.startswith("| 405") and "`method_not_allowed`" in line for line in rows)
    source = "".join(file.read_text() for file in (ROOT / "router/openai").glob("*.py"))
    for status, code in re.findall(r'HttpError\((\d+), "(\w+)"', source):
        assert code == "internal" or any(status in line and f"`{code}`" in line for line in rows), code
