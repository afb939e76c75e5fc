"""Thoughts of a decode worker: sent with the commit, during decoding, and to a router that attaches."""

import pytest

from baton.core import Thought
from decode_workers import detached_streams
from tests.support.sessions import FakeSession, H, attach, expected, prefill, release, reserve
from tests.support.workers import Pair
from tests.unit.worker.thinking import CHUNK, thinks, thoughts_about

ANSWER = expected()


@pytest.fixture
def pair():
    """A pair whose prefill worker thinks. Tests add thoughts of the decode worker."""
    made = Pair()
    thinks(made.prefill.engine)
    return made


def test_thoughts_are_said_again_with_the_commit(pair, side, router):
    """The prefill worker may have died before its router had them."""
    pair.adopt(router)
    assert router.kinds() == ["reserved", "committed", "thoughts", "tokens"]
    assert [len(message) for message in router.messages] == [1, 3]
    assert router.thoughts() == [thoughts_about(2)]
    side.run()
    assert router.ids() == ANSWER


@pytest.mark.parametrize("always", [False, True])
def test_a_prompt_that_is_computed_here_tells_its_thoughts_before_its_token(side, router, always):
    """`always`: thoughts about generated tokens too, during decoding."""
    thinks(side.engine, always=always)
    side.serve(router, reserve(), prefill(to=None))
    assert router.kinds()[:3] == ["reserved", "thoughts", "tokens"]
    assert router.messages[1][0].HasField("thoughts")
    thoughts = [thought for message in router.thoughts() for thought in message]
    assert thoughts == thoughts_about((9 + len(ANSWER) - 1) // CHUNK if always else 2)
    assert (len(router.thoughts()) > 1) == always
    assert router.ids() == ANSWER


@pytest.mark.parametrize("known", [0, 2, 3])
def test_a_router_that_attaches_is_told_all_thoughts_first(begin, side, router, second, known):
    begin(router)
    later = Thought(2, (55,))
    result = side.engine.step()
    result.thoughts.append((H, [later]))
    side.role.gone(router)
    side.role.stepped(result)  # no router receives it
    side.take(second, attach(known))
    assert second.kinds()[:2] == ["attached", "thoughts"]
    assert second.thoughts() == [[*thoughts_about(2), later]]
    assert second.ids() == ANSWER[known:4]
    side.run()
    assert second.thoughts() == [[*thoughts_about(2), later]]
    assert second.ids() == ANSWER[known:]
    third = FakeSession("router-c")
    side.take(third, attach(len(ANSWER)))
    assert third.kinds() == ["attached", "thoughts", "finish"], "also of what has ended"
    side.take(third, release())
    assert side.all_free


def test_of_thoughts_so_much_is_remembered_and_tokens_are_as_they_were(begin, side, router, second, monkeypatch):
    monkeypatch.setattr(detached_streams, "MAX_RECORD_BYTES", 4096)
    begin(router)
    result = side.engine.step()
    result.thoughts.append((H, [Thought(n, (1,) * 15) for n in range(2, 200)]))  # 64 bytes each
    side.role.stepped(result)
    side.role.gone(router)
    side.role.tick()
    side.take(second, attach(1))
    (said,) = second.thoughts()
    assert [thought.chunk for thought in said] == list(range(200 - 4096 // 64, 200))
    assert second.ids() == ANSWER[1:4]
