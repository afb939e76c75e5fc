"""Streams that outlive their router: parked, attached, remembered within limits, and dropped."""

from dataclasses import replace

import pytest

from baton.limits import MAX_RECORD_BYTES
from decode_workers import detached_streams
from decode_workers.worker import RENEW_S
from tests.support.sessions import (
    GREEDY,
    STALE,
    FakeSession,
    H,
    attach,
    expected,
    next_of,
    prefill,
    release,
    reserve,
    spec_of,
)

LASTS_S = 30.0
ANSWER = expected()
SAMPLING = replace(GREEDY, seed=99)
OTHERS = {"prompt": (9, 9, 9), "cache_scope": "x", "priority": 5, "think_while_decoding": True, "sampling": SAMPLING}


def ends_free(side):
    side.run()
    assert (side.all_free, len(side.role.detached)) == (True, 0)
    assert not side.role._work
    assert not side.role.detached.no_router.handoffs


def test_a_router_dies_and_another_goes_on(begin, side, router, second):
    begin(router)
    assert (H, "router-d", "COMMITTED", "mine") in side.records.notes
    side.role.gone(router)
    assert not router.handoffs
    side.step()
    assert [held.state for held in side.role.holdings()] == ["parked"]
    side.take(second, attach(known=2))
    assert second.kinds()[0] == "attached"
    assert [getattr(e.tokens, "from") for e in second.events if e.HasField("tokens")] == [2, 3]
    assert [held.state for held in side.role.holdings()] == ["decoding"]
    side.run()
    assert second.ids() == ANSWER[2:]
    assert (second.kinds()[-1], len(side.role.detached)) == ("finish", 1), "it is kept until it is released"
    side.take(second, release())
    ends_free(side)
    assert not second.handoffs


def test_a_worker_that_leaves_does_not_wait_for_the_router_of_a_parked_stream(begin, side, router):
    side.attach_pusher()
    begin(router)
    side.step()
    side.role.gone(router)
    side.role.leave()
    assert (len(side.role.moves), side.all_free) == (0, True)
    ends_free(side)


def test_it_ends_while_nobody_is_there(begin, side, router, second):
    begin(router)
    side.role.gone(router)
    side.run()
    assert side.all_free, "what has ended holds no blocks"
    side.take(second, attach(known=2))
    assert (second.ids(), second.kinds()[-1]) == (ANSWER[2:], "finish")
    side.role.gone(second)  # before its client has the end
    third = FakeSession("router-c")
    side.take(third, attach(known=len(ANSWER)))
    assert third.kinds() == ["attached", "finish"]
    side.take(third, release())
    ends_free(side)
    assert not third.handoffs


def test_the_record_of_an_ended_stream_is_written_again_while_it_is_remembered(pair, begin, side, router):
    """The client may still wait for another choice of its request when the record would expire."""
    begin(router)

    def noted_after(seconds: float) -> list:
        side.records.notes.clear()
        pair.clock.advance(seconds)
        side.role.tick()
        return side.records.notes

    assert noted_after(RENEW_S) == [], "a running stream has a record that lives longer"
    side.run()
    assert [noted_after(RENEW_S / 2) for _ in range(2)][-1] == [(H, "", "RELEASED", "mine")]
    assert noted_after(RENEW_S / 2) == []
    assert noted_after(RENEW_S / 2) != []
    side.take(router, release())
    assert noted_after(2 * RENEW_S) == []


@pytest.mark.parametrize("state", ["decoding", "ended", "not resumable"])
def test_nobody_comes_in_time(pair, begin, side, router, second, state):
    """A stream that is not resumable ends with its router."""
    begin(router, resumable_s=0.0 if state == "not resumable" else LASTS_S)
    if state == "ended":
        side.run()
    side.role.gone(router)
    if state != "not resumable":
        pair.clock.advance(LASTS_S - 0.1)
        side.role.tick()
        assert len(side.role.detached) == 1
        pair.clock.advance(0.2)
        side.role.tick()
    side.take(second, attach(known=1))
    assert (second.kinds(), second.refusals) == (["refused"], [STALE])
    ends_free(side)


def test_its_time_begins_anew(pair, begin, side, router, second):
    begin(router)
    side.role.gone(router)
    pair.clock.advance(LASTS_S - 1)
    side.take(second, attach(known=1))
    pair.clock.advance(LASTS_S)
    side.role.tick()
    assert side.role.holdings()
    side.role.gone(second)
    pair.clock.advance(LASTS_S - 1)
    side.role.tick()
    assert [held.state for held in side.role.holdings()] == ["parked"]


@pytest.mark.parametrize("state", ["reserved", "computed"])
def test_before_the_commit_there_is_nothing_to_park(pair, side, router, state):
    side.take(router, reserve(resumable_s=LASTS_S))
    if state == "computed":
        pair.prefill.serve(router, prefill())
    side.role.gone(router)
    ends_free(side)


