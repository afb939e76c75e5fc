"""The next attempt of a held prompt: pushed again under a new id, not computed again."""

import pytest

from baton.core import HandoffId, Incarnation, SequenceSpec, WorkerRef
from baton.errors import ChannelBroken, DigestMismatch, InvalidRequest, StaleAttempt
from kvtransfer.handoff import PushJob
from tests.support.fake_pusher import CUT, done_of
from tests.support.sessions import GREEDY, STALE, FakeSession, H, expected, next_of, prefill, release, repush, spec_of
from tests.support.workers import PROMPT_STATES, PrefillSide

D2 = WorkerRef("decode-1", Incarnation(7, 9), "127.0.0.1:3")
H2 = next_of(H)
FIRST = expected(tokens=1)


@pytest.fixture
def side(chunked):
    return chunked


@pytest.mark.parametrize("state", PROMPT_STATES)
def test_nothing_is_computed_twice_and_all_is_pushed_again(side, router, state):
    side.bring(router, state)
    old = side.pusher.pushes.get(H)
    side.take(router, repush(to=D2, skip=3))
    if old is not None:
        assert (old.aborted, old.blocks) == (True, ()), "the old one reads no more"
        side.pusher.done(H, StaleAttempt("aborted"))
    side.run()
    push = side.pusher.pushes[H2]
    assert push.job == PushJob(H2, D2, 9, 3)
    assert side.engine.counters.prefill_tokens == 9
    assert push.progress.next(1 << 16).end == 9
    assert push.end.spec == SequenceSpec(spec_of().prompt, GREEDY, tuple(FIRST))
    said = ["tokens"] * state.startswith("computed") + ["failed"] * state.endswith("waits")
    assert router.kinds(H) == said, "the old name ends without another word"
    assert router.kinds(H2) == ["tokens"]
    assert ([(t.index, t.token_id) for t in router.tokens(H2)], router.handoffs) == ([(0, FIRST[0])], {H2})
    side.push_ends(H2)
    assert (router.kinds(H2), side.all_free, router.handoffs) == (["tokens", "pushed"], True, set())


@pytest.mark.parametrize("outcome", [done_of(), CUT, DigestMismatch("frame 3"), StaleAttempt("x")])
@pytest.mark.parametrize("state", ["computing", "computed"])
def test_the_end_of_the_old_push_is_no_end_of_the_new_one(side, router, state, outcome):
    """The old push may have ended before the Repush without the engine thread having seen it."""
    side.bring(router, state)
    side.pusher.done(H, outcome)
    side.take(router, repush())
    said = router.kinds(H)
    side.run()
    assert router.kinds(H) == said
    assert router.kinds(H2) == ["tokens"]
    assert side.counts.owned > 0
    side.push_ends(H2)
    assert (router.kinds(H2), side.all_free) == (["tokens", "pushed"], True)


def test_the_first_token_is_said_again_with_all_that_was_said_of_it(router):
    side = PrefillSide()
    other = HandoffId("before", 1)
    for handoff in (other, H):
        side.serve(router, prefill(handoff, spec_of(H)))
    side.take(router, repush())
    (old,), (new,) = router.told(H), router.told(H2)
    assert old.cached_tokens == 8
    new.handoff.attempt = 1
    assert new == old


@pytest.mark.parametrize("state", ["computing", "computed, waits"])
def test_the_deadline_is_the_new_ones(side, router, state):
    side.bring(router, state)
    side.take(router, repush(deadline_s=50.0))
    side.clock.advance(20.0)
    side.run()
    assert router.kinds(H2) == ["tokens"]
    side.push_ends(H2, CUT)
    assert not side.all_free
    side.clock.advance(30.0)
    side.run()
    assert side.all_free


@pytest.mark.parametrize("state", ["computing, waits", "computed, waits"])
def test_it_waits_no_more(side, router, state):
    """A push after a Repush has only its own deadline, and its prompt fails if it is too late."""
    side.bring(router, state)
    side.take(router, repush(deadline_s=10.0))
    side.clock.advance(10.0)
    side.role.tick()
    if state.startswith("computed"):
        assert router.kinds(H2) == ["tokens"]
        side.push_ends(H2)
        assert router.kinds(H2) == ["tokens", "pushed"]
    else:
        assert router.events[-1].failed.kind == "DeadlineExceeded"
    assert side.all_free


