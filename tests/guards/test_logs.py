"""Names and keys of log events have one form; docs/reference/log-events.md lists them (test_reference.py compares)."""

from __future__ import annotations

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


def test_an_event_without_an_entry_is_an_error(monkeypatch):
    without = {name: meaning for name, meaning in GROUPS["any"].items() if name != "thread_failed"}
    monkeypatch.setattr(reference, "GROUPS", {**GROUPS, "any": without})
    with pytest.raises(ValueError, match=r"no entry {'thread_failed'}"):
        reference.page()


def test_an_event_in_two_groups_is_an_error(monkeypatch):
    monkeypatch.setattr(reference, "GROUPS", {**GROUPS, "more": {"thread_failed": ("any", "")}})
    with pytest.raises(ValueError, match="in two groups"):
        reference.page()


def test_an_entry_without_an_event_is_an_error(monkeypatch):
    monkeypatch.setattr(reference, "GROUPS", {**GROUPS, "more": {"never_logged": ("router", "")}})
    with pytest.raises(ValueError, match=r"no event \['never_logged'\]"):
        reference.page()
