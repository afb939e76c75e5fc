"""Prompts without free blocks evict the oldest KV that waits for a Repush, because it could wait for them forever."""

import pytest

from baton.core import HandoffId
from tests.support.fake_pusher import CUT
from tests.support.sessions import BLOCK, next_of, prefill, repush, spec_of
from tests.support.workers import PrefillSide

A, B, C = (HandoffId(name, 1) for name in "abc")
BLOCKS = 6  # two prompts of 9 tokens, and nothing more


@pytest.fixture
def side():
    assert BLOCKS * BLOCK >= 2 * 9 > BLOCKS * BLOCK / 2
    return PrefillSide(BLOCKS)


@pytest.fixture
def computed(side, router):
    """A function that computes prompts and then fails the pushes in `waits`, in this order."""

    def compute(*handoffs, waits):
        for handoff in handoffs:
            side.serve(router, prefill(handoff))
            assert router.kinds(handoff) == ["tokens"]
        for handoff in waits:
            side.push_ends(handoff, CUT)

    return compute


def test_the_oldest_is_given_up_for_a_prompt_that_finds_no_block(side, router, computed):
    computed(A, B, waits=[B, A])
    side.serve(router, prefill(C))
    assert router.kinds(C) == ["tokens"]
    for held, kinds in ((A, ["refused"]), (B, ["tokens"])):  # the oldest prompt is evicted first
        side.take(router, repush(held, next_of(held)))
        assert router.kinds(next_of(held))[:1] == kinds


def test_as_many_as_it_takes_and_no_more(side, router, computed):
    computed(A, B, waits=[A, B])
    side.serve(router, prefill(C, spec_of(C, 4 * BLOCK)))
    assert router.kinds(C) == ["tokens"]
    assert set(side.role._work) == {C}


def test_nothing_is_given_up_while_there_is_room(side, router, computed):
    computed(A, waits=[A])
    side.serve(router, prefill(B))
    side.take(router, repush(A, next_of(A)))
    assert router.kinds(B) == router.kinds(next_of(A)) == ["tokens"]


def test_a_push_under_way_is_waited_for(side, router, computed):
    """The oldest KV is evicted only after the running push, which would free blocks, has failed too."""
    computed(A, B, waits=[A])
    side.take(router, prefill(C))
    side.step(5)
    assert router.kinds(C) == []
    assert set(side.role._work) == {A, B, C}
    side.push_ends(B, CUT)
    side.run()
    assert router.kinds(C) == ["tokens"]
    assert set(side.role._work) == {B, C}
