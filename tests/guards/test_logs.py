"""Names and keys of log events have one form; docs/reference/log-events.md lists them (test_reference.py compares)."""

import re

import pytest

from tools.log_events import events
from tools.reference import events as reference
from tools.reference.event_meanings import GROUPS


def test_names_and_keys_have_one_form():
    """A request is `request_id` and `attempt`, a worker `worker`, a cause `reason` or `error`. No event has prompts."""
    forbidden = {"request", "sender", "peer", "why", "cause", "prompt", "ids", "ref"}
    for name, logged in events().items():
        assert re.fullmatch(r"[a-z_*]+", name), name
        assert not logged.keys & forbidden, f"{name}: {logged.keys & forbidden}"


ONE_LESS = {name: meaning for name, meaning in GROUPS["any"].items() if name != "thread_failed"}


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ({"any": ONE_LESS}, r"no entry {'thread_failed'}"),
        ({"more": {"thread_failed": ("any", "")}}, "in two groups"),
        ({"more": {"never_logged": ("router", "")}}, r"no event \['never_logged'\]"),
    ],
)
def test_each_event_needs_one_entry_and_each_entry_an_event(monkeypatch, groups, problem):
    monkeypatch.setattr(reference, "GROUPS", {**GROUPS, **groups})
    with pytest.raises(ValueError, match=problem):
        reference.page()
