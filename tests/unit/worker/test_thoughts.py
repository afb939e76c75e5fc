"""Thoughts and attempts that a worker remembers: the newest ones, up to a limit."""

import pytest

from baton.core import HandoffId, Thought
from baton.errors import StaleAttempt
from baton.rpc.thinking import thoughts_from_pb
from baton.worker.attempts import Attempts
from baton.worker.thoughts import Thoughts
from tests.support.sessions import H


def about(*chunks, by=1):
    return [Thought(chunk, (chunk, by)) for chunk in chunks]


def kept(thoughts, handoff=H):
    events = thoughts.said(handoff)
    assert len(events) <= 1
    assert all((e.handoff.request_id, e.handoff.attempt) == (handoff.request_id, handoff.attempt) for e in events)
    return [thought for event in events for thought in thoughts_from_pb(event.thoughts)]


@pytest.mark.parametrize("handoff", [H, HandoffId("other", 3)])
def test_all_is_said_in_one_event_under_any_name(handoff):
    thoughts = Thoughts()
    thoughts.add([])
    assert thoughts.said(handoff) == []
    thoughts.add(about(0, 1))
    thoughts.add([Thought(2, ())])
    thoughts.add(about(3))
    assert kept(thoughts, handoff) == [*about(0, 1), Thought(2, ()), *about(3)]
    assert len(thoughts) == 4


@pytest.mark.parametrize("begin", range(4))
def test_what_started_over_counts_from_there(begin):
    thoughts = Thoughts()
    thoughts.add(about(0, 1, 2))
    thoughts.add(about(begin, by=2))
    assert kept(thoughts) == [*about(*range(begin)), *about(begin, by=2)]


def test_what_does_not_lead_to_the_next_is_forgotten():
    thoughts = Thoughts()
    thoughts.add(about(0, 1))
    thoughts.add(about(3, 4))
    assert kept(thoughts) == about(3, 4)


def test_the_oldest_are_forgotten_when_it_is_too_much():
    thoughts = Thoughts(most_bytes=30)  # each takes 12
    thoughts.add(about(0, 1, 2, 3))
    assert kept(thoughts) == about(2, 3)
    thoughts.add(about(3, by=2))
    assert kept(thoughts) == [*about(2), *about(3, by=2)]
    thoughts.add([Thought(4, tuple(range(100)))])
    assert kept(thoughts) == []
    thoughts.add(about(5))
    assert kept(thoughts) == about(5)


def test_the_latest_requests_are_remembered_up_to_the_limit():
    attempts = Attempts(limit=2)
    for request in ("a", "b", "c"):
        attempts.saw(HandoffId(request, 2))
    for request in ("b", "c"):
        for attempt in (1, 2):
            with pytest.raises(StaleAttempt, match="attempt 2 was seen here already"):
                attempts.check_new(HandoffId(request, attempt))
        attempts.check_new(HandoffId(request, 3))
    attempts.check_new(HandoffId("a", 1))  # forgotten
    attempts.saw(HandoffId("b", 1))  # an older attempt takes nothing back, and the request was seen last
    attempts.saw(HandoffId("d", 1))
    attempts.check_new(HandoffId("c", 1))
    with pytest.raises(StaleAttempt, match="attempt 2"):
        attempts.check_new(HandoffId("b", 2))
