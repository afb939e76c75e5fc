"""Overlap of host and device, on a CPU: the same streams, blocks that stay until their step has ended, late errors."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from baton.core import FinishReason, HandoffId
from baton.engine.engine import NO_TOKEN
from baton.engine.kernels.cpu.compiler import Unavailable, load_library
from baton.engine.overlap import LateTokens
from baton.tokenizer import ORACLE_EOS
from baton.worker.engine_factory import generate
from benchmarks.lib.random_weights import random_model
from tests.support.engines import (
    BLOCK,
    Faulty,
    Streams,
    block_names,
    engine_of,
    hand_over,
    key_of,
    move,
    numbers,
    spec_of,
)

MODEL = {"architectures": ["LlamaForCausalLM"], "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48}
MODEL |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
MODEL |= {"max_position_embeddings": 128, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def model():
    return random_model(MODEL, device=torch.device("cpu"), dtype="float32", block_size=BLOCK)


@pytest.fixture(scope="module")
def comparable():
    """A function that returns what two runs have in common. Without compiled kernels, bits depend on the batch."""
    try:
        load_library("f32")
    except Unavailable:
        return lambda tokens: [replace(token, logprobs=None) for token in tokens]
    return list


@pytest.fixture(params=["oracle", "transformer"])
def either(request, backend, model):
    return backend if request.param == "oracle" else model


def early(backend, total_blocks=40, **options):
    return engine_of(backend, total_blocks, overlap=True, **options)


def mixed_spec(rng, stems):
    """Draw a request. Two of three need nothing on the host, so that steps overlap."""
    length = rng.randint(1, 30)
    needs_host = rng.random() < 0.15
    return spec_of(
        prompt=(*rng.choice(stems), *numbers(rng, rng.choice([0, 0, 1, 5]))),
        priority=rng.choice([0, 0, 1]),
        max_tokens=length,
        min_tokens=rng.choice([0, 0, 0, length // 2]),
        temperature=rng.choice([0.0, 0.7, 1.3]),
        top_p=rng.choice([1.0, 0.9]),
        seed=rng.getrandbits(64),
        stop=rng.choice([(), ("a",), ("e", "t ")]),
        stop_token_ids=rng.choice([(), (65, 66, 67, 68)]),
        ignore_eos=rng.random() < 0.5,
        logit_bias=rng.choice([(), ((ORACLE_EOS, 2.0), (65, 1.0))]),
        presence_penalty=0.5 if needs_host else 0.0,
        logprobs=2 if needs_host else None,
    )


def assert_balanced(engine):
    """Check that each owned block belongs to a request, or to one that ended while a step used it."""
    held = {block for _, allocation in engine.holdings() if allocation is not None for block in allocation.blocks}
    assert engine.pool.counts().owned == len(held)


@pytest.mark.sample(5)
@pytest.mark.parametrize("number", range(8))
def test_random_schedules_give_the_streams_of_an_engine_without_overlap(either, number, comparable):
    rng = random.Random(number)
    stems = [numbers(rng, rng.randint(5, 13)) for _ in range(3)]
    specs = {key_of(i): mixed_spec(rng, stems) for i in range(20)}
    alone = {key: generate(engine_of(either, overlap=False), spec) for key, spec in specs.items()}
    blocks = rng.choice([16, 24, 200])
    engine = early(either, blocks, max_batched_tokens=rng.choice([7, 40]), max_running=rng.choice([3, 8, 40]))
    waiting, released, found, seen = list(specs), set[HandoffId](), Streams(), Counter[str]()

    def shake(result):
        assert_balanced(engine)
        seen.update(early=result.under_way)
        if waiting and rng.random() < 0.3:
            engine.submit(key := waiting.pop(), specs[key])
        victim = rng.choice(list(specs))
        if rng.random() < 0.05 and victim not in waiting and victim not in found.finishes:
            engine.release(victim)
            released.add(victim)
            assert_balanced(engine)

    while waiting:
        engine.submit(key := waiting.pop(), specs[key])
        found.drain(engine, shake)
    assert engine.pool.available == blocks
    assert seen["early"] > 0
    for key, wanted in alone.items():
        whole, right = comparable(found.tokens[key]), comparable(wanted.tokens)
        assert whole == right[: len(whole)]
        assert key in released or (whole, found.finishes[key]) == (right, wanted.finish)


def test_small_pools_preempt_with_the_same_streams(backend):
    specs = {key_of(i): spec_of((i, 1, 2), max_tokens=40, temperature=1.0, seed=i) for i in range(8)}
    engine, found = early(backend, 16), Streams()

    def on_free(sequence):
        step = engine._overlap.under_way
        assert step is None or all(request.sequence is not sequence for request in step.requests), "still in use"

    engine.watch(lambda work, layer: None, on_free)
    for key, spec in specs.items():
        engine.submit(key, spec)
    found.drain(engine, lambda result: assert_balanced(engine))
    assert engine.counters.preemptions > 0
    assert all(found.ids(key) == backend.expected(spec) for key, spec in specs.items())


def test_counts_are_those_without_overlap(backend):
    """A sequence that ends by its length is not computed further."""
    totals = []
    for overlap in (False, True):
        engine, sums = engine_of(backend, overlap=overlap), Counter[str]()
        for i in range(3):
            engine.submit(key_of(i), spec_of((i, 1, 2), max_tokens=5 + i))

        def add(result, sums=sums):
            fields = ("computed", "prefill", "context", "prefill_context")
            sums.update({name: getattr(result, name) for name in fields})

        Streams().drain(engine, add)
        load = engine.load()
        totals.append((sums, load.step, load.decode_steps, load.decode_tokens, load.prefill_tokens))
    assert totals[0] == totals[1]


def ending_at(backend, engine, reason, **options):
    """Step until the result has the end of a request that only its token could tell. Return that result's streams."""
    specs = (spec_of((1, 2, 3), max_tokens=60, temperature=1.0, seed=seed, **options) for seed in range(99))
    engine.submit(key_of(), next(spec for spec in specs if len(backend.expected(spec)) >= 6))
    found = Streams()
    while key_of() not in found.finishes:
        result = found.step(engine)
    assert found.finishes[key_of()].reason is reason
    assert result.under_way
    return found


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ignore_eos": False, "logit_bias": ((ORACLE_EOS, 2.5),)}, FinishReason.EOS),
        ({"stop_token_ids": tuple(range(65, 90))}, FinishReason.STOP_TOKEN),
        ({"stop": ("a", "e", "s")}, FinishReason.STOP_STRING),
    ],
)
def test_blocks_of_an_ended_sequence_are_freed_when_its_last_step_has_ended(backend, options, reason):
    engine = early(backend)
    found = ending_at(backend, engine, reason, **options)
    ((key, allocation),) = engine.holdings()
    assert key == key_of()
    assert engine.pool.counts().owned == len(allocation.blocks)
    assert engine.has_work()
    known = [1, 2, 3, *found.ids(key)]
    names = block_names(backend, known)
    assert [engine.pool.find([name]) for name in names] == [[block] for block in allocation.blocks[: len(names)]]
    assert engine.pool.counts().cached == 0, "all cached blocks are still in use"
    assert found.step(engine).outputs == []
    assert not engine.has_work()
    assert (engine.pool.counts().owned, engine.pool.available) == (0, 40)
    assert engine.pool.counts().cached == len(names), "a block with the position behind the end was cached"


