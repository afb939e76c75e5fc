"""Prompts of a thinking model: when KV and thoughts are sent, and that no prefix is fetched."""

import pytest

from baton.core import HandoffId
from baton.engine.sequence import Sequence
from tests.support.sessions import BACKEND, H, prefill, release, spec_of
from tests.support.workers import PrefillSide
from tests.unit.worker.thinking import CHUNK, thinks, thought_about

LAYERS = BACKEND.layout.layers


def thinking_side(**options):
    side = PrefillSide(thinking_chunk=CHUNK, **options)
    thinks(side.engine)
    return side


def test_kv_of_an_unsettled_prompt_leaves_when_the_step_is_over(router, monkeypatch):
    """Unsettled KV may be rolled back until the step ends."""
    monkeypatch.setattr(Sequence, "settled", property(lambda sequence: False))
    side = thinking_side(max_batched_tokens=4)
    side.take(router, prefill())
    push, told = side.pusher.pushes[H], []
    for _ in range(3):
        side.step()
        told.append(push.told)
        push.told = []
    assert told == [[], [(LAYERS, 4)], [(LAYERS, 8), (LAYERS, 9)]]
    assert push.progress.next(1 << 16).end == 9


def test_what_is_settled_leaves_as_ever_beside_it(router, monkeypatch):
    other = HandoffId("other", 1)
    monkeypatch.setattr(Sequence, "settled", property(lambda sequence: sequence.key == other))
    side = thinking_side()
    for handoff in (H, other):
        side.take(router, prefill(handoff))
    side.run()
    assert side.pusher.pushes[H].told == [(LAYERS, 9)]
    assert side.pusher.pushes[other].told == [*((n, 9) for n in range(1, LAYERS + 1)), (LAYERS, 9)]


@pytest.mark.parametrize(
    ("budget", "messages", "thoughts"),
    [(2048, [["thoughts", "tokens"]], [[0, 1]]), (4, [["thoughts"], ["thoughts"], ["tokens"]], [[0], [1]])],
    ids=["one step", "step by step"],
)
def test_thoughts_are_said_with_their_step_before_its_token(router, budget, messages, thoughts):
    side = thinking_side(max_batched_tokens=budget)
    side.serve(router, prefill())
    assert [[event.WhichOneof("event") for event in message] for message in router.messages] == messages
    assert router.thoughts() == [[thought_about(chunk) for chunk in chunks] for chunks in thoughts]


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


@pytest.mark.parametrize(("chunk", "fetch"), [(0, (0, 12)), (CHUNK, None)])
def test_a_prompt_that_is_thought_about_is_never_fetched(router, chunk, fetch):
    """A fetch would be cheaper, but fetched KV has no thoughts."""
    side = PrefillSide(prefix_cache=True, thinking_chunk=chunk)
    side.role.fetches._cost.computed(1, 1.0)
    side.take(router, prefill(spec=spec_of(length=14), skip=12))
    assert side.pusher.pushes[H].job.fetch == fetch
    if fetch is None:
        side.run()
        assert router.kinds() == ["tokens"]
        assert side.engine.counters.prefill_tokens == 14
