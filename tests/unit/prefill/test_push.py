"""Pushes of a prefill worker: KV is sent during the prompt, never from freed blocks, and failures are handled."""

from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from baton.core import HandoffId, Sampling
from baton.errors import ChannelBroken, DigestMismatch, OfferRefused, StaleAttempt
from tests.support.fake_pusher import CUT
from tests.support.sessions import BACKEND, FakeSession, H, expected, next_of, prefill, release, repush, spec_of
from tests.support.workers import PROMPT_STATES, PrefillSide

LAYERS = BACKEND.layout.layers
POSITION = LAYERS * BACKEND.layout.layer_token_bytes  # bytes of one position
NEVER = 1 << 30


def test_kv_leaves_layer_by_layer_while_the_prompt_is_computed(chunked, router):
    chunked.take(router, prefill())
    push = chunked.pusher.pushes[H]
    told = []
    for _ in range(3):
        chunked.step()
        told.append(push.told)
        push.told = []
    assert told[0] == [(1, 4), (2, 4)]
    assert told[1] == [(2, 4), (1, 8), (2, 8)], "what was there before the step is said first, of all layers"
    assert told[2] == [(2, 8), (1, 9), (2, 9), (2, 9)]
    assert push.end is not None


@pytest.mark.parametrize(
    ("less", "skip", "streams"),
    [(9 * POSITION - 1, 0, True), (9 * POSITION, 0, False), (5 * POSITION, 3, True), (5 * POSITION, 4, False)],
)
def test_prompts_of_which_little_must_come_leave_when_they_are_computed(router, less, skip, streams):
    side = PrefillSide(coalesce_below=less, max_batched_tokens=4)
    side.serve(router, prefill(skip=skip))
    push = side.pusher.pushes[H]
    assert push.job.skip == skip
    assert push.told[-1] == (LAYERS, 9)
    assert (len(push.told) > 1) == streams


def test_the_first_token_leaves_before_the_last_of_its_kv():
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


@pytest.mark.parametrize("how", ["release", "gone", "another router"])
@pytest.mark.parametrize("state", PROMPT_STATES)
def test_whatever_the_state_a_release_frees_at_once(chunked, router, state, how):
    """The pusher fails the test if blocks are freed that it may still read."""
    chunked.bring(router, state)
    push, kinds = chunked.pusher.pushes.get(H), router.kinds()
    computed = chunked.engine.counters.prefill_tokens
    chunked.give_up(router, how)
    assert chunked.all_free
    if how == "another router":
        kinds.append("failed")  # its owner receives the reason
        assert router.failure.kind == "StaleAttempt"
    if push is not None:
        assert (push.blocks, push.aborted) == ((), True)
        if state != "queued":
            assert chunked.pusher.log[-2:] == [("abort", H), ("withdraw", H)]
        chunked.pusher.done(H, StaleAttempt("aborted"))
        chunked.give_up(router, how)  # between the report and the turn of the engine thread
    chunked.run()
    chunked.give_up(router, how)
    assert (router.kinds(), router.handoffs, chunked.all_free) == (kinds, set(), True)
    assert (chunked.engine.has_work(), chunked.engine.counters.prefill_tokens) == (False, computed)


@pytest.mark.parametrize("state", PROMPT_STATES)
def test_a_deadline_ends_what_is_not_computed_or_waits(chunked, router, state):
    chunked.bring(router, state)
    kinds = router.kinds()
    chunked.clock.advance(4.5)
    chunked.role.tick()
    assert (router.kinds(), chunked.all_free) == (kinds, "queued" in state)
    chunked.clock.advance(0.5)
    chunked.role.tick()
    if state in {"queued", "computing"}:
        kinds.append("failed")
        assert router.failure.kind == "DeadlineExceeded"
    if state == "computed":
        chunked.clock.advance(50.0)
        chunked.run()
        assert router.kinds() == ["tokens"], "a push has none"
        chunked.push_ends()
        kinds.append("pushed")
    assert chunked.all_free
    chunked.run()
    assert (router.kinds(), router.handoffs, chunked.engine.has_work()) == (kinds, set(), False)


def test_a_preempted_prompt_is_withdrawn_and_what_had_not_left_is_told_again(router):
    """An urgent prompt takes the blocks of a running one."""
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
    side.push_ends(urgent)
    side.run()
    assert push.end is not None
    frames = []
    while (frame := push.progress.next(1 << 16)) is not None:
        push.progress.took(frame)
        frames.append((frame.layers, frame.begin, frame.end))
    assert frames == [(range(1, 2), 0, 14), (range(1), 3, 14)]
    assert push.progress.complete
    side.push_ends(long)
    for handoff, spec in specs.items():
        assert router.ids(handoff) == expected(spec, 1)
    assert side.all_free


@pytest.mark.parametrize(
    ("error", "held"),
    [(CUT, True), (OfferRefused("full"), True), (StaleAttempt("none"), True), (DigestMismatch("frame 3"), False)],
)
def test_kv_waits_when_its_push_failed_but_for_bytes_that_changed_on_the_way(side, router, error, held):
    side.serve(router, prefill())
    owned = side.counts.owned if held else 0
    with capture_logs() as logs:
        side.push_ends(H, error)
    assert [event.get("held") for event in logs if event["event"] == "handoff_failed"] == [held or None]
    assert (router.failure.kind, router.failure.held) == (type(error).__name__, held)
    for _ in range(3):
        side.clock.advance(1000.0)
        side.run()
    assert (router.kinds(), side.counts.owned) == (["tokens", "failed"], owned)
    assert router.handoffs == ({H} if held else set())
    side.take(router, release())
    assert side.all_free


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
    side.serve(router, prefill(other), repush())
    assert list(side.pusher.pushes) == [other, next_of(H)]
    for handoff in list(side.pusher.pushes):
        side.push_ends(handoff)
    assert (router.kinds(next_of(H)), side.all_free) == (["tokens", "pushed"], True)


def test_what_waits_may_still_fail_or_end_with_its_first_token(chunked, router, monkeypatch):
    ends = HandoffId("ends", 1)
    chunked.take(router, prefill(ends, spec_of(ends, sampling=Sampling(max_tokens=1, temperature=0.0))))
    chunked.step()
    chunked.push_ends(ends, CUT)
    chunked.run()
    assert (router.kinds(ends), chunked.all_free) == (["failed", "tokens", "finish"], True)
    chunked.take(router, prefill())
    chunked.step()
    chunked.push_ends(H, CUT)
    monkeypatch.setattr(chunked.engine.backend, "forward", lambda batch, kv: 1 / 0)
    chunked.run()
    assert [event.failed.held for event in router.events if event.HasField("failed")][-2:] == [True, False]
    assert chunked.all_free
