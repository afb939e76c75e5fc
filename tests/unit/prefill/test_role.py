"""The prefill role on a real engine: each handoff ends once and frees its blocks."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from baton.core import HandoffId, SequenceSpec
from baton.engine.determinism.shapes import FixedShapes
from baton.errors import StaleAttempt
from baton.worker.service import Attempts
from kvtransfer.handoff import PushJob
from tests.support.fake_pusher import CUT, done_of
from tests.support.sessions import GREEDY, STALE, D, FakeSession, H, expected, prefill, repush, spec_of
from tests.support.workers import PrefillSide

NEXT = HandoffId("r", 2)


def test_a_prompt_becomes_a_token_and_a_push_whose_end_frees_its_blocks(side, router):
    side.take(router, prefill())
    push = side.pusher.pushes[H]
    assert push.job == PushJob(H, D, 9), "its channel is built, and it is offered, while the prompt is computed"
    assert not push.end
    side.run()
    first = expected(tokens=1)
    assert router.ids() == first
    assert push.end.spec == SequenceSpec(spec_of().prompt, GREEDY, tuple(first))
    assert ([(t.index, t.token_id) for t in push.end.first], push.end.state) == ([(0, first[0])], None)
    assert len(push.blocks) == side.engine.layout.blocks_for(9)
    assert side.counts.owned >= len(push.blocks)
    side.pusher.done(H, done_of())
    assert not side.all_free  # the engine thread has not seen it yet
    side.run()
    assert (side.all_free, router.kinds()) == (True, ["tokens", "pushed"])
    assert (side.role.transfer_bytes, side.role.transport, router.handoffs) == (64, "memory", set())


def test_a_deterministic_prompt_is_pushed_with_a_digest_of_all_its_kv(router):
    side = PrefillSide(shapes=FixedShapes())
    side.take(router, prefill(spec=replace(spec_of(), deterministic=True)))
    assert side.pusher.pushes[H].job == PushJob(H, D, 9, verify=True)
    side.run()
    assert side.pusher.pushes[H].end.spec.deterministic
    side.push_ends(H, CUT)
    side.take(router, repush(to=D))
    assert side.pusher.pushes[NEXT].job == PushJob(NEXT, D, 9, verify=True)


def test_the_router_hears_what_was_cached_with_the_first_token_or_the_end(side, router):
    for number, sampling in enumerate([GREEDY, GREEDY, replace(GREEDY, max_tokens=1)]):
        handoff = HandoffId(f"cached{number}", 1)
        side.serve(router, prefill(handoff, spec=SequenceSpec(spec_of().prompt, sampling)))
    found = [event.cached_tokens for event in router.events if event.HasField("tokens") or event.HasField("finish")]
    assert found == [0, 8, 8, 8]


@pytest.mark.parametrize("ends", [{"max_tokens": 1}, {"stop": (chr(expected(tokens=1)[0]),)}], ids=["length", "stop"])
def test_what_the_first_token_ends_is_not_handed_over(side, router, ends):
    side.serve(router, prefill(spec=spec_of(sampling=replace(GREEDY, ignore_eos=False, **ends))))
    assert router.kinds() == ["tokens", "finish"]
    assert (side.pusher.pushes[H].aborted, side.pusher.pushes[H].end, side.all_free) == (True, None, True)
    side.push_ends(H, StaleAttempt("aborted"))
    assert router.kinds() == ["tokens", "finish"]


def test_what_was_known_to_have_ended_is_only_told(side, router):
    known = tuple(expected())
    side.serve(router, prefill(spec=SequenceSpec(spec_of().prompt, GREEDY, known)))
    assert router.kinds() == ["finish"]
    assert (side.pusher.pushes, side.all_free) == ({}, True)
    assert side.engine.counters.prefill_tokens == 0
    side.take(router, prefill(), repush())
    assert router.refusals == [STALE, STALE], "nothing is held"


def test_a_name_that_is_taken_is_refused_even_when_its_attempt_was_forgotten(side, router):
    side.role._attempts = Attempts(limit=1)
    other = HandoffId("s", 1)
    side.take(router, prefill(), prefill(other), prefill(), repush(other, H))
    assert [event.refused.detail for event in router.events] == [f"handoff: {H} is already here"] * 2
    side.run()
    assert router.kinds() == ["refused", "refused", "tokens", "tokens"]


def test_each_router_hears_of_its_own_only_and_once_per_step(side):
    routers = [FakeSession(f"router-{n}") for n in range(3)]
    handoffs = [[HandoffId(f"{n}-{i}", 1) for i in range(3)] for n in range(3)]
    for router, own in zip(routers, handoffs, strict=True):
        side.take(router, *map(prefill, own))
    side.step()
    for router, own in zip(routers, handoffs, strict=True):
        assert len(router.messages) == 1
        assert {event.handoff.request_id for event in router.events} == {h.request_id for h in own}
    side.role.gone(routers[0])
    for handoff in list(side.pusher.pushes):
        side.push_ends(handoff)
    side.run()
    assert side.all_free


@pytest.mark.parametrize("steps", [0, 1])
def test_a_model_that_fails_fails_its_batch_and_frees_it(chunked, router, monkeypatch, steps):
    chunked.take(router, prefill())
    chunked.step(steps)
    push = chunked.pusher.pushes[H]
    with monkeypatch.context() as patch:
        patch.setattr(chunked.engine.backend, "forward", Mock(side_effect=RuntimeError("a kernel fault")))
        chunked.run()
    assert router.kinds() == ["failed"]
    assert router.failure.kind == "EngineFault"
    assert (push.blocks, push.aborted, chunked.all_free) == ((), True, True)
    chunked.serve(router, prefill(NEXT))
    assert router.kinds() == ["failed", "tokens"]
