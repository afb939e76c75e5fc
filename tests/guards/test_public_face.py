"""The public face of the product is the recorded one: names, commands, keys, metrics, events, messages, errors."""

import pytest

from tools.public_face import SECTIONS, changes, collected, recorded

pytestmark = pytest.mark.xdist_group("public_face")  # only one process imports the product


@pytest.mark.parametrize("section", SECTIONS)
def test_the_face_is_the_recorded_one(section: str):
    if found := changes(section, recorded().get(section, ()), collected(section)):
        pytest.fail(found, pytrace=False)


def test_the_file_has_these_sections_and_no_section_is_empty():
    assert [name for name, facts in recorded().items() if facts] == [*SECTIONS]


def test_a_change_is_shown_with_the_command_that_accepts_it():
    assert changes("http", ["GET /a", "GET /b"], ["GET /b", "GET /c"]).splitlines() == [
        "the public face changed, section http: 1 removed, 1 added",
        "  - GET /a",
        "  + GET /c",
        "if this is on purpose: python -m tools.public_face",
    ]