def under_way(engine, **specs):
    """Submit requests and step until all are in a step under way. Return their streams."""
    found = Streams()
    for name, spec in specs.items():
        engine.submit(key_of(name), spec)
    while not (result := found.step(engine)).under_way or engine.load().queued_tokens:
        assert engine.has_work()
    assert not result.idle
    return found


def test_a_release_frees_the_blocks_after_the_step_under_way_and_the_key_may_be_used_again(backend):
    engine, spec = early(backend), spec_of("abc", max_tokens=20)
    under_way(engine, r=spec)
    engine.release(key_of("r"))
    assert engine.pool.counts().owned == 1
    engine.submit(key_of("r"), spec)
    found = Streams().drain(engine)
    assert found.ids(key_of("r")) == backend.expected(spec)
    assert engine.pool.available == 40


def test_a_renamed_request_gets_its_late_token_under_its_new_name(backend):
    engine, spec = early(backend), spec_of("abc", max_tokens=8)
    found = under_way(engine, old=spec)
    before = found.ids(key_of("old"))
    engine.rename(key_of("old"), key_of("new"))
    found.drain(engine)
    assert [*before, *found.ids(key_of("new"))] == backend.expected(spec)


def test_a_handoff_between_two_engines(either):
    spec = spec_of((5, 6, 7, 8, 9), max_tokens=20, temperature=1.0, seed=3)
    alone = generate(engine_of(either, overlap=False), spec)
    assert hand_over(early(either), early(either), spec).tokens[key_of()] == alone.tokens


