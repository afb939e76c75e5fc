"""A model with recurrent layers over both roles: handoffs, lost workers and leaving ones change no token."""

import random
from dataclasses import replace

import pytest

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.engine import Engine
from baton.engine.models.loading import load_model
from baton.tokenizer import OracleTokenizer
from baton.worker.engine_factory import generate
from tests.support.engines import block_names, ids
from tests.support.fake_pusher import CUT
from tests.support.sessions import H, next_of, prefill, release, repush, reserve
from tests.support.workers import DecodeSide, Pair, PrefillSide
from tests.unit.model.checkpoints import RECURRENT

BLOCK, NEW, LENGTH = 8, 9, 27


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lfm2")
    RECURRENT["lfm2"].write(folder, vocab_size=259)
    return load_model(folder, block_size=BLOCK)


def spec_of(**changed):
    rng = random.Random("a prompt")
    prompt = tuple(rng.randrange(250) for _ in range(LENGTH))
    return SequenceSpec(prompt, Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True), **changed)


@pytest.fixture(scope="module")
def answer(backend):
    return ids(generate(Engine(backend, OracleTokenizer(), total_blocks=40), spec_of()).tokens)


class Workers(Pair):
    def __init__(self, backend, **options):
        self.fingerprint = backend.fingerprint
        self.prefill = PrefillSide(backend=backend, max_batched_tokens=11, **options)
        self.decode = DecodeSide(backend=backend, **options)

    def begin(self, session, handoff=H, spec=None, **_):
        self.decode.take(session, reserve(handoff, len(spec), fingerprint=self.fingerprint))
        self.prefill.take(session, prefill(handoff, spec))
        self.prefill.pusher.advance(handoff, self.decode)  # offered

    def finish(self, handoff=H):
        self.prefill.run()
        self.advance(handoff)
        self.decode.run()


@pytest.fixture
def workers(backend):
    return Workers(backend)


def tokens_of(session, handoff=H):
    found = {token.index: token.token_id for token in session.tokens(handoff)}
    return [found[index] for index in sorted(found)]


def test_a_handoff_carries_the_state_also_from_a_checkpoint(router, workers, answer):
    for handoff in (H, HandoffId("again", 1)):
        workers.begin(router, handoff, spec_of())
        workers.finish(handoff)
        assert tokens_of(router, handoff) == answer
        workers.ends_free()
    assert workers.prefill.engine.counters.prefill_tokens == LENGTH + LENGTH - 24
    assert workers.decode.engine.counters.prefill_tokens == 0


def test_a_decode_worker_shares_cached_blocks_without_a_checkpoint(router, workers, backend, answer):
    """It has 24 positions of the second handoff. The prefill worker fetches nothing and sends the rest."""
    workers.begin(router, H, spec_of())
    workers.finish()
    workers.prefill.loop.drain()
    workers.prefill.engine.pool.allocate(workers.prefill.engine.pool.available).release()  # evicts its cache
    again, prefix = HandoffId("again", 1), block_names(backend, spec_of().prompt, size=BLOCK)
    workers.decode.take(router, reserve(again, LENGTH, prefix=prefix, fingerprint=workers.fingerprint))
    skip = router.cached_at(again)
    assert skip == 24
    workers.prefill.take(router, prefill(again, spec_of(), skip=skip))
    workers.finish(again)
    assert tokens_of(router, again) == answer
    assert workers.prefill.engine.counters.prefill_tokens == 2 * LENGTH
    assert workers.decode.engine.counters.prefill_tokens == 0


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("steps", range(5))
def test_a_repush_carries_the_same_state(router, workers, answer, steps, waits):
    """The first decode worker was lost. The prompt is computed once."""
    workers.begin(router, H, spec_of())
    workers.prefill.step(steps)
    workers.decode.take(router, release())
    if waits:
        workers.prefill.push_ends(H, CUT)
    workers.decode.take(router, reserve(next_of(H), LENGTH, fingerprint=workers.fingerprint))
    workers.prefill.take(router, repush())
    workers.finish(next_of(H))
    assert tokens_of(router, next_of(H)) == answer
    assert workers.prefill.engine.counters.prefill_tokens == LENGTH


@pytest.mark.parametrize("said", [1, 5])
def test_a_next_attempt_recomputes_the_state(router, workers, answer, said):
    workers.begin(router, H, spec_of(known=tuple(answer[:said])))
    workers.finish()
    assert tokens_of(router) == answer[said:]


@pytest.mark.parametrize("said", [0, 1, 5])
def test_a_deterministic_request_has_the_bits_of_one_engine(router, backend, said):
    shapes = FixedShapes(2, 16)
    spec = replace(spec_of(deterministic=True), sampling=replace(spec_of().sampling, temperature=0.9, seed=4))
    engine = Engine(backend, OracleTokenizer(), total_blocks=40, shapes=shapes)
    expected = list(generate(engine, spec).tokens)
    workers = Workers(backend, shapes=shapes)
    workers.begin(router, H, replace(spec, known=tuple(ids(expected[:said]))))
    workers.finish()
    found = {token.index: (token.token_id, token.logprobs) for token in router.tokens(H)}
    assert [found[index] for index in sorted(found)] == [(each.token_id, each.logprobs) for each in expected[said:]]
    assert workers.decode.engine.counters.prefill_tokens == 0


def test_a_decode_worker_computes_a_prompt_alone(router, workers, answer):
    workers.decode.take(router, reserve(H, LENGTH, fingerprint=workers.fingerprint))
    workers.decode.serve(router, prefill(H, spec_of(), to=None))
    assert tokens_of(router) == answer
    assert workers.decode.all_free


@pytest.mark.parametrize("change", [{"position": 2}, {"data": b"short"}, None])
def test_a_state_that_does_not_fit_fails_that_handoff_by_name(router, workers, change):
    workers.begin(router, H, spec_of())
    workers.prefill.run()
    push = workers.prefill.pusher.pushes[H]
    push.end = replace(push.end, state=replace(push.end.state, **change) if change else None)
    workers.finish()
    assert router.failure.kind == "HandoffError"
    assert ("does not fit" if change else "without their state") in router.failure.message
    assert workers.decode.all_free


@pytest.mark.parametrize(("steps", "ahead"), [(3, 0), (6, 0), (5, 3)])
def test_a_leaving_decode_worker_moves_the_state(router, backend, answer, steps, ahead):
    side, other, later = DecodeSide(backend=backend), DecodeSide(backend=backend), next_of(H)
    side.attach_pusher()
    side.take(router, reserve(H, LENGTH, fingerprint=backend.fingerprint), prefill(H, spec_of(), to=None))
    side.step(steps)
    side.role.leave(ahead)
    moves = router.events[-1].preempted
    assert moves.held
    other.take(router, reserve(later, moves.known_tokens, fingerprint=backend.fingerprint))
    side.take(router, repush(H))
    while later in side.pusher.pushes:
        side.step()
        side.pusher.advance(later, other)
    side.loop.drain()
    other.run()
    found = {token.index: token.token_id for handoff in (H, later) for token in router.tokens(handoff)}
    assert [found[index] for index in range(NEW)] == answer
    assert other.engine.counters.prefill_tokens == 0
    assert side.all_free
    assert other.all_free
