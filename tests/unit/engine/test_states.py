"""Models with recurrent layers in the engine: slots of states, checkpoints, handoffs. Each answer is that of an engine
that computes the request alone, which `test_families.py` compares with transformers.
"""

import random
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from baton.core import ThinkingState
from baton.engine.models.loading import load_model
from baton.engine.states import EVERY
from baton.errors import CheckpointError
from baton.worker.engine_factory import generate
from tests.support.engines import (
    Streams,
    engine_of,
    hand_over,
    ids,
    key_of,
    move,
    numbers,
    reserved,
    run,
    spec_of,
)
from tests.unit.model.checkpoints import RECURRENT

BLOCK, NEW = 8, 12
NAMES = ["lfm2", "qwen3_5", "granite-hybrid", "nemotron_h"]


@pytest.fixture(scope="module", params=NAMES)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    RECURRENT[request.param].write(path, vocab_size=259, max_position_embeddings=1024)
    return path


@pytest.fixture(scope="module")
def backend(folder):
    return load_model(folder, block_size=BLOCK)


def poisoned(backend, blocks=80, **options):
    """Return an engine with states of NaN, so that one that is read before it is set gives no token."""
    engine = engine_of(backend, blocks, **options)
    engine._states.memory.fill_(torch.nan)
    return engine


def request_of(seed, length, **options):
    return spec_of(numbers(random.Random(seed), length, 250), max_tokens=options.pop("max_tokens", NEW), **options)


def alone(backend, spec):
    return ids(generate(poisoned(backend, prefix_cache=False), spec).tokens)


SPECS = [request_of(seed, length) for seed, length in enumerate((5, 33, 70, 16, 17))]


@pytest.fixture(scope="module")
def answers(backend):
    return [alone(backend, spec) for spec in SPECS]


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("blocks", "hits", "options"),
    [
        (80, True, {}),
        (80, True, {"max_batched_tokens": 11}),  # chunks
        (24, True, {"max_batched_tokens": 30}),  # preemptions
        (80, False, {"prefix_cache": False, "max_batched_tokens": 30}),
        (80, False, {"state_slots": 2}),  # the others wait, and two checkpoints are too few
    ],
)
def test_answers_do_not_depend_on_company_chunks_or_preemptions(backend, answers, blocks, hits, options):
    engine = poisoned(backend, blocks, **options)
    slots = len(engine.pool._slots)
    for _ in range(2):
        streams = run(engine, SPECS)
        assert [streams.ids(key_of(number)) for number in range(len(SPECS))] == answers
        assert len(engine.pool._slots) == slots, "all slots are free again"
    assert (engine.counters.preemptions > 0) == (blocks == 24)
    assert (engine.counters.cached_tokens > 0) == hits


def test_choices_of_one_prompt_begin_at_its_last_checkpoint(backend):
    spec, engine = request_of(3, 61), poisoned(backend)
    seeded = [replace(spec, sampling=replace(spec.sampling, temperature=1.0, seed=seed)) for seed in range(3)]
    expected = [alone(backend, each) for each in seeded]
    assert len(set(map(tuple, expected))) == 3
    first = ids(generate(engine, seeded[0]).tokens)
    streams = run(engine, seeded[1:])
    assert [first, *(streams.ids(key_of(number)) for number in range(2))] == expected
    assert engine.counters.cached_tokens == 2 * 56


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("length", "extra", "cached"),
    [
        (61, 0, 56),  # the checkpoint at the prompt's end
        (61, 20, 56),
        (40, 1, 40 - BLOCK),  # the checkpoint is in front of the last token
        (EVERY + 30, -20, EVERY),  # a shorter prompt: only a regular checkpoint
        (EVERY - 10, -20, 0),  # no checkpoint, although blocks are cached
    ],
)
def test_a_prefix_hit_begins_at_a_checkpoint(backend, length, extra, cached):
    first = request_of(9, max(length, length + extra))
    one, other = (replace(first, prompt=first.prompt[:end]) for end in (length, length + extra))
    engine = poisoned(backend)
    generate(engine, one)
    assert ids(generate(engine, other).tokens) == alone(backend, other)
    assert engine.counters.cached_tokens == cached


