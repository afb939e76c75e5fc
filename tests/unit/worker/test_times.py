"""Workers report each span once, and keep a limited number of thoughts and attempts."""

from dataclasses import replace

import pytest

from baton.core import HandoffId, Sampling, Thought
from baton.engine.determinism.shapes import FixedShapes
from baton.errors import StaleAttempt
from baton.rpc.convert import thoughts_from_pb
from baton.testing import FakeClock
from baton.worker.events import Thoughts
from baton.worker.handoff_timing import DecodeTimes, span
from baton.worker.service import Attempts
from tests.support.fake_pusher import CUT, done_of
from tests.support.sessions import H, next_of, prefill, repush, reserve, spec_of
from tests.support.workers import DecodeSide, PrefillSide


def said(session, kind, handoff=H):
    spans = [one for event in session.told(handoff) if event.HasField(kind) for one in event.spans]
    assert len({one.name for one in spans}) == len(spans)
    return {one.name: one for one in spans}


@pytest.fixture
def side():
    return PrefillSide()


def test_a_prompt_that_is_computed_and_pushed(router, side):
    side.take(router, prefill())
    side.clock.advance(2)
    side.loop.step_began = side.clock.monotonic()
    side.run()
    assert not said(router, "tokens"), "the first token waits for nothing"
    side.clock.advance(3)
    side.pusher.done(H, done_of(64))
    side.loop.drain()
    spans = said(router, "pushed")
    assert list(spans) == ["wait", "compute", "push"]
    assert [spans[name].duration_s for name in spans] == [2, 0, 3]
    assert dict(spans["compute"].attributes) == {"tokens": "9", "cached_tokens": "0", "chunks": "1"}
    assert spans["push"].attributes["kv_bytes"] == "64"
    assert spans["push"].attributes["transport"] == "memory"
    assert {(one.role, one.process, one.attempt) for one in spans.values()} == {("", "", 0)}, "the router knows"


def test_a_push_that_failed_and_the_one_that_followed(router, side):
    side.serve(router, prefill())
    side.push_ends(H, CUT)
    first = said(router, "failed")
    assert list(first) == ["wait", "compute", "push"]
    assert first["push"].attributes["error"] == "ChannelBroken"
    side.clock.advance(5)
    side.take(router, repush())
    side.clock.advance(1)
    side.push_ends(next_of(H))
    again = said(router, "pushed", next_of(H))
    assert list(again) == ["push"], "the rest was said"
    assert again["push"].duration_s == 1


def test_a_handoff_at_both_ends(router, pair, side):
    pair.hand_over(router, upto="reported")
    pair.prefill.run()
    pair.decode.run()
    assert list(said(router, "pushed")) == ["wait", "compute", "push"]
    assert list(said(router, "committed")) == ["receive", "commit"]
    spans = said(router, "finish")
    made = str(len(router.tokens()) - 2)  # the first token comes from both workers
    assert list(spans) == ["decode"]
    assert (spans["decode"].attributes["tokens"], spans["decode"].attributes["steps"]) == (made, made)
    other = HandoffId("one token", 1)
    side.serve(router, prefill(other, spec_of(other, sampling=Sampling(max_tokens=1, temperature=0.0))))
    assert list(said(router, "finish", other)) == ["wait", "compute"]


def test_verify_passes_are_counted_for_those_that_were_part_of_them(router):
    side = DecodeSide(shapes=FixedShapes())
    spec = replace(spec_of(sampling=Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)), deterministic=True)
    side.serve(router, reserve(H, len(spec)), prefill(H, spec, to=None))
    spans = said(router, "finish")
    (finish,) = (e.finish for e in router.events if e.HasField("finish"))
    assert list(spans) == ["decode", "verify"]
    assert int(spans["verify"].attributes["passes"]) == side.engine.counters.verify_passes > 0
    assert finish.verify_s == pytest.approx(spans["verify"].duration_s)
    assert finish.verify_s > 0
    assert spans["decode"].attributes["prompt_tokens"] == str(len(spec))


def test_what_was_released_is_forgotten():
    times = DecodeTimes(FakeClock(), DecodeSide().engine.counters)
    times.begin(H, [1, 2], alone=False)
    assert [one.name for one in times.ended(H)] == ["decode"]
    assert (times.ended(H), times.verify_s(H)) == ([], 0)


def test_a_span_is_never_shorter_than_nothing():
    clock = FakeClock(5.0)
    assert span("x", 4, 3, clock).duration_s == 0
    assert span("x", 4, 4.5, clock, tokens=3) == span("x", 4, 4.5, clock, tokens=3)
    assert span("x", 4, 4.5, clock).start_s == 4


def about(*chunks, by=1):
    return [Thought(chunk, (chunk, by)) for chunk in chunks]


def kept(thoughts, handoff=H):
    events = thoughts.events(handoff)
    assert len(events) <= 1
    assert all((e.handoff.request_id, e.handoff.attempt) == (handoff.request_id, handoff.attempt) for e in events)
    return [thought for event in events for thought in thoughts_from_pb(event.thoughts)]


@pytest.mark.parametrize("handoff", [H, HandoffId("other", 3)])
def test_all_is_said_in_one_event_under_any_name(handoff):
    thoughts = Thoughts()
    thoughts.add([])
    assert thoughts.events(handoff) == []
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
    thoughts.add(about(5, 6))
    assert kept(thoughts) == about(5, 6), "what does not lead to the next is forgotten"


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
            with pytest.raises(StaleAttempt, match="attempt 2 was already seen here"):
                attempts.check_new(HandoffId(request, attempt))
        attempts.check_new(HandoffId(request, 3))
    attempts.check_new(HandoffId("a", 1))  # forgotten
    attempts.saw(HandoffId("b", 1))  # an older attempt changes nothing, but makes the request the most recent
    attempts.saw(HandoffId("d", 1))
    attempts.check_new(HandoffId("c", 1))
    with pytest.raises(StaleAttempt, match="attempt 2"):
        attempts.check_new(HandoffId("b", 2))
