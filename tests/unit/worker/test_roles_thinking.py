"""A model that thinks, over both roles: prompt here, the rest there, and all comes as if nothing had moved."""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from baton.core import HandoffId, Sampling, SequenceSpec, Thought
from baton.engine.model.build import load_model
from baton.engine.model.thinking import Mode
from baton.errors import ChannelBroken
from baton.rpc.thinking import thoughts_from_pb
from tests.unit.kvtransfer.support import same_kv
from tests.unit.model.checkpoints import VOCAB
from tests.unit.model.thinking import SETTINGS, Reference, thinking_checkpoint
from tests.unit.worker.support import (
    DecodeSide,
    FakeSession,
    H,
    PrefillSide,
    next_of,
    prefill,
    release,
    repush,
    reserve,
)

CHUNK, BLOCK, NEW = SETTINGS["chunk_size"], 8, 9


@dataclass(frozen=True)
class Model:
    """A checkpoint as both workers load it, and the reference."""

    reference: Reference
    backends: dict[str, Any]

    def answer(self, prompt, **options):
        return self.reference.answer(list(prompt), NEW, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinking")
    reference = thinking_checkpoint(folder)
    modes: tuple[Mode, ...] = ("auto", "fast", "sequential")
    return Model(reference, {mode: load_model(folder, block_size=BLOCK, thinking=mode) for mode in modes})


class Workers:
    """What is said to be final leaves at once, in the middle of the step."""

    def __init__(self, model, mode="auto", **options):
        backend = model.backends[mode]
        self.fingerprint = backend.fingerprint
        self.prefill = PrefillSide(thinking_chunk=CHUNK, backend=backend, **options)
        self.decode = DecodeSide(backend=backend)
        self.pusher = self.prefill.pusher
        computed = self.pusher.computed

        def at_once(handoff, *progress):
            computed(handoff, *progress)
            self.pusher.advance(handoff, self.decode)

        self.pusher.computed = at_once  # type: ignore[method-assign]

    def begin(self, session, spec, handoff=H, **options):
        reserving = reserve(handoff, len(spec), fingerprint=self.fingerprint)
        reserving.reserve.resumable_s, reserving.reserve.stream = 30.0, "mine"
        self.decode.take(session, reserving)
        self.prefill.take(session, prefill(handoff, spec, **options))
        self.pusher.advance(handoff, self.decode)  # offered

    def commit(self, handoff=H):
        while self.pusher.pushes[handoff].stage != "committed":
            self.pusher.advance(handoff, self.decode)
        self.same_kv(handoff)
        self.pusher.advance(handoff, self.decode)
        self.decode.loop.drain()

    def same_kv(self, handoff):
        ours, theirs = self.prefill.engine, self.decode.engine
        source = ours.held(handoff).blocks
        (target,) = (entry.reservation.blocks for entry in self.decode.role.reservations.entries())
        assert same_kv(ours.kv, source, theirs.kv, target, ours._requests[handoff].sequence.computed)


def prompt_of(length):
    rng = random.Random(f"prompt {length}")
    return tuple(rng.randrange(VOCAB) for _ in range(length))


def spec_of(length, **changed):
    return SequenceSpec(prompt_of(length), Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True), **changed)


def outcome_of(session):
    """Ids and thoughts; what was said before counts, and what is said again must be the same."""
    ids: dict[int, int] = {}
    thoughts: dict[int, Thought] = {}
    for event in session.events:
        begin = getattr(event.tokens, "from")
        ids |= dict(enumerate(event.tokens.ids, begin))
        if event.HasField("thoughts"):
            for thought in thoughts_from_pb(event.thoughts):
                assert thoughts.setdefault(thought.chunk, thought) == thought
    assert list(thoughts) == list(range(len(thoughts)))
    return [ids[index] for index in range(len(ids))], [thought.token_ids for thought in thoughts.values()]