def test_the_next_turn_begins_at_a_checkpoint_of_the_answer(backend):
    spec, engine = request_of(2, EVERY - 6, max_tokens=20), poisoned(backend)
    answer = ids(generate(engine, spec).tokens)
    follow_up = replace(spec, prompt=(*spec.prompt, *answer, 7, 8, 9))
    assert ids(generate(engine, follow_up).tokens) == alone(backend, follow_up)
    assert engine.counters.cached_tokens == EVERY


def test_checkpoints_are_as_many_as_slots_and_the_least_recently_used_goes_first(backend):
    engine, specs = poisoned(backend, state_slots=2), [request_of(seed, 30) for seed in (20, 21, 22)]
    for spec in specs:
        generate(engine, spec)
    assert len(engine._states._checkpoints) == 2
    for spec, hit in ((specs[1], 24), (specs[0], 0), (specs[1], 24), (specs[2], 0)):
        before = engine.counters.cached_tokens
        assert ids(generate(engine, spec).tokens) == alone(backend, spec)
        assert engine.counters.cached_tokens - before == hit


def test_a_failed_step_leaves_no_checkpoint(backend):
    engine, spec, forward = poisoned(backend), request_of(5, 30), backend.forward

    def fails_late(batch, kv):
        if int(batch.positions[-1]) >= 24:
            raise RuntimeError("out of luck")
        return forward(batch, kv)

    with patch.object(type(backend), "forward", lambda _, batch, kv: fails_late(batch, kv)):
        engine.submit(key_of(), spec)
        while not (failed := engine.step().failed):
            pass
    assert failed[0][0] == key_of()
    assert not engine._states._checkpoints
    assert ids(generate(engine, spec).tokens) == alone(backend, spec)


def test_a_reservation_has_a_slot_until_it_is_released(backend, answers):
    engine = poisoned(backend, state_slots=2)
    rooms = [reserved(engine, 20) for _ in range(2)]
    assert engine.reserve(20) is None
    engine.submit(key_of(), SPECS[0])
    assert engine.step().idle, "the request waits for a slot"
    rooms[0].release()
    assert Streams().drain(engine).ids(key_of()) == answers[0]
    rooms[1].release()
    assert sorted(engine.pool._slots) == [0, 1]


@pytest.fixture
def pair(folder, backend):
    """A sender and a receiver with blocks of another size, at other places, and slots at other places."""
    sender, receiver = poisoned(load_model(folder, block_size=5)), poisoned(backend)
    receiver.pool.allocate(3, sequence=True)
    return sender, receiver


def test_a_handoff_carries_the_state(pair, answers):
    for _ in range(2):  # the second time from cached blocks and a checkpoint of the sender
        for spec, answer in zip(SPECS, answers, strict=True):
            assert hand_over(pair[0], pair[1], spec).ids(key_of()) == answer
    assert pair[0].counters.cached_tokens > 0
    assert pair[1].counters.prefill_tokens == 0


def test_without_the_state_answers_differ(pair, answers):
    def dropped(state):
        return replace(state, data=bytes(len(state.data)))

    found = [hand_over(pair[0], pair[1], spec, change=dropped).ids(key_of()) for spec in SPECS]
    assert all(one != answer for one, answer in zip(found, answers, strict=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: None, "without their state"),
        (lambda state: ThinkingState("t", 0, 0, b"s"), "without their state"),
        (lambda state: replace(state, data=state.data[4:]), r"does not fit: bytes \d+, not \d+"),
        (lambda state: replace(state, position=4), "does not fit: position 4, not 5"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(pair, change, words):
    with pytest.raises(ValueError, match=words):
        hand_over(pair[0], pair[1], SPECS[0], change=change)
    assert pair[1].pool.counts().owned == 3


@pytest.mark.parametrize(("after", "ahead"), [(1, 0), (5, 0), (5, 3)])
def test_a_running_sequence_moves_with_its_state(folder, backend, answers, after, ahead):
    sender, receiver = poisoned(load_model(folder, block_size=5)), poisoned(backend)
    assert move(sender, receiver, SPECS[2], after, ahead).ids(key_of()) == answers[2]


def test_what_is_not_supported_is_rejected_by_name(folder):
    with pytest.raises(CheckpointError, match="has recurrent layers, not supported on cuda, only on CPUs"):
        load_model(folder, device="cuda")
