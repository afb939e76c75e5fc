"""Thinking states at a decode worker: taken over with the KV, missed when lost; and thoughts, said and remembered."""

import pytest

from baton.core import Thought
from baton.rpc import convert
from baton.rpc.thinking import thoughts_from_pb
from baton.rpc.v1 import worker_pb2 as pb
from decode_workers import parking
from tests.unit.worker.support import BACKEND, FakeSession, H, Pair, prefill, release, reserve, spec_of
from tests.unit.worker.thinking import CHUNK, state_at, takes_states, thinks, thoughts_about

ANSWER = BACKEND.expected(spec_of())


@pytest.fixture
def pair():
    """The prefill worker thinks; the decode worker goes on thinking about what it generates."""
    made = Pair()
    thinks(made.prefill.engine)
    return made


@pytest.fixture
def side(pair):
    return pair.decode


@pytest.fixture
def router():
    return FakeSession("router-d")


def thoughts_of(session):
    return [thoughts_from_pb(event.thoughts) for event in session.events if event.HasField("thoughts")]


def hand_over(pair, session, *, resumable_s=0.0, change=lambda push: None):
    """Until the commit was taken over. The prefill worker is another router's, to tell apart who says what."""
    command = reserve()
    command.reserve.resumable_s, command.reserve.stream = resumable_s, "mine"
    pair.decode.take(session, command)
    pair.prefill.take(FakeSession(), prefill())
    pair.prefill.run()
    push = pair.prefill.pusher.pushes[H]
    change(push)
    while push.stage != "committed":
        pair.prefill.pusher.advance(H, pair.decode)
    pair.decode.loop.drain()


def attach(known=0):
    spec = convert.spec_to_pb(spec_of())
    spec.known.extend(ANSWER[:known])
    return pb.RouterCommand(attach=pb.Attach(handoff=convert.handoff_to_pb(H), spec=spec))


def test_the_state_is_taken_over_and_its_thoughts_are_said_with_the_commit(pair, side, router):
    """The prefill worker may have died before its router had them."""
    given = takes_states(side.engine)
    hand_over(pair, router)
    assert given == [state_at(9)]
    assert router.kinds() == ["reserved", "committed", "thoughts", "tokens"]
    assert [len(message) for message in router.messages] == [1, 3]
    assert thoughts_of(router) == [thoughts_about(2)]
    side.run()
    assert [token.token_id for token in router.tokens()] == ANSWER


def drop(push):
    push.end = type(push.end)(push.end.spec, push.end.first)


def test_a_state_that_was_lost_on_the_way_is_missed(pair, side, router):
    given = takes_states(side.engine)
    hand_over(pair, router, change=drop)
    assert given == [None]
    assert router.kinds() == ["reserved", "failed"]
    failed = router.events[-1].failed
    assert (failed.kind, failed.message) == ("HandoffError", "thinking: the model thinks, and there is no state")
    assert side.all_free
    assert router.handoffs == set()


def test_without_thoughts_none_are_said(side, router):
    pair = Pair()
    hand_over(pair, router)
    assert router.kinds() == ["reserved", "committed", "tokens"]


def test_a_prompt_that_is_computed_here_says_its_thoughts_before_its_token(side, router):
    thinks(side.engine)
    side.take(router, reserve())
    side.take(router, prefill(to=None))
    side.run()
    assert router.kinds()[:3] == ["reserved", "thoughts", "tokens"]
    assert router.messages[1][0].HasField("thoughts")
    assert thoughts_of(router) == [thoughts_about(2)]
    assert [token.token_id for token in router.tokens()] == ANSWER


def test_thoughts_about_what_is_generated_are_said_as_they_come(pair, side, router):
    thinks(side.engine, always=True)
    side.take(router, reserve())
    side.take(router, prefill(to=None))
    side.run()
    assert [thought for said in thoughts_of(router) for thought in said] == thoughts_about(
        (9 + len(ANSWER) - 1) // CHUNK
    )
    assert len(thoughts_of(router)) > 1


@pytest.mark.parametrize("known", [0, 2, 3])
def test_a_router_that_attaches_is_told_all_thoughts_first(pair, side, router, known):
    second = FakeSession("router-b")
    hand_over(pair, router, resumable_s=30.0)
    while len(router.tokens()) < 3:
        side.step()
    later = Thought(2, (55,))
    result = side.engine.step()
    result.thoughts.append((H, [later]))
    side.role.gone(router)
    side.role.stepped(result)  # nobody hears it
    side.take(second, attach(known))
    assert second.kinds()[:2] == ["attached", "thoughts"]
    assert thoughts_of(second) == [[*thoughts_about(2), later]]
    assert [token.token_id for token in second.tokens()] == ANSWER[known:4]
    side.run()
    assert thoughts_of(second) == [[*thoughts_about(2), later]]
    assert [token.token_id for token in second.tokens()] == ANSWER[known:]
    side.take(second, release())
    assert side.all_free


def test_also_of_what_has_ended(pair, side, router):
    second = FakeSession("router-b")
    hand_over(pair, router, resumable_s=30.0)
    side.role.gone(router)
    side.run()
    side.take(second, attach(len(ANSWER)))
    assert second.kinds() == ["attached", "thoughts", "finish"]


def test_of_thoughts_so_much_is_remembered_and_tokens_are_as_they_were(pair, side, router, monkeypatch):
    monkeypatch.setattr(parking, "MOST_BYTES", 4096)
    second = FakeSession("router-b")
    hand_over(pair, router, resumable_s=30.0)
    while len(router.tokens()) < 3:
        side.step()
    result = side.engine.step()
    result.thoughts.append((H, [Thought(n, (1,) * 15) for n in range(2, 200)]))  # 64 bytes each
    side.role.stepped(result)
    side.role.gone(router)
    side.role.tick()
    side.take(second, attach(1))
    (said,) = thoughts_of(second)
    assert [thought.chunk for thought in said] == list(range(200 - 4096 // 64, 200))
    assert [token.token_id for token in second.tokens()] == ANSWER[1:4]
