"""Prompts of a model that thinks: what leaves when, what is said of them, and what goes with their KV."""

import pytest

from baton.core import HandoffId
from baton.engine.sequence import Sequence
from baton.errors import ChannelBroken, StaleAttempt
from baton.rpc.thinking import thoughts_from_pb
from tests.unit.worker.pusher import done_of
from tests.unit.worker.support import BACKEND, FakeSession, H, PrefillSide, next_of, prefill, release, repush, spec_of
from tests.unit.worker.thinking import CHUNK, state_at, thinks, thought_about, thoughts_about

H2 = next_of(H)
LAYERS = BACKEND.layout.layers


@pytest.fixture
def unsettled(monkeypatch):
    """What a step writes may be rolled back."""
    monkeypatch.setattr(Sequence, "settled", property(lambda sequence: False))


@pytest.fixture
def router():
    return FakeSession()


def thinking_side(**options):
    side = PrefillSide(thinking_chunk=CHUNK, **options)
    thinks(side.engine)
    return side


def thoughts_of(router, handoff=H):
    """Of each event, in order."""
    mine = [e for e in router.events if e.HasField("thoughts") and e.handoff.attempt == handoff.attempt]
    return [thoughts_from_pb(event.thoughts) for event in mine]


# --- when KV leaves


def test_kv_of_an_unsettled_prompt_leaves_when_the_step_is_over(router, unsettled):
    side = thinking_side(max_batched_tokens=4)
    side.take(router, prefill())
    push, told = side.pusher.pushes[H], []
    for _ in range(3):
        side.step()
        told.append(push.told)
        push.told = []
    assert told == [[], [(LAYERS, 4)], [(LAYERS, 8), (LAYERS, 9)]]
    assert push.progress.next(1 << 16).end == 9


def test_all_of_a_prompt_of_one_step_leaves_at_its_end(router, unsettled):
    side = thinking_side()
    side.take(router, prefill())
    side.run()
    assert side.pusher.pushes[H].told == [(LAYERS, 9)]


def test_what_is_settled_leaves_as_ever_beside_it(router, monkeypatch):
    other = HandoffId("other", 1)
    monkeypatch.setattr(Sequence, "settled", property(lambda sequence: sequence.key == other))
    side = thinking_side()
    for handoff in (H, other):
        side.take(router, prefill(handoff))
    side.run()
    assert side.pusher.pushes[H].told == [(LAYERS, 9)]
    assert side.pusher.pushes[other].told == [*((n, 9) for n in range(1, LAYERS + 1)), (LAYERS, 9)]


# --- what is said


def test_thoughts_are_said_before_the_token_of_their_step(router):
    side = thinking_side()
    side.take(router, prefill())
    side.run()
    assert [[event.WhichOneof("event") for event in message] for message in router.messages] == [["thoughts", "tokens"]]
    assert thoughts_of(router) == [thoughts_about(2)]


def test_thoughts_are_said_step_by_step(router):
    side = thinking_side(max_batched_tokens=4)
    side.take(router, prefill())
    side.run()
    assert router.kinds() == ["thoughts", "thoughts", "tokens"]
    assert thoughts_of(router) == [[thought_about(0)], [thought_about(1)]]


def test_each_router_hears_its_own(router):
    side, other = thinking_side(), FakeSession("router-b")
    for session, name in ((router, "r"), (other, "s")):
        side.take(session, prefill(HandoffId(name, 1)))
    side.run()
    assert [event.handoff.request_id for event in (*router.events, *other.events)] == ["r", "r", "s", "s"]


def test_of_what_was_given_up_nothing_is_said(router):
    side = thinking_side(max_batched_tokens=4)
    side.take(router, prefill())
    side.step()
    result = side.engine.step()
    side.take(router, release())
    side.role.stepped(result)
    assert router.kinds() == ["thoughts"]
    side.run()
    assert side.all_free


# --- what goes with the KV


def test_the_state_goes_with_the_commit(router):
    side = thinking_side()
    side.take(router, prefill())
    side.run()
    assert side.pusher.pushes[H].end.thinking == state_at(9)
    side.pusher.done(H, done_of())
    side.run()
    assert side.all_free


def test_without_thinking_there_is_none(router):
    side = PrefillSide()
    side.take(router, prefill())
    side.run()
    assert side.pusher.pushes[H].end.thinking is None
    assert router.kinds() == ["tokens"]


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("waits", [False, True])
def test_a_repush_carries_the_state_again_and_says_all_thoughts_again(router, steps, waits):
    """Under the new name: what was said under the older one, nobody may have listened to."""
    side = thinking_side(max_batched_tokens=4)
    side.take(router, prefill())
    for _ in range(steps):
        side.step()
    if waits:
        side.pusher.done(H, ChannelBroken("cut"))
        side.loop.drain()
    old = side.pusher.pushes.get(H)
    side.take(router, repush())
    if old is not None:
        side.pusher.done(H, StaleAttempt("aborted"))
    side.run()
    assert side.engine.counters.prefill_tokens == 9
    assert side.pusher.pushes[H2].end.thinking == state_at(9)
    assert [thought for said in thoughts_of(router, H2) for thought in said] == thoughts_about(2)
    assert router.kinds(H2)[-1] == "tokens"
    side.pusher.done(H2, done_of())
    side.run()
    assert side.all_free


# --- what is fetched


@pytest.mark.parametrize(("chunk", "fetch"), [(0, (0, 12)), (CHUNK, None)])
def test_a_prompt_that_is_thought_about_is_never_fetched(router, chunk, fetch):
    """However much cheaper that would be: its KV would come without the thoughts."""
    side = PrefillSide(prefix_cache=True, thinking_chunk=chunk)
    side.role.fetches._cost.computed(1, 1.0)
    side.take(router, prefill(spec=spec_of(length=14), skip=12))
    assert side.pusher.pushes[H].job.fetch == fetch
    if fetch is None:
        side.run()
        assert router.kinds() == ["tokens"]
        assert side.engine.counters.prefill_tokens == 14
