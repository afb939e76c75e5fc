"""Deterministic requests of models with recurrent layers: the bits of an answer depend on the request alone. The
answer that all others must equal comes from verify passes, in an empty engine.
"""

import random
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from baton.engine.determinism.checks import STATES, checked_shapes
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.engine import BROKEN
from baton.engine.models.loading import load_model
from tests.support.engines import Streams, engine_of, hand_over, key_of, move, numbers, spec_of
from tests.unit.engine.test_constraints import breaking, constrained, ended
from tests.unit.model.checkpoints import RECURRENT

pytestmark = [pytest.mark.slow, pytest.mark.sample(4)]
BLOCK, NEW, LENGTHS = 8, 30, (150, 40)  # a prompt of two grid chunks, and a short one
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}  # heads of 16: steps are exact
MODELS = {
    "qwen3_next": RECURRENT["qwen3_next"],
    "qwen3_5": RECURRENT["qwen3_5"],
    "granite-hybrid": RECURRENT["granite-hybrid"],
    "nemotron_h": RECURRENT["nemotron_h"],
    "lfm2": RECURRENT["lfm2"],
    "lfm2-exact": RECURRENT["lfm2"]._replace(settings=RECURRENT["lfm2"].settings | WIDE),
    "granite-exact": RECURRENT["granite-hybrid"]._replace(
        settings=RECURRENT["granite-hybrid"].settings | WIDE | {"mamba_n_heads": 8}
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """The model and its shapes, as a worker checks them."""
    path = tmp_path_factory.mktemp(request.param)
    MODELS[request.param].write(path, vocab_size=259, max_position_embeddings=1024)
    backend = load_model(path, block_size=BLOCK)
    shapes = checked_shapes(backend, FixedShapes(2, 16, exact_rows=32))
    assert shapes is not None, backend.nondeterminism
    if "compiled" in backend.model.kernels.name:
        assert (shapes.exact_rows > 0) == request.param.endswith("-exact")
    return backend, shapes


def test_the_check_needs_memory_for_few_states(model, monkeypatch):
    """Decode steps have up to 32 rows, and verify passes four."""
    rows, forward = [], type(model[0]).forward

    def counted(self, batch, kv):
        rows.append((len(batch.states.memory), len(batch.states.slots)))
        return forward(self, batch, kv)

    monkeypatch.setattr(type(model[0]), "forward", counted)
    assert checked_shapes(model[0], FixedShapes(4, 16, exact_rows=32)) is not None
    states, sequences = map(max, zip(*rows, strict=True))
    assert states <= STATES + 1
    assert sequences == (32 if model[1].exact_rows else 5)


def specs():
    prompts = [numbers(random.Random(length), length, 250) for length in LENGTHS]
    options = {"deterministic": True, "max_tokens": NEW, "logprobs": 2}
    return [spec_of(prompt, temperature=0.7 * at, seed=3, **options) for at, prompt in enumerate(prompts)]


def bits(streams, number=0):
    return [(token.token_id, token.logprobs) for token in streams.tokens[key_of(number)]]


def made(model, blocks=160, *, exact=True, **options):
    """Return an engine with states of NaN, so that one that is read before it is set gives no token."""
    shapes = model[1] if exact else replace(model[1], exact_rows=0)
    engine = engine_of(model[0], blocks, shapes=shapes, **options)
    engine._states.memory.fill_(torch.nan)
    return engine


def streamed(engine, spec, others=()):
    """Return the bits of `spec`, which comes last, while others run."""
    streams = Streams()
    for number, each in enumerate(others):
        engine.submit(key_of(number), each)
        streams.step(engine)
    engine.submit(key_of(len(others)), spec)
    return bits(streams.drain(engine), len(others))


@pytest.fixture(scope="module")
def answers(model):
    return [streamed(made(model, exact=False), spec) for spec in specs()]


@pytest.mark.parametrize("exact", [True, False])
def test_bits_do_not_depend_on_company_or_chunks(model, answers, exact, seed):
    rng = random.Random(seed)
    for count in (0, 1, 3, 7):
        engine = made(model, exact=exact, max_batched_tokens=rng.choice((2048, 200, 33)), max_running=8)
        others = [
            spec_of(numbers(rng, rng.randrange(1, 60), 250), max_tokens=40, deterministic=number % 2 == 1)
            for number in range(count)
        ]
        number = count % 2
        assert streamed(engine, specs()[number], others) == answers[number]


def test_wrong_candidates_are_taken_back_with_their_state(model, answers, monkeypatch):
    """The ordinary batch draws the least likely tokens, and its states follow them."""
    backend, forward = model[0], type(model[0]).forward
    turned = lambda self, batch, kv: forward(self, batch, kv) * (1 if batch.fixed else -1)  # noqa: E731
    monkeypatch.setattr(type(backend), "forward", turned)
    engine = made(model, exact=False)
    assert [streamed(engine, spec) for spec in specs()] == answers
    assert engine.counters.rollbacks > 0


def test_preempted_sequences_begin_again(model, answers):
    engine, streams = made(model, 28, max_running=3, state_slots=3), Streams()
    for number, spec in enumerate((*specs(), specs()[0])):
        engine.submit(key_of(number), spec)
    streams.drain(engine)
    assert engine.counters.preemptions > 0
    assert [bits(streams, number) for number in range(3)] == [*answers, answers[0]]


@pytest.mark.parametrize("known", [1, 16, 25])
def test_another_worker_continues_after_a_death(model, answers, known):
    for spec, answer in zip(specs(), answers, strict=True):
        tokens = tuple(token_id for token_id, _ in answer[:known])
        assert streamed(made(model), replace(spec, known=tokens)) == answer[known:]


def test_a_handoff_and_a_move_carry_the_final_state(model, answers):
    for spec, answer in zip(specs(), answers, strict=True):
        for exact in (True, False):
            pair = made(model, exact=exact), made(model, exact=not exact)
            streams = hand_over(*pair, spec)
            assert bits(streams, "r") == answer
            assert pair[1].counters.prefill_tokens == 0
            assert bits(move(*pair, spec, 7), "r") == answer


def test_a_failed_forward_with_unverified_candidates_ends_its_own_request_only(model):
    """The last block may hold candidates, which no hash covers."""
    engine, backend = made(model, exact=False), type(model[0])
    block, prompt = engine.layout.block_size, numbers(random.Random(4), 20, 250)
    engine.submit(key_of(), spec_of(prompt, deterministic=True, max_tokens=40))
    request = engine._requests[key_of()]
    while request.sequence.known // block <= len(request.choice.tokens) // block:
        engine.step()
    with patch.object(backend, "forward", side_effect=RuntimeError("out of memory")):
        while not (failed := engine.step().failed):
            pass
    assert [key for key, _ in failed] == [key_of()]
    assert engine.pool.counts().owned == 0


def test_prefix_hits_begin_at_a_grid_chunk_with_a_checkpoint(model):
    prompt = numbers(random.Random(1), 300, 250)
    longer = spec_of(prompt, deterministic=True, max_tokens=8, logprobs=1)
    shorter, engine = replace(longer, prompt=prompt[:290]), made(model)
    first = streamed(engine, longer)
    before = engine.counters.cached_tokens
    assert streamed(engine, shorter) == streamed(made(model), shorter)
    assert (before, engine.counters.cached_tokens) == (0, 256)
    assert streamed(engine, longer) == first


@pytest.mark.parametrize("exact", [True, False])
def test_all_tokens_before_a_constraint_breaks_are_delivered(model, answers, exact):
    """A pass that cannot draw its last tokens starts again with the state before it."""
    some = [replace(spec, constraint=constrained(7).constraint) for spec in specs()]
    wanted = [[token_id for token_id, _ in answer[:7]] for answer in answers]
    assert ended(breaking(made(model, exact=exact)), some) == (wanted, {0: BROKEN, 1: BROKEN})