@pytest.mark.parametrize("mode", ["auto", "fast", "sequential"])
@pytest.mark.parametrize("while_decoding", [False, True])
@pytest.mark.parametrize("length", [3, 24, 27])
def test_a_handoff_is_as_if_nothing_had_moved(model, mode, while_decoding, length):
    workers, session = Workers(model, mode, max_batched_tokens=11), FakeSession()
    spec = spec_of(length, think_while_decoding=while_decoding)
    workers.begin(session, spec)
    workers.prefill.run()
    workers.commit()
    workers.decode.run()
    answer = model.answer(spec.prompt, while_decoding=while_decoding)
    assert outcome_of(session) == (answer.tokens, answer.thoughts)
    assert any(answer.thoughts) == (length > 3 or while_decoding), "something was thought at all"
    assert session.kinds()[-1] == "finish"
    workers.decode.take(session, release())
    workers.prefill.run()
    assert workers.decode.all_free
    assert workers.prefill.all_free


@pytest.mark.parametrize("steps", range(4))
def test_a_repush_hands_the_same_state_over(model, steps):
    """The decode worker was lost; the one that comes next gets all of it."""
    workers, session, spec = Workers(model, max_batched_tokens=11), FakeSession(), spec_of(27)
    workers.begin(session, spec)
    for _ in range(steps):
        workers.prefill.step()
    workers.pusher.done(H, ChannelBroken("cut"))
    workers.prefill.loop.drain()
    workers.decode.take(session, release())
    workers.decode.take(session, reserve(next_of(H), 27, fingerprint=workers.fingerprint))
    heard = len(session.messages)
    workers.prefill.take(session, repush())
    workers.prefill.run()
    workers.commit(next_of(H))
    workers.decode.run()
    session.messages = session.messages[heard:]  # the older attempt is over
    answer = model.answer(spec.prompt)
    assert outcome_of(session) == (answer.tokens, answer.thoughts)


@pytest.mark.parametrize("while_decoding", [False, True])
@pytest.mark.parametrize("said", [1, 5])
def test_a_next_attempt_with_known_tokens_says_all_thoughts_again(model, while_decoding, said):
    """The decode worker was lost after its commit: elsewhere all that the client has is computed again."""
    answer = model.answer(prompt_of(27), while_decoding=while_decoding)
    spec = spec_of(27, known=tuple(answer.tokens[:said]), think_while_decoding=while_decoding)
    handoff = HandoffId("again", 2)
    workers, session = Workers(model), FakeSession()
    workers.begin(session, spec, handoff)
    workers.prefill.run()
    workers.commit(handoff)
    workers.decode.run()
    ids, thoughts = outcome_of_known(session, said)
    assert (ids, thoughts) == (answer.tokens[said:], answer.thoughts)


def outcome_of_known(session, known):
    ids = {token.index: token.token_id for token in session.tokens(HandoffId("again", 2))}
    assert list(ids) == list(range(known, known + len(ids)))
    made = [thought for e in session.events if e.HasField("thoughts") for thought in thoughts_from_pb(e.thoughts)]
    thoughts = {thought.chunk: thought.token_ids for thought in made}
    return list(ids.values()), [thoughts[chunk] for chunk in range(len(thoughts))]


@pytest.mark.parametrize("change", [{"state": b"too short"}, {"offset": 2}, {"thinker": "another"}, None])
def test_a_state_that_does_not_fit_fails_that_handoff_by_name(model, change):
    workers, session = Workers(model), FakeSession()
    workers.begin(session, spec_of(27))
    workers.prefill.run()
    push = workers.pusher.pushes[H]
    push.end = replaced(push.end, change)
    workers.commit()
    failed = session.events[-1].failed
    assert failed.kind == "HandoffError"
    assert (next(iter(change)) if change else "without a thinking state") in failed.message
    assert workers.decode.all_free


def replaced(end, change):
    return replace(end, thinking=replace(end.thinking, **change) if change else None)
