"""How KV leaves a prefill worker: while it is computed, never out of blocks that others may have, and what if not."""

from dataclasses import replace

import pytest

from baton.core import HandoffId, Sampling
from baton.errors import ChannelBroken, DigestMismatch, OfferRefused, StaleAttempt
from tests.unit.worker.pusher import done_of
from tests.unit.worker.support import (
    BACKEND,
    FakeSession,
    H,
    PrefillSide,
    next_of,
    prefill,
    release,
    repush,
    spec_of,
)

LAYERS = BACKEND.layout.layers
POSITION = LAYERS * BACKEND.layout.layer_token_bytes  # bytes of one position
NEVER = 1 << 30


@pytest.fixture
def side():
    return PrefillSide()


@pytest.fixture
def router():
    return FakeSession()


# --- when it leaves


def test_kv_leaves_layer_by_layer_while_the_prompt_is_computed(router):
    side = PrefillSide(max_batched_tokens=4)
    side.take(router, prefill())
    push = side.pusher.pushes[H]
    told = []
    for _ in range(3):
        side.step()
        told.append(push.told)
        push.told = []
    assert told[0] == [(1, 4), (2, 4)]
    assert told[1] == [(2, 4), (1, 8), (2, 8)], "what was there before the step is said first, of all layers"
    assert told[2] == [(2, 8), (1, 9), (2, 9), (2, 9)]
    assert push.end is not None


@pytest.mark.parametrize(("less", "streams"), [(9 * POSITION - 1, True), (9 * POSITION, False)])
def test_short_prompts_leave_when_they_are_computed(router, less, streams):
    side = PrefillSide(coalesce_below=less, max_batched_tokens=4)
    side.take(router, prefill())
    side.run()
    told = side.pusher.pushes[H].told
    assert told[-1] == (LAYERS, 9)
    assert (len(told) > 1) == streams


def test_only_what_must_come_makes_a_prompt_long(router):
    side = PrefillSide(coalesce_below=5 * POSITION)
    for number, skip in enumerate((3, 4)):
        handoff = HandoffId(f"r{number}", 1)
        side.take(router, prefill(handoff, skip=skip))
        assert side.pusher.pushes[handoff].job.skip == skip
    side.run()
    assert [len(push.told) > 1 for push in side.pusher.pushes.values()] == [True, False]


def test_what_was_in_the_prefix_cache_leaves_with_the_first_layer(side, router):
    side.take(router, prefill(HandoffId("before", 1), spec_of(H)))
    side.run()
    side.take(router, prefill())
    side.run()
    assert side.pusher.pushes[H].told == [(2, 8), (1, 9), (2, 9), (2, 9)]
    assert router.events[-1].cached_tokens == 8


def test_the_first_token_leaves_before_the_last_of_its_kv():
    """It does not wait for the transfer: the pusher hears of the end after the router has its token."""
    side = PrefillSide(coalesce_below=NEVER)
    told_before = []

    class Listening(FakeSession):
        def emit(self, events):
            super().emit(events)
            push = side.pusher.pushes[H]
            told_before.append((push.end, list(push.told)))

    side.take(Listening(), prefill())
    side.run()
    assert told_before == [(None, [])]
    assert side.pusher.pushes[H].told == [(LAYERS, 9)]
    assert side.pusher.pushes[H].end is not None


def test_a_model_without_layers_to_tell_still_hands_over(side, router, monkeypatch):
    """A backend that never calls back, as one whose graph runs as a whole: all is said at the end."""
    forward = side.engine.backend.forward

    def silent(batch, kv):
        object.__setattr__(batch, "on_layer", None)
        return forward(batch, kv)

    monkeypatch.setattr(side.engine.backend, "forward", silent)
    side.take(router, prefill())
    side.run()
    assert side.pusher.pushes[H].told == [(2, 9)]
    assert side.pusher.pushes[H].end is not None


# --- when its blocks go


HOW = ["release", "gone", "another router"]


@pytest.mark.parametrize(("how", "steps"), [*((how, n) for how in HOW for n in (1, 3)), ("deadline", 1), ("fault", 1)])
def test_the_push_is_withdrawn_before_its_blocks_are_let_go(router, how, steps, monkeypatch):
    """(The pusher fails the test if blocks are let go that it may still read.)"""
    side = PrefillSide(max_batched_tokens=4)
    side.take(router, prefill(deadline_s=5.0))
    for _ in range(steps):
        side.step()
    push = side.pusher.pushes[H]
    assert push.blocks
    if how == "release":
        side.take(router, release())
    elif how == "gone":
        side.role.gone(router)
    elif how == "another router":
        side.take(FakeSession("router-b"), release())
    elif how == "deadline":
        side.clock.advance(5.0)
        side.role.tick()
    else:
        monkeypatch.setattr(side.engine.backend, "forward", lambda batch, kv: 1 / 0)
        side.step()
    assert (push.blocks, push.aborted) == ((), True)
    assert side.all_free
    side.pusher.done(H, StaleAttempt("aborted"))
    side.run()
    assert side.all_free
    assert router.handoffs == set()


