"""A thinking model over both roles: a handoff changes neither tokens nor thoughts."""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.models.loading import load_model
from baton.engine.models.thinking import Mode
from baton.errors import StaleAttempt
from tests.support.fake_pusher import CUT
from tests.support.sessions import H, next_of, prefill, release, repush, reserve
from tests.support.workers import DecodeSide, Pair, PrefillSide
from tests.unit.kvtransfer.support import same_kv
from tests.unit.model.checkpoints import SETTINGS, VOCAB, Reference, thinking_checkpoint

CHUNK, BLOCK, NEW = SETTINGS["chunk_size"], 8, 9


@dataclass(frozen=True)
class Model:
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


class Workers(Pair):
    """A pair that sends final KV immediately, in the middle of the step."""

    def __init__(self, model, mode="auto", **options):
        backend = model.backends[mode]
        self.fingerprint = backend.fingerprint
        self.prefill = PrefillSide(thinking_chunk=CHUNK, backend=backend, **options)
        self.decode = DecodeSide(backend=backend)
        pusher = self.prefill.pusher
        computed = pusher.computed

        def at_once(handoff, *progress):
            computed(handoff, *progress)
            pusher.advance(handoff, self.decode)

        pusher.computed = at_once  # type: ignore[method-assign]

    def begin(self, session, handoff=H, spec=None, **_):
        self.decode.take(session, reserve(handoff, len(spec), fingerprint=self.fingerprint))
        self.prefill.take(session, prefill(handoff, spec))
        self.prefill.pusher.advance(handoff, self.decode)  # offered

    def finish(self, handoff=H):
        """Finish the prompt, check that both workers have equal KV, and decode to the end."""
        self.prefill.run()
        self.advance(handoff, "committed")
        ours, theirs = self.prefill.engine, self.decode.engine
        (target,) = (entry.reservation.blocks for entry in self.decode.role.reservations.entries())
        computed = ours._requests[handoff].sequence.computed
        assert same_kv(ours.kv, ours.held(handoff).blocks, theirs.kv, target, computed)
        self.advance(handoff)
        self.decode.run()


def prompt_of(length):
    rng = random.Random(f"prompt {length}")
    return tuple(rng.randrange(VOCAB) for _ in range(length))


def spec_of(length=27, **changed):
    return SequenceSpec(prompt_of(length), Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True), **changed)


def outcome_of(session, handoff=H, known=0):
    """Return ids and thoughts of one attempt. Repeated ones must be the same."""
    ids: dict[int, int] = {}
    thoughts: dict[int, tuple[int, ...]] = {}
    for token in session.tokens(handoff):
        assert ids.setdefault(token.index, token.token_id) == token.token_id
    for thought in (thought for message in session.thoughts(handoff) for thought in message):
        assert thoughts.setdefault(thought.chunk, thought.token_ids) == thought.token_ids
    assert list(ids) == list(range(known, known + len(ids)))
    assert list(thoughts) == list(range(len(thoughts)))
    return list(ids.values()), list(thoughts.values())


@pytest.fixture
def workers(model):
    return Workers(model, max_batched_tokens=11)


@pytest.mark.parametrize(
    ("mode", "while_decoding", "length"),
    [
        *(("auto", while_decoding, length) for while_decoding in (False, True) for length in (3, 24, 27)),
        ("fast", True, 27),
        ("sequential", True, 27),
    ],
)
def test_a_handoff_is_as_if_nothing_had_moved(model, router, mode, while_decoding, length):
    workers, spec = Workers(model, mode, max_batched_tokens=11), spec_of(length, think_while_decoding=while_decoding)
    workers.begin(router, H, spec)
    workers.finish()
    answer = model.answer(spec.prompt, while_decoding=while_decoding)
    assert outcome_of(router) == (answer.tokens, answer.thoughts)
    assert any(answer.thoughts) == (length > 3 or while_decoding), "something was thought at all"
    assert router.kinds()[-1] == "finish"
    workers.ends_free()


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("steps", range(4))
def test_a_repush_hands_the_same_state_over_and_tells_all_thoughts_again(model, router, workers, steps, waits):
    """The decode worker was lost. The next one gets everything, and nothing is computed twice."""
    workers.begin(router, H, spec_of())
    workers.prefill.step(steps)
    workers.decode.take(router, release())
    if waits:
        workers.prefill.push_ends(H, CUT)
    workers.decode.take(router, reserve(next_of(H), 27, fingerprint=workers.fingerprint))
    workers.prefill.take(router, repush())
    if not waits:
        workers.prefill.push_ends(H, StaleAttempt("aborted"))
    workers.finish(next_of(H))
    answer = model.answer(prompt_of(27))
    assert outcome_of(router, next_of(H)) == (answer.tokens, answer.thoughts)
    assert workers.prefill.engine.counters.prefill_tokens == 27
    workers.ends_free()


@pytest.mark.parametrize("while_decoding", [False, True])
@pytest.mark.parametrize("said", [1, 5])
def test_a_next_attempt_with_known_tokens_says_all_thoughts_again(model, router, while_decoding, said):
    """The decode worker was lost after its commit. Another one recomputes everything that the client has."""
    answer = model.answer(prompt_of(27), while_decoding=while_decoding)
    spec = spec_of(known=tuple(answer.tokens[:said]), think_while_decoding=while_decoding)
    workers, again = Workers(model), HandoffId("again", 2)
    workers.begin(router, again, spec)
    workers.finish(again)
    assert outcome_of(router, again, known=said) == (answer.tokens[said:], answer.thoughts)


@pytest.mark.parametrize("change", [{"state": b"too short"}, {"offset": 2}, {"thinker": "another"}, None])
def test_a_state_that_does_not_fit_fails_that_handoff_by_name(router, workers, change):
    workers.begin(router, H, spec_of())
    workers.prefill.run()
    push = workers.prefill.pusher.pushes[H]
    push.end = replace(push.end, state=replace(push.end.state, **change) if change else None)
    workers.finish()
    assert router.failure.kind == "HandoffError"
    assert (next(iter(change)) if change else "without a thinking state") in router.failure.message
    assert workers.decode.all_free
