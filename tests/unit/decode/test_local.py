"""A decode worker that computes prompts itself, without a prefill worker, in reserved blocks."""

from dataclasses import replace

import pytest

from baton.rpc.v1 import worker_pb2 as pb
from tests.support.sessions import STALE, FakeSession, H, expected, fence, prefill, release, reserve, spec_of
from tests.support.workers import Pair

ANSWER = expected()


@pytest.mark.parametrize("known", [0, 3])
def test_the_answer_is_that_of_a_handoff_and_what_is_known_is_not_sampled_again(side, router, known):
    spec = replace(spec_of(), known=tuple(ANSWER[:known]))
    side.serve(router, reserve(known=9 + known), prefill(spec=spec, to=None))
    assert [(token.index, token.token_id) for token in router.tokens()] == list(enumerate(ANSWER))[known:]
    assert router.kinds()[-1] == "finish"
    assert (side.all_free, len(side.role.reservations), router.handoffs) == (True, 0, set())
    other = replace(H, request_id="other")
    side.serve(router, reserve(other, 9 + known), prefill(other, spec, to=None))
    assert side.engine.counters.cached_tokens > 0


def test_nothing_of_it_was_handed_over_nor_was_to_be(side, router):
    """An abandoned reservation for a handoff counts as fenced, unlike one for a local prefill."""
    side.take(router, reserve(), prefill(to=None))
    assert side.role.reservations.entries() == [], "nothing can be committed to it any more"
    side.run()
    assert not any(side.role.reservations.counts.handoffs.values())
    other = replace(H, request_id="other")
    side.take(router, reserve(other), release(other))
    assert side.role.reservations.counts.handoffs["fenced"] == 1


@pytest.mark.parametrize("state", ["nothing", "of another router", "twice", "fenced", "released"])
def test_only_what_was_reserved_is_computed(side, router, state):
    owner = FakeSession("router-b") if state == "of another router" else router
    if state != "nothing":
        side.take(owner, reserve())
    if state == "twice":
        side.take(router, prefill(to=None))
    if state in {"fenced", "released"}:
        side.take(router, {"fenced": fence, "released": release}[state]())
    side.take(router, prefill(to=None))
    assert router.refusals == [STALE]
    side.serve(owner, release())
    assert side.all_free


def test_what_can_never_be_computed_changes_nothing_and_its_deadline_still_counts(side, router):
    foreign = replace(spec_of(), prompt=(*spec_of().prompt[:-1], 10**6))
    side.take(router, reserve(deadline_s=5.0), prefill(spec=foreign, to=None))
    assert router.refusals == [pb.REFUSAL_REASON_INVALID]
    assert len(side.role.reservations) == 1
    side.clock.advance(5.0)
    side.step()
    assert (side.all_free, router.handoffs) == (True, set())
    assert side.records.notes[-1][2] == "RELEASED"


def test_one_that_has_all_that_the_model_can_take_has_ended(router):
    """The client has every token but not the end. A worker of either role reports it."""
    pair = Pair()
    most = pair.decode.role._info.max_model_len
    spec = spec_of(length=most - 4, sampling=replace(spec_of().sampling, max_tokens=4, ignore_eos=True))
    full = replace(spec, known=(1, 2, 3, 4))
    pair.decode.take(router, reserve(known=most))
    assert router.kinds() == ["reserved"]
    pair.prefill.take(router, prefill(spec=full))
    assert router.kinds() == ["reserved", "finish"]
    pair.decode.take(router, prefill(spec=full, to=None))
    assert (router.kinds(), router.handoffs) == (["reserved", "finish", "finish"], set())
    assert (pair.decode.all_free, pair.prefill.all_free) == (True, True)
