"""The next attempt of what is held: pushed again under a new name, not computed again."""

import pytest

from baton.core import HandoffId, Incarnation, SequenceSpec, WorkerRef
from baton.errors import ChannelBroken, DigestMismatch, InvalidRequest, StaleAttempt
from baton.rpc.v1 import worker_pb2 as pb
from baton.worker.attempts import Attempts
from kvtransfer.handoff import PushJob
from tests.unit.worker.pusher import done_of
from tests.unit.worker.support import (
    BACKEND,
    GREEDY,
    FakeSession,
    H,
    PrefillSide,
    next_of,
    prefill,
    release,
    repush,
    spec_of,
)

D2 = WorkerRef("decode-1", Incarnation(7, 9), "127.0.0.1:3")
H2 = next_of(H)
FIRST = BACKEND.expected(spec_of(), 1)
STALE = pb.REFUSAL_REASON_STALE


@pytest.fixture
def side():
    return PrefillSide(max_batched_tokens=4)


@pytest.fixture
def router():
    return FakeSession()


def to_state(side, router, state):
    """A handoff that stands still in `state`, of a prompt that takes three steps."""
    side.take(router, prefill(deadline_s=5.0))
    steps = {"queued": 0, "computing": 1, "computed": 3}[state.split(",")[0]]
    for _ in range(steps):
        side.step()
    if state.endswith("waits"):
        side.pusher.done(H, ChannelBroken("cut"))
        side.loop.drain()


STATES = [f"{state}{waits}" for state in ("queued", "computing", "computed") for waits in ("", ", waits")]


@pytest.mark.parametrize("state", STATES)
def test_nothing_is_computed_twice_and_all_is_pushed_again(side, router, state):
    to_state(side, router, state)
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
    assert [(t.index, t.token_id) for t in router.tokens(H2)] == [(0, FIRST[0])]
    assert router.handoffs == {H2}
    side.pusher.done(H2, done_of())
    side.run()
    assert router.kinds(H2) == ["tokens", "pushed"]
    assert side.all_free
    assert router.handoffs == set()


@pytest.mark.parametrize("outcome", [done_of(), ChannelBroken("cut"), DigestMismatch("frame 3"), StaleAttempt("x")])
@pytest.mark.parametrize("state", ["computing", "computed"])
def test_the_end_of_the_old_push_is_no_end_of_the_new_one(side, router, state, outcome):
    """It may have been reported when the Repush was taken, and not been heard yet."""
    to_state(side, router, state)
    side.pusher.done(H, outcome)
    side.take(router, repush())
    said = router.kinds(H)
    side.run()
    assert router.kinds(H) == said
    assert router.kinds(H2) == ["tokens"]
    assert side.counts.owned > 0
    side.pusher.done(H2, done_of())
    side.run()
    assert router.kinds(H2) == ["tokens", "pushed"]
    assert side.all_free


def test_the_first_token_is_said_again_with_all_that_was_said_of_it(router):
    side = PrefillSide()
    other = HandoffId("before", 1)
    for handoff in (other, H):
        side.take(router, prefill(handoff, spec_of(H)))
        side.run()
    side.take(router, repush())
    old, new = (
        next(e for e in router.events if e.handoff.attempt == n and e.handoff.request_id == "r") for n in (1, 2)
    )
    assert old.cached_tokens == 8
    new.handoff.attempt = 1
    assert new == old


def test_again_and_again(side, router):
    to_state(side, router, "computed, waits")
    names = [H]
    for _ in range(3):
        names.append(next_of(names[-1]))
        side.take(router, repush(names[-2], names[-1]))
        side.run()
        side.pusher.done(names[-1], ChannelBroken("cut"))
        side.run()
    assert all(router.kinds(name) == ["tokens", "failed"] for name in names)
    assert side.engine.counters.prefill_tokens == 9
    side.take(router, release(names[-1]))
    assert side.all_free


def test_attempts_may_be_left_out(side, router):
    """The ones between were refused by a decode worker: this one never heard of them."""
    to_state(side, router, "computed, waits")
    side.take(router, repush(H, HandoffId("r", 7)))
    assert router.kinds(HandoffId("r", 7)) == ["tokens"]
    side.take(router, repush(HandoffId("r", 7), HandoffId("r", 5)))
    assert router.events[-1].refused.reason == STALE
    side.take(router, prefill(HandoffId("r", 6)))
    assert router.events[-1].refused.reason == STALE


@pytest.mark.parametrize("state", ["computing", "computed, waits"])
def test_the_deadline_is_the_new_ones(side, router, state):
    to_state(side, router, state)
    side.take(router, repush(deadline_s=50.0))
    side.clock.advance(20.0)
    side.run()
    assert router.kinds(H2) == ["tokens"]
    side.pusher.done(H2, ChannelBroken("cut"))
    side.run()
    assert not side.all_free
    side.clock.advance(30.0)
    side.run()
    assert side.all_free


