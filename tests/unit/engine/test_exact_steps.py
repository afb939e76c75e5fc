"""Decode steps with the bits of verify passes: their tokens are final and need no verification."""

from dataclasses import replace

import pytest

from baton.engine.determinism.checks import exact_rows
from baton.engine.determinism.planner import VerifiedProgress, split_exact
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.engine import Engine
from baton.engine.kernels.cpu.kernel_choice import Choice, Profile
from baton.engine.kernels.cpu.ops import CpuKernels
from baton.engine.models.loading import load_model
from baton.engine.sequence import ScheduledSequence, Sequence
from baton.tokenizer import load_tokenizer
from tests.support.engines import Streams, key_of
from tests.unit.engine.test_determinism import DEMO
from tests.unit.engine.test_deterministic import SHAPES, Tampered, answers, engine_of, nothing_verified, spec_of

ALL_WRONG = range(400)  # tokens of a forward that is not fixed


def exact(backend, rows=64, **options):
    return engine_of(backend, shapes=replace(SHAPES, exact_rows=rows), **options)


def decode_steps(backend):
    return [lens for lens, _ in backend.shapes if max(lens) == 1]


def test_prompts_of_others_have_a_forward_of_their_own():
    backend, found = Tampered(ALL_WRONG), Streams()
    engine, asked = exact(backend), spec_of("first", max_tokens=25)
    engine.submit(key_of(0), asked)
    while not found.tokens:
        found.step(engine)
    for number in (1, 2):
        engine.submit(key_of(number), spec_of("y" * 70 * number, deterministic=False, max_tokens=25))
    said = [output.key for _ in range(20) for output in found.step(engine).outputs]
    assert said.count(key_of(0)) == 20, "each step brings a token"
    assert found.drain(engine).ids(key_of(0)) == backend.expected(asked)
    assert nothing_verified(engine)
    assert (1,) in decode_steps(backend), "beside prompts"
    assert (1, 1, 1) in decode_steps(backend), "others' decode rows come along"


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_no_exact_step_has_more_rows_than_it_may(rows):
    backend = Tampered(ALL_WRONG)
    engine = exact(backend, rows)
    asked = [spec_of("z" * (3 + number), deterministic=number % 3 != 2) for number in range(8)]
    for got, each in zip(answers(engine, asked), asked, strict=True):
        assert got == backend.expected(each) or not each.deterministic
    assert nothing_verified(engine)
    assert max(map(len, decode_steps(backend))) == rows


def test_delivered_tokens_are_replayed_by_passes_and_the_rest_is_exact():
    backend = Tampered(ALL_WRONG)
    engine = exact(backend)
    asked = spec_of("some prompt that was computed elsewhere", max_tokens=60, temperature=0.8)
    wanted = backend.expected(asked)
    assert answers(engine, [replace(asked, known=tuple(wanted[:20]))]) == [wanted[20:]]
    assert engine.counters.verify_passes == 3, "20 tokens in windows of 8"
    assert engine.counters.rollbacks == 0


def test_all_is_ordinary_without_deterministic_requests():
    backend = Tampered()
    answers(exact(backend), [spec_of("x" * 30, deterministic=False) for _ in range(3)])
    assert backend.shapes == []


def item(number, *, count=1, known=20, verified=None, final=None):
    """Make a scheduled sequence. `verified` makes it deterministic."""
    sequence = Sequence(key_of(number), number, known, 10, known - count)
    if verified is not None:
        sequence.policies = (VerifiedProgress(SHAPES, 10, verified, verified - 1 if final is None else final),)
    return ScheduledSequence(sequence, count)


def test_which_forwards_a_batch_needs():
    sure, plain, chunk = item(1, verified=20), item(2), item(3, count=7)
    doubtful = item(4, verified=18)  # has candidates
    assert split_exact([plain, chunk], 4) == [([plain, chunk], False)]
    assert split_exact([sure, plain], 0) == [([sure, plain], False)]
    assert split_exact([plain, doubtful], 4) == [([plain, doubtful], False)]
    assert split_exact([plain, sure], 4) == [([plain, sure], True)]
    assert split_exact([chunk, sure, plain], 4) == [([sure, plain], True), ([chunk], False)]
    assert split_exact([plain, sure, doubtful], 1) == [([sure], True), ([plain, doubtful], False)]
    several = [item(number, verified=20) for number in range(5)]
    wanted = [(several[:3], True), ([*several[3:], plain], True), ([chunk], False)]
    assert split_exact([*several, plain, chunk], 3) == wanted


def compiled_demo(dtype, **options):
    backend = load_model(DEMO, dtype=dtype, **options)
    if backend.model.kernels.name != "compiled":
        pytest.skip("no compiled kernels on this machine: no decode step is exact")
    return backend


def demo_engine(backend, rows, total_blocks=64, **options):
    shapes = FixedShapes(exact_rows=rows)
    return Engine(backend, load_tokenizer(DEMO), total_blocks=total_blocks, shapes=shapes, **options)


def bits_of(engine, asked, others):
    found = Streams()
    for number, each in enumerate([*others, asked]):
        found.step(engine)
        engine.submit(key_of(number), each)
    return [(token.token_id, token.logprobs) for token in found.drain(engine).tokens[key_of(len(others))]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "logprobs": 2}])
def test_real_bits_are_those_of_verify_passes(kind):
    backend = compiled_demo("bfloat16", attention_splits="load_bf16")
    text = load_tokenizer(DEMO).encode("The days of the week are known to all. " * 12)
    asked = spec_of(text, max_tokens=40, **kind)
    other = spec_of(text[:50], max_tokens=40, temperature=1.0, deterministic=False)
    answers, engines = [], []
    for rows, others in ((0, 0), (0, 6), (64, 0), (64, 6), (3, 6)):
        engines.append(demo_engine(backend, rows, total_blocks=512, prefix_cache=False))
        answers.append(bits_of(engines[-1], asked, [other] * others))
    assert all(answer == answers[0] for answer in answers)
    assert [engine.counters.verify_passes > 0 for engine in engines] == [True, True, False, False, False]


def test_a_profile_that_prefers_other_products_costs_no_exact_step(monkeypatch):
    """Fixed forwards use the same product up to 96 rows; the ordinary batch uses the fastest."""
    backends = [compiled_demo("float32")]
    monkeypatch.setattr("baton.engine.kernels.select.load_profile", lambda path: Profile(static=Choice(1, tall=True)))
    backends.append(load_model(DEMO, dtype="float32"))
    kernels = backends[1].model.kernels
    assert isinstance(kernels, CpuKernels)
    assert kernels.profile.static == Choice(1, tall=True)
    asked, answers = spec_of((1, 2, 3), max_tokens=20, temperature=1.0, logprobs=3), []
    for each in backends:
        assert exact_rows(each, FixedShapes(exact_rows=64)) == 64
        answers.append(bits_of(demo_engine(each, 64), asked, [replace(asked, deterministic=False)] * 3))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("rows", [0, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_others_left_in_a_block_is_not_read(rows, dtype):
    """Fixed forwards read whole chunks of positions, where a NaN must not spread."""
    backend, answers = load_model(DEMO, dtype=dtype), []
    for value in (0.0, float("nan")):
        engine = demo_engine(backend, rows, total_blocks=20)
        for tensor in engine.kv.tensors:
            tensor[:, :-1].fill_(value)
        answers.append(bits_of(engine, spec_of((1, 2, 3), max_tokens=40), []))
    assert len(answers[0]) == 40
    assert answers[0] == answers[1]