def test_a_preempted_prompt_is_withdrawn_and_what_had_not_left_is_told_again(router):
    """An urgent one takes its blocks in the middle of it."""
    side = PrefillSide(blocks=5, max_batched_tokens=6, prefix_cache=False)
    long, urgent = HandoffId("long", 1), HandoffId("urgent", 1)
    specs = {long: spec_of(long, 14), urgent: replace(spec_of(urgent, 12), priority=2)}
    side.take(router, prefill(long, specs[long]))
    side.step()
    push = side.pusher.pushes[long]
    push.progress.took(push.progress.next(3 * BACKEND.layout.layer_token_bytes))  # three positions of the first layer
    side.take(router, prefill(urgent, specs[urgent]))
    side.step()
    assert side.engine.counters.preemptions == 1
    assert side.pusher.log[-1] == ("withdraw", long)
    assert (push.blocks, push.progress.next(1 << 16), push.aborted) == ((), None, False)
    while side.pusher.pushes[urgent].end is None:
        side.step()
    side.pusher.done(urgent, done_of())
    side.run()
    assert push.end is not None
    frames = []
    while (frame := push.progress.next(1 << 16)) is not None:
        push.progress.took(frame)
        frames.append((frame.layers, frame.begin, frame.end))
    assert frames == [(range(1, 2), 0, 14), (range(1), 3, 14)]
    assert push.progress.complete
    side.pusher.done(long, done_of())
    side.run()
    for handoff, spec in specs.items():
        assert [t.token_id for t in router.tokens(handoff)] == BACKEND.expected(spec, 1)
    assert side.all_free


# --- when it fails


@pytest.mark.parametrize("error", [ChannelBroken("cut"), OfferRefused("full"), StaleAttempt("no reservation")])
def test_kv_waits_when_its_push_failed(side, router, error):
    side.take(router, prefill())
    side.run()
    owned = side.counts.owned
    side.pusher.done(H, error)
    side.run()
    assert router.kinds() == ["tokens", "failed"]
    assert (router.events[-1].failed.kind, router.events[-1].failed.held) == (type(error).__name__, True)
    assert side.counts.owned == owned > 0
    for _ in range(3):
        side.clock.advance(1000.0)
        side.run()
    assert router.kinds() == ["tokens", "failed"]
    assert side.counts.owned == owned
    side.take(router, release())
    assert side.all_free


def test_bytes_that_changed_on_the_way_are_not_kept(side, router):
    side.take(router, prefill())
    side.run()
    side.pusher.done(H, DigestMismatch("frame 3"))
    side.run()
    assert router.kinds() == ["tokens", "failed"]
    assert (router.events[-1].failed.kind, router.events[-1].failed.held) == ("DigestMismatch", False)
    assert side.all_free
    assert router.handoffs == set()


@pytest.mark.parametrize("how", ["release", "gone", "deadline", "another router"])
@pytest.mark.parametrize("computed", [False, True])
def test_what_waits_ends_without_a_word_when_nobody_wants_it(router, how, computed):
    side = PrefillSide(max_batched_tokens=4)
    side.take(router, prefill(deadline_s=5.0))
    if computed:
        side.run()
    else:
        side.step()
    side.pusher.done(H, ChannelBroken("cut"))
    side.loop.drain()
    said = router.kinds()
    assert said[-1] == "failed"
    assert not side.all_free
    if how == "release":
        side.take(router, release())
    elif how == "gone":
        side.role.gone(router)
    elif how == "deadline":
        side.clock.advance(4.9)
        side.role.tick()
        assert not side.all_free
        side.clock.advance(0.2)
        side.role.tick()
    else:
        side.take(FakeSession("router-b"), release())
        said.append("failed")  # its owner hears who did it
    assert side.all_free
    side.run()
    assert router.kinds() == said
    assert router.handoffs == set()
    assert not side.engine.has_work()


@pytest.mark.parametrize("error", [ChannelBroken("the sender was closed"), ValueError("contradicts itself")])
def test_a_push_that_is_not_taken_waits_as_well_and_others_go_on(side, router, error):
    side.pusher.refuse = error
    side.take(router, prefill())
    assert router.kinds() == ["failed"]
    assert router.events[0].failed.held
    side.run()
    assert router.kinds() == ["failed", "tokens"], "the prompt is computed all the same"
    side.pusher.refuse = None
    other = HandoffId("s", 1)
    side.take(router, prefill(other))
    side.take(router, repush())
    side.run()
    assert list(side.pusher.pushes) == [other, next_of(H)]
    for handoff in list(side.pusher.pushes):
        side.pusher.done(handoff, done_of())
    side.run()
    assert router.kinds(next_of(H)) == ["tokens", "pushed"]
    assert side.all_free


def test_what_waits_may_still_fail_or_end_with_its_first_token(router, monkeypatch):
    side = PrefillSide(max_batched_tokens=4)
    ends = HandoffId("ends", 1)
    side.take(router, prefill(ends, spec_of(ends, sampling=Sampling(max_tokens=1, temperature=0.0))))
    side.step()
    side.pusher.done(ends, ChannelBroken("cut"))
    side.run()
    assert router.kinds(ends) == ["failed", "tokens", "finish"]
    assert side.all_free
    side.take(router, prefill())
    side.step()
    side.pusher.done(H, ChannelBroken("cut"))
    side.loop.drain()
    monkeypatch.setattr(side.engine.backend, "forward", lambda batch, kv: 1 / 0)
    side.run()
    assert [event.failed.held for event in router.events if event.HasField("failed")][-2:] == [True, False]
    assert side.all_free


def test_a_report_that_comes_after_the_release_says_nothing(side, router):
    for number, outcome in enumerate((done_of(), ChannelBroken("cut"), DigestMismatch("frame 3"))):
        handoff = HandoffId(f"r{number}", 1)
        side.take(router, prefill(handoff))
        side.run()
        side.pusher.done(handoff, outcome)
        side.take(router, release(handoff))
        side.run()
        assert router.kinds(handoff) == ["tokens"]
    assert side.all_free