@pytest.mark.parametrize(("after", "ahead"), [(1, 0), (2, 0), (9, 0), (2, 1), (2, 5)])
def test_a_move_takes_the_late_token_along(either, after, ahead):
    spec = spec_of((5, 6, 7, 8, 9), max_tokens=20, temperature=1.0, seed=3)
    alone = generate(engine_of(either, overlap=False), spec)
    assert move(early(either), early(either), spec, after, ahead).tokens[key_of()] == alone.tokens


def test_an_error_of_the_late_read_fails_the_sequences_of_that_step_alone(backend, monkeypatch):
    engine, later = early(backend), spec_of("xyz", max_tokens=12)
    under_way(engine, a=spec_of("abc", max_tokens=20), b=spec_of("de", max_tokens=20))

    def broken(tokens):
        monkeypatch.undo()
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(LateTokens, "read", broken)
    result = engine.step()
    assert sorted(key.request_id for key, _ in result.failed) == ["a", "b"]
    assert {str(fault) for _, fault in result.failed} == {"RuntimeError: a kernel failed"}
    assert engine.pool.counts().owned > 0, "the next step was already launched"
    engine.submit(key_of("c"), later)
    found = Streams().drain(engine)
    assert found.ids(key_of("c")) == backend.expected(later)
    assert set(found.tokens) == {key_of("c")}
    assert engine.pool.available == 40
    assert engine.pool.counts().cached == 3, "blocks of failed sequences must not be cached: those of `c` are"


def test_an_error_of_the_launch_fails_its_sequences_and_frees_their_blocks(backend):
    faulty = Faulty()
    engine = early(faulty)
    under_way(engine, a=spec_of("abc", max_tokens=20), b=spec_of("de", max_tokens=20))
    faulty.fault = "raise"
    assert sorted(key.request_id for key, _ in engine.step().failed) == ["a", "b"]
    assert (engine.has_work(), engine.pool.available) == (False, 40)


def test_a_row_without_numbers_fails_alone(backend):
    faulty = Faulty()
    engine, one, other = early(faulty), spec_of("abc", max_tokens=20), spec_of("de", max_tokens=20)
    found, failed = under_way(engine, a=one, b=other), []
    count = len(found.ids(key_of("a"))) + 1  # tokens that are drawn; the last one is on the device
    faulty.fault, faulty.poison = "nan", backend.expected(one)[count - 1]
    assert faulty.poison not in backend.expected(other)
    while engine.has_work():
        result = engine.step()
        failed += [(key.request_id, str(fault)) for key, fault in result.failed]
        for output in result.outputs:
            found.tokens[output.key] += output.tokens
        assert_balanced(engine)
    assert failed == [("a", NO_TOKEN)]
    assert found.ids(key_of("a")) == backend.expected(one)[:count]
    assert found.ids(key_of("b")) == backend.expected(other)
    assert engine.pool.available == 40


def test_off_by_default_on_a_cpu_and_for_requests_that_need_the_host(backend):
    spec = spec_of("abc", max_tokens=6)
    host = [spec_of("abc", logprobs=0), spec_of("abc", presence_penalty=0.5), spec_of("abc", min_tokens=9)]
    for engine, each in ((engine_of(backend), spec), *((early(backend), each) for each in host)):
        engine.submit(key_of(), each)
        Streams().drain(engine, lambda result: pytest.fail("overlapped") if result.under_way else None)


@pytest.mark.parametrize("joins", [{"prompt": "zzz"}, {"prompt": "z", "logprobs": 1}], ids=["prompt", "logprobs"])
@pytest.mark.parametrize("early_by", range(4))
def test_a_sequence_that_ended_while_it_moves_is_not_run_again(backend, joins, early_by):
    """The end lands in the step that plans a batch which does not continue the step under way."""
    drawn = (spec_of("abc", max_tokens=60, ignore_eos=False, temperature=1.0, seed=seed) for seed in range(100))
    asked = next(spec for spec in drawn if 8 < len(backend.expected(spec)) < 40)
    wanted, engine, key, found = backend.expected(asked), early(backend), key_of(), Streams()
    engine.submit(key, asked)
    while len(found.tokens[key]) < 3:
        found.step(engine)
    found.take(engine, engine.land())
    assert engine.halt(key, 50)
    while key not in found.finishes:
        if len(found.tokens[key]) == len(wanted) - early_by:
            engine.submit(key_of("new"), spec_of(max_tokens=1, **joins))
            early_by = -1  # once
        found.step(engine)
    assert found.ids(key) == wanted