def test_a_new_push_that_is_not_taken_waits_like_any_other(side, router):
    side.bring(router, "computed, waits")
    side.pusher.refuse = ChannelBroken("the sender was closed")
    side.take(router, repush())
    assert router.kinds(H2) == ["failed", "tokens"]
    assert next(event for event in router.events if event.handoff.attempt == 2).failed.held
    side.pusher.refuse = None
    side.take(router, repush(H2, next_of(H2)))
    assert side.engine.counters.prefill_tokens == 9
    side.push_ends(next_of(H2))
    assert side.all_free


@pytest.mark.parametrize("how", ["never", "released", "pushed", "mismatch", "too late"])
def test_it_is_stale_when_nothing_is_held(side, router, how):
    if how != "never":
        side.bring(router, "computed" if how in {"pushed", "mismatch"} else "computed, waits")
    match how:
        case "released":
            side.take(router, release())
        case "pushed" | "mismatch":
            side.push_ends(H, done_of() if how == "pushed" else DigestMismatch("frame 3"))
        case "too late":
            side.clock.advance(6.0)
    side.run()
    begun = len(side.pusher.log)
    side.serve(router, repush())
    assert (router.kinds(H2), router.refusals, side.all_free) == (["refused"], [STALE], True)
    assert len(side.pusher.log) == begun
    side.serve(router, prefill(H2))
    assert router.kinds(H2) == ["refused", "tokens"], "the attempt is not used up"
    side.serve(router, release(H2), prefill(H), prefill(H2))
    assert (router.refusals, side.all_free) == ([STALE] * 3, True)


@pytest.mark.parametrize("state", PROMPT_STATES)
def test_it_is_stale_when_another_router_asks(side, router, state):
    side.bring(router, state)
    other = FakeSession("router-b")
    side.take(other, repush(), prefill())
    assert other.refusals == [STALE, STALE]
    side.run()
    assert H2 not in side.pusher.pushes
    side.serve(router, repush())
    assert router.kinds(H2) == ["tokens"]
    assert other.kinds() == ["refused", "refused"]


@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_attempts_may_be_left_out_and_older_ones_are_stale(side, router, attempt):
    """A decode worker rejected the attempts in between, so they never arrived. The held KV stays as it was."""
    held, old = HandoffId("r", 3), HandoffId("r", attempt)
    side.serve(router, prefill(H))
    side.take(router, repush(H, held), repush(held, old), prefill(old))
    assert router.refusals == [STALE, STALE]
    assert not side.pusher.pushes[held].aborted
    side.push_ends(held)
    assert router.kinds(held)[0] == "tokens"
    assert (router.kinds(held)[-1], side.all_free) == ("pushed", True)


@pytest.mark.parametrize("skip", [9, 10, 2**31])
@pytest.mark.parametrize("state", ["computing", "computed, waits"])
def test_a_skip_of_all_is_refused_by_name_and_what_is_held_goes_on(side, router, state, skip):
    side.bring(router, state)
    with pytest.raises(InvalidRequest, match="skip"):
        side.role.command(router, repush(skip=skip))
    side.run()
    side.serve(router, repush(skip=8))
    assert router.kinds(H2) == ["tokens"]
    assert side.pusher.pushes[H2].job.skip == 8
    assert side.engine.counters.prefill_tokens == 9


A, B, C = (HandoffId(name, 1) for name in "abc")


@pytest.fixture
def full(router):
    """A worker without free blocks after two prompts, which it has computed as A and B."""
    made = PrefillSide(6)
    made.serve(router, prefill(A), prefill(B))
    assert made.counts.available == 0
    return made


@pytest.mark.parametrize(
    ("waits", "length", "left"),
    [([B, A], 9, {B}), ([A, B], 16, set()), ([A, B], 0, {A, B})],
    ids=["the oldest prompt", "as many as it takes", "none without need"],
)
def test_what_waits_is_given_up_for_a_prompt_that_finds_no_block(full, router, waits, length, left):
    """Otherwise the prompt could wait for them forever."""
    for handoff in waits:
        full.push_ends(handoff, CUT)
    if length:
        full.serve(router, prefill(C, spec_of(C, length)))
        assert router.kinds(C) == ["tokens"]
    full.step()
    assert set(full.role._work) - {C} == left
    for held in waits:
        full.take(router, repush(held, next_of(held)))
        assert router.kinds(next_of(held))[:1] == (["tokens"] if held in left else ["refused"])


def test_a_push_under_way_is_waited_for(full, router):
    """The oldest KV is evicted only after the running push, which would free blocks, has failed too."""
    full.push_ends(A, CUT)
    full.take(router, prefill(C))
    full.step(5)
    assert router.kinds(C) == []
    assert set(full.role._work) == {A, B, C}
    full.push_ends(B, CUT)
    full.run()
    assert router.kinds(C) == ["tokens"]
    assert set(full.role._work) == {B, C}