@pytest.mark.parametrize("state", ["computing, waits", "computed, waits"])
def test_it_waits_no_more(side, router, state):
    """So what holds for any push holds for this one: no deadline but its own, and a word if its prompt is too late."""
    to_state(side, router, state)
    side.take(router, repush(deadline_s=10.0))
    side.clock.advance(10.0)
    side.role.tick()
    if state.startswith("computed"):
        assert router.kinds(H2) == ["tokens"]
        side.pusher.done(H2, done_of())
        side.run()
        assert router.kinds(H2) == ["tokens", "pushed"]
    else:
        assert router.events[-1].failed.kind == "DeadlineExceeded"
    assert side.all_free


def test_a_new_push_that_is_not_taken_waits_like_any_other(side, router):
    to_state(side, router, "computed, waits")
    side.pusher.refuse = ChannelBroken("the sender was closed")
    side.take(router, repush())
    assert router.kinds(H2) == ["failed", "tokens"]
    assert next(event for event in router.events if event.handoff.attempt == 2).failed.held
    side.pusher.refuse = None
    side.take(router, repush(H2, next_of(H2)))
    side.pusher.done(next_of(H2), done_of())
    side.run()
    assert side.all_free


# --- what is refused


def gone_before(side, router, how):
    """It was held, and is not any more."""
    if how == "never":
        return
    to_state(side, router, "computed" if how in {"pushed", "mismatch"} else "computed, waits")
    if how == "released":
        side.take(router, release())
    elif how == "pushed":
        side.pusher.done(H, done_of())
    elif how == "mismatch":
        side.pusher.done(H, DigestMismatch("frame 3"))
    elif how == "too late":
        side.clock.advance(6.0)
    side.run()


@pytest.mark.parametrize("how", ["never", "released", "pushed", "mismatch", "too late"])
def test_it_is_stale_when_nothing_is_held(side, router, how):
    gone_before(side, router, how)
    begun = len(side.pusher.log)
    side.take(router, repush())
    assert router.kinds(H2) == ["refused"]
    assert router.events[-1].refused.reason == STALE
    side.run()
    assert len(side.pusher.log) == begun
    assert side.all_free
    side.take(router, prefill(H2))
    side.run()
    assert router.kinds(H2) == ["refused", "tokens"], "the attempt is not used up"


@pytest.mark.parametrize("state", STATES)
def test_it_is_stale_when_another_router_asks(side, router, state):
    to_state(side, router, state)
    other = FakeSession("router-b")
    side.take(other, repush())
    assert other.kinds() == ["refused"]
    assert other.events[0].refused.reason == STALE
    side.run()
    assert H2 not in side.pusher.pushes
    side.take(router, repush())
    side.run()
    assert router.kinds(H2) == ["tokens"]
    assert other.kinds() == ["refused"]


@pytest.mark.parametrize("attempt", [1, 2, 3])
def test_it_is_stale_when_the_attempt_is_old(side, router, attempt):
    """A later one was seen here: what is held goes on as it was."""
    held = HandoffId("r", 3)
    side.take(router, prefill(held))
    side.run()
    side.take(router, repush(held, HandoffId("r", attempt)))
    assert router.kinds(HandoffId("r", attempt))[-1] == "refused"
    assert router.events[-1].refused.reason == STALE
    assert not side.pusher.pushes[held].aborted
    side.pusher.done(held, done_of())
    side.run()
    assert router.kinds(held)[-1] == "pushed"
    assert side.all_free


@pytest.mark.parametrize("skip", [9, 10, 2**31])
@pytest.mark.parametrize("state", ["computing", "computed, waits"])
def test_a_skip_of_all_is_refused_by_name_and_what_is_held_goes_on(side, router, state, skip):
    to_state(side, router, state)
    with pytest.raises(InvalidRequest, match="skip"):
        side.role.command(router, repush(skip=skip))
    side.run()
    side.take(router, repush(skip=8))
    side.run()
    assert router.kinds(H2) == ["tokens"]
    assert side.pusher.pushes[H2].job.skip == 8
    assert side.engine.counters.prefill_tokens == 9


def test_a_name_that_is_taken_is_refused_even_when_its_attempt_was_forgotten(side, router):
    side.role._attempts = Attempts(limit=1)
    for request in "rs":
        side.take(router, prefill(HandoffId(request, 1)))
    with pytest.raises(InvalidRequest, match="already here"):
        side.role.command(router, repush(HandoffId("s", 1), HandoffId("r", 1)))
    side.run()
    assert router.kinds() == ["tokens", "tokens"]


def test_what_had_ended_before_it_came_is_not_held(side, router):
    known = tuple(BACKEND.expected(spec_of()))
    side.take(router, prefill(spec=SequenceSpec(spec_of().prompt, GREEDY, known)))
    side.take(router, repush())
    side.run()
    assert router.kinds(H) == ["finish"]
    assert router.kinds(H2) == ["refused"]
    assert side.all_free