@pytest.mark.parametrize(
    "asked",
    [
        *(attach(1, replace(spec_of(), **{field: value})) for field, value in OTHERS.items()),
        attach(4),  # three are there
        attach(1, said=[ANSWER[0] + 1]),
    ],
    ids=[*OTHERS, "more than is there", "other tokens"],
)
def test_only_the_same_request_with_tokens_that_were_told_is_attached(begin, side, router, second, asked):
    begin(router)
    side.role.gone(router)
    side.take(second, asked)
    assert (second.kinds(), second.refusals) == (["refused"], [STALE])
    side.take(second, attach(1))
    assert second.kinds()[1] == "attached"
    side.take(second, release())
    ends_free(side)


def test_who_attaches_takes_it_from_whom_it_had(begin, side, router, second):
    """The older router lives, but its client has left. It receives a failure, and its later commands change nothing."""
    begin(router)
    side.take(second, attach(known=1))
    assert (router.failure.kind, router.failure.message) == ("Cancelled", "router router-b has taken over")
    side.take(router, release())
    side.role.gone(router)
    side.run()
    assert second.ids() == ANSWER[1:]
    side.take(second, release())
    ends_free(side)


@pytest.mark.parametrize("state", ["decoding", "ended"])
@pytest.mark.parametrize("order", ["gone, release", "release, gone", "gone, reserve"])
def test_a_router_that_was_cut_off_gives_its_old_attempt_up(begin, side, router, state, order):
    """It has connected again. The worker may see the end of the old connection later than the router."""
    begin(router)
    if state == "ended":
        side.run()
    again = FakeSession(router.router_id)
    for step in order.split(", "):
        if step == "gone":
            side.role.gone(router)
        else:
            side.take(again, release() if step == "release" else reserve(next_of(H), resumable_s=LASTS_S))
    if "reserve" in order:
        assert again.kinds() == ["reserved"]
        assert [held.handoff for held in side.role.holdings()] == [next_of(H)]
        side.take(again, release(next_of(H)))
    ends_free(side)
    assert not again.handoffs


@pytest.mark.parametrize("noticed", ["before", "after"])
@pytest.mark.parametrize("state", ["decoding", "ended"])
@pytest.mark.parametrize("late", [release(), reserve(next_of(H))], ids=["release", "reserve"])
def test_a_router_that_was_cut_off_leaves_a_stream_that_another_one_resumed(
    begin, side, router, second, state, late, noticed
):
    begin(router)
    if noticed == "before":
        side.role.gone(router)
    if state == "ended":
        side.run()
    side.take(second, attach(known=1))
    if noticed == "after":
        side.role.gone(router)
    side.take(again := FakeSession(router.router_id), late, release(next_of(H)))
    side.run()
    assert (second.ids(), second.kinds()[-1]) == (ANSWER[1:], "finish")
    assert again.kinds() == (["reserved"] if late.HasField("reserve") else [])
    assert len(side.role.detached) == 1, "a client may still come back for it"
    side.take(second, release())
    ends_free(side)


def test_what_is_remembered_is_kept_in_few_bytes(begin, side, router):
    begin(router)
    kept = side.role.detached._streams[H].events
    sent = [event.SerializeToString() for event in router.events if event.HasField("tokens")]
    assert list(kept) == list(enumerate(sent, start=1))


def test_what_is_remembered_is_bounded(begin, side, router, second, monkeypatch):
    begin(router, tokens=2)
    stream = side.role.detached._streams[H]
    monkeypatch.setattr(detached_streams, "MAX_RECORD_BYTES", most := 2 * stream.size)
    side.step(3)
    assert stream.first > 0
    assert stream.size <= most
    side.role.gone(router)
    side.take(second, attach(known=0))
    assert second.kinds() == ["refused"]
    side.take(second, attach(known=stream.first))
    assert second.ids() == ANSWER[stream.first : len(stream.ids)]
    assert second.events[1].attached.room == 0


@pytest.mark.parametrize("known", [0, 2])
def test_the_room_of_a_record_is_told(begin, side, router, second, known):
    """A router that subtracts each later event has the room that the worker has."""
    begin(router)
    side.take(second, attach(known=known))
    side.run()
    attached, *later = second.events
    used = sum(event.ByteSize() for event in later if event.HasField("tokens") or event.HasField("finish"))
    assert attached.attached.room - used == MAX_RECORD_BYTES - side.role.detached._streams[H].size


def test_who_says_more_alone_than_is_remembered_is_given_up(begin, side, router, monkeypatch):
    begin(router, tokens=1)
    side.role.gone(router)
    monkeypatch.setattr(detached_streams, "MAX_RECORD_BYTES", 1)
    side.step(2)
    ends_free(side)


def test_a_prompt_that_is_computed_here_is_parked_too(side, router, second):
    side.take(router, reserve(resumable_s=LASTS_S, stream="mine"), prefill(to=None))
    while len(router.ids()) < 2:
        side.step()
    side.role.gone(router)
    side.serve(second, attach(known=1))
    assert second.ids() == ANSWER[1:]
