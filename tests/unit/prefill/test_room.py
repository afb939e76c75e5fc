"""KV that waits for a Repush has the blocks that prompts need: the oldest is given up when nothing else will make room.

Else a decode worker whose room is reserved by those prompts, and the one that waits, would wait for each other.
"""

import pytest

from baton.core import HandoffId
from baton.errors import ChannelBroken
from tests.unit.worker.support import BLOCK, FakeSession, PrefillSide, next_of, prefill, repush, spec_of

A, B, C = (HandoffId(name, 1) for name in "abc")
BLOCKS = 6  # two prompts of 9 tokens, and nothing more


@pytest.fixture
def side():
    assert BLOCKS * BLOCK >= 2 * 9 > BLOCKS * BLOCK / 2
    return PrefillSide(BLOCKS)


@pytest.fixture
def router():
    return FakeSession()


def computed(side, router, *handoffs):
    for handoff in handoffs:
        side.take(router, prefill(handoff))
        side.run()
        assert router.kinds(handoff) == ["tokens"]


def fails(side, handoff):
    side.pusher.done(handoff, ChannelBroken("cut"))
    side.run()


def test_the_oldest_is_given_up_for_a_prompt_that_finds_no_block(side, router):
    computed(side, router, A, B)
    fails(side, B)
    fails(side, A)
    side.take(router, prefill(C))
    side.run()
    assert router.kinds(C) == ["tokens"]
    for held, kinds in ((A, ["refused"]), (B, ["tokens"])):  # who came first is given up first
        side.take(router, repush(held, next_of(held)))
        assert router.kinds(next_of(held))[:1] == kinds


def test_as_many_as_it_takes_and_no_more(side, router):
    computed(side, router, A, B)
    fails(side, A)
    fails(side, B)
    side.take(router, prefill(C, spec_of(C, 4 * BLOCK)))
    side.run()
    assert router.kinds(C) == ["tokens"]
    assert set(side.role._work) == {C}


def test_nothing_is_given_up_while_there_is_room(side, router):
    computed(side, router, A)
    fails(side, A)
    side.take(router, prefill(B))
    side.run()
    assert router.kinds(B) == ["tokens"]
    side.take(router, repush(A, next_of(A)))
    assert router.kinds(next_of(A)) == ["tokens"]


def test_a_push_under_way_is_waited_for(side, router):
    """It frees its blocks by itself; only when it, too, has failed is one of them given up."""
    computed(side, router, A, B)
    fails(side, A)
    side.take(router, prefill(C))
    for _ in range(5):
        side.step()
    assert router.kinds(C) == []
    assert set(side.role._work) == {A, B, C}
    fails(side, B)
    side.run()
    assert router.kinds(C) == ["tokens"]
    assert set(side.role._work) == {B, C}
