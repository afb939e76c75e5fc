"""The prefill role on a real engine: whatever happens to a handoff, it ends once, and its blocks come back."""

from dataclasses import replace

import pytest

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.fixed import FixedShapes
from baton.errors import ChannelBroken, InvalidRequest, StaleAttempt
from baton.rpc.v1 import worker_pb2 as pb
from baton.worker.attempts import Attempts
from kvtransfer.handoff import PushJob
from tests.unit.worker.pusher import done_of
from tests.unit.worker.support import (
    BACKEND,
    BLOCK,
    GREEDY,
    D,
    FakeSession,
    H,
    PrefillSide,
    fence,
    malformed,
    next_of,
    prefill,
    release,
    repush,
    reserve,
    spec_of,
)

DONE = done_of()


@pytest.fixture
def side():
    return PrefillSide()


@pytest.fixture
def router():
    return FakeSession()


def test_a_prompt_becomes_a_token_and_a_push(side, router):
    side.take(router, prefill())
    push = side.pusher.pushes[H]
    assert push.job == PushJob(H, D, 9), "its channel is built, and it is offered, while the prompt is computed"
    assert not push.end
    side.run()
    first = BACKEND.expected(spec_of(), 1)
    assert [token.token_id for token in router.tokens()] == first
    assert push.end.spec == SequenceSpec(spec_of().prompt, GREEDY, tuple(first))
    assert [(t.index, t.token_id) for t in push.end.first] == [(0, first[0])]
    assert len(push.blocks) == -(-9 // BLOCK)
    assert side.counts.owned >= len(push.blocks)


def test_a_deterministic_prompt_is_pushed_with_a_digest_of_all_its_kv(router):
    side = PrefillSide(shapes=FixedShapes())
    side.take(router, prefill(spec=replace(spec_of(), deterministic=True)))
    assert side.pusher.pushes[H].job == PushJob(H, D, 9, verify=True)
    side.run()
    assert side.pusher.pushes[H].end.spec.deterministic
    side.pusher.done(H, ChannelBroken("cut"))
    side.loop.drain()
    side.take(router, repush(to=D))
    again = next_of(H)
    assert side.pusher.pushes[again].job == PushJob(again, D, 9, verify=True)


def test_the_router_hears_what_was_cached_with_the_first_token_or_the_end(side, router):
    for number, sampling in enumerate([GREEDY, GREEDY, replace(GREEDY, max_tokens=1)]):
        handoff = HandoffId(f"cached{number}", 1)
        side.take(router, prefill(handoff, spec=SequenceSpec(spec_of().prompt, sampling)))
        side.run()
    found = [event.cached_tokens for event in router.events if event.HasField("tokens") or event.HasField("finish")]
    assert found == [0, 8, 8, 8]


def test_the_blocks_come_back_with_the_end_of_the_push(side, router):
    side.take(router, prefill())
    side.run()
    assert not side.all_free
    side.pusher.done(H, DONE)
    assert not side.all_free  # the engine thread has not heard yet
    side.run()
    assert side.all_free
    assert router.kinds() == ["tokens", "pushed"]
    assert (side.role.transfer_bytes, side.role.transport, router.handoffs) == (64, "memory", set())


@pytest.mark.parametrize(
    "sampling", [Sampling(max_tokens=1, temperature=0.0), Sampling(max_tokens=9, temperature=0.0, stop=("\x00",))]
)
def test_what_the_first_token_ends_is_not_handed_over(side, router, sampling):
    spec = spec_of(sampling=sampling)
    if sampling.stop:
        first = chr(BACKEND.expected(spec_of(), 1)[0])
        spec = spec_of(sampling=Sampling(max_tokens=9, temperature=0.0, stop=(first,)))
    side.take(router, prefill(spec=spec))
    side.run()
    assert router.kinds() == ["tokens", "finish"]
    assert (side.pusher.pushes[H].aborted, side.pusher.pushes[H].end) == (True, None)
    assert side.all_free
    side.pusher.done(H, StaleAttempt("aborted"))
    side.run()
    assert router.kinds() == ["tokens", "finish"]


def test_what_was_known_to_have_ended_is_only_told(side, router):
    known = tuple(BACKEND.expected(spec_of()))
    side.take(router, prefill(spec=SequenceSpec(spec_of().prompt, GREEDY, known)))
    side.run()
    assert router.kinds() == ["finish"]
    assert side.pusher.pushes == {}
    assert side.all_free
    assert side.engine.counters.prefill_tokens == 0
    side.take(router, prefill())
    assert router.events[-1].refused.reason == pb.REFUSAL_REASON_STALE


def leave(side, router, how):
    if how == "release":
        side.take(router, release())
    else:
        side.role.gone(router)


@pytest.mark.parametrize("how", ["release", "gone"])
def test_leaving_before_the_compute_frees_at_once(side, router, how):
    side.take(router, prefill())
    leave(side, router, how)
    side.run()
    assert side.pusher.pushes[H].aborted
    assert side.all_free
    assert router.events == []
    assert side.engine.counters.prefill_tokens == 0


@pytest.mark.parametrize("how", ["release", "gone"])
def test_leaving_during_a_push_frees_at_once_since_it_was_withdrawn(side, router, how):
    side.take(router, prefill())
    side.run()
    leave(side, router, how)
    assert side.pusher.pushes[H].aborted
    assert side.pusher.log[-2:] == [("abort", H), ("withdraw", H)]
    assert side.all_free
    side.pusher.done(H, StaleAttempt("aborted"))
    leave(side, router, how)  # between the report and the engine thread's turn
    side.run()
    leave(side, router, how)
    assert side.all_free
    assert router.kinds() == ["tokens"]
    assert router.handoffs == set()


def test_a_deadline_ends_a_prompt_that_waits_and_no_push(side, router):
    side.take(router, prefill(deadline_s=5.0))
    other = HandoffId("s", 1)
    side.take(router, prefill(other, deadline_s=5.0))
    side.take(router, release(other))
    side.clock.advance(5.0)
    side.role.tick()
    assert router.kinds() == ["failed"]
    assert router.events[0].failed.kind == "DeadlineExceeded"
    third = HandoffId("t", 1)
    side.take(router, prefill(third, deadline_s=5.0))
    side.run()
    side.clock.advance(50.0)
    side.run()
    assert router.kinds(third) == ["tokens"]
    side.pusher.done(third, DONE)
    side.run()
    assert side.all_free


def test_a_second_prefill_of_a_handoff_is_refused_and_the_first_goes_on(side, router):
    other = FakeSession("router-b")
    side.take(router, prefill())
    side.take(other, prefill())
    assert other.events[0].refused.reason == pb.REFUSAL_REASON_STALE
    side.run()
    assert router.kinds() == ["tokens"]
    side.pusher.done(H, DONE)
    side.run()
    assert router.kinds() == ["tokens", "pushed"]
    assert other.kinds() == ["refused"]
    assert side.all_free


def test_a_late_prefill_of_an_old_attempt_is_refused(side, router):
    side.take(router, prefill(HandoffId("r", 3)))
    side.take(router, release(HandoffId("r", 3)))
    for attempt in (1, 2, 3):
        side.take(router, prefill(HandoffId("r", attempt)))
    assert [event.refused.reason for event in router.events] == [pb.REFUSAL_REASON_STALE] * 3
    side.run()
    assert side.engine.counters.prefill_tokens == 0
    side.take(router, prefill(HandoffId("r", 4)))
    side.run()
    assert router.kinds(HandoffId("r", 4)) == ["tokens"]


def test_a_prefill_that_is_under_way_is_not_begun_again_even_when_its_attempt_was_forgotten(side, router):
    side.role._attempts = Attempts(limit=1)
    for request in "rs":
        side.take(router, prefill(HandoffId(request, 1)))
    side.take(router, prefill(HandoffId("r", 1)))
    assert router.kinds() == ["refused"]
    side.run()
    assert router.kinds(HandoffId("r", 1)) == ["refused", "tokens"]


def test_a_handoff_that_another_router_releases_ends_for_its_owner_too(side, router):
    other = FakeSession("router-b")
    side.take(router, prefill())
    side.take(other, release())
    side.run()
    assert router.kinds() == ["failed"]
    assert router.events[0].failed.kind == "StaleAttempt"
    assert other.events == []
    assert side.all_free


def test_each_router_hears_of_its_own_only_and_once_per_step(side):
    routers = [FakeSession(f"router-{n}") for n in range(3)]
    handoffs = [[HandoffId(f"{n}-{i}", 1) for i in range(3)] for n in range(3)]
    for router, own in zip(routers, handoffs, strict=True):
        for handoff in own:
            side.take(router, prefill(handoff))
    side.step()
    for router, own in zip(routers, handoffs, strict=True):
        assert len(router.messages) == 1
        assert {event.handoff.request_id for event in router.events} == {h.request_id for h in own}
    side.role.gone(routers[0])
    for handoff in list(side.pusher.pushes):
        side.pusher.done(handoff, DONE)
    side.run()
    assert side.all_free


def test_a_model_that_fails_fails_its_batch_and_frees_it(side, router, monkeypatch):
    def broken(batch, kv):
        raise RuntimeError("a kernel fault")

    with monkeypatch.context() as patch:
        patch.setattr(side.engine.backend, "forward", broken)
        side.take(router, prefill())
        side.run()
    assert router.kinds() == ["failed"]
    assert router.events[0].failed.kind == "EngineFault"
    assert side.all_free
    side.take(router, prefill(next_of(H)))
    side.run()
    assert router.kinds() == ["failed", "tokens"]


CASES = {name: (command, named) for name, command, named in malformed()} | {
    "reserve": (reserve(), "command"),
    "fence": (fence(), "command"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_malformed_command_changes_nothing(side, router, case):
    command, named = CASES[case]
    if command.WhichOneof("command") in {"reserve", "fence"}:
        named = "command"
    with pytest.raises(InvalidRequest, match=named):
        side.role.command(router, command)
    side.run()
    assert side.all_free
    assert not side.engine.has_work()
    assert router.handoffs == set()
