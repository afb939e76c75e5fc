"""docs/openai.md promises nothing that no test shows, and leaves out no field that is taken."""

import re
from pathlib import Path

import pytest

from router.openai.schema import ChatBody, CompletionBody

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs/openai.md").read_text()
TESTS = "".join((ROOT / f"tests/integration/test_gateway{name}.py").read_text() for name in ("", "_alone", "_tools"))
FORMS = TEXT[TEXT.index("| form | models |") :].partition("\n\n")[0]  # of what models write: no promise of fields
ROWS = [line for line in TEXT.replace(FORMS, "").splitlines() if line.startswith("| ") and not line.startswith("|--")]


def test_each_row_names_tests_that_exist():
    defined = set(re.findall(r"^async def (test_\w+)|^def (test_\w+)", TESTS, re.MULTILINE))
    known = {name for pair in defined for name in pair if name}
    heads = [row for row in ROWS if row.endswith("| test |")]
    assert len(ROWS) - len(heads) > 40
    for row in ROWS:
        if row not in heads:
            named = re.findall(r"`(test_\w+)`", row.rsplit("|", 2)[1])
            assert named, row
            assert set(named) <= known, row


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_each_field_has_a_row(body):
    named = set(re.findall(r"`(\w+)", "\n".join(row.split("|")[1] for row in ROWS)))
    assert set(body.model_fields) - {"stream_options"} <= named
