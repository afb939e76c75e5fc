"""Decode steps that give the bits of verify passes: their tokens are final, and nothing is left to verify."""

from dataclasses import replace

import pytest

from baton.core import HandoffId, Sampling, SequenceSpec
from baton.engine.engine import Engine
from baton.engine.exact import parts
from baton.engine.fixed import FixedShapes
from baton.engine.kernels.cpu.ops import CpuKernels
from baton.engine.kernels.cpu.profile import Choice, Profile
from baton.engine.model.build import load_model
from baton.engine.selfcheck import exact_rows
from baton.engine.sequence import Sequence, Work
from baton.engine.windows import Fixed
from baton.tokenizer import load_tokenizer
from tests.unit.engine.test_determinism import DEMO
from tests.unit.engine.test_deterministic import SHAPES, VARIETIES, Tampered, drain, engine_of, run, spec

ALL_WRONG = range(400)  # what a forward that is not fixed draws


def exact(rows=64):
    return replace(SHAPES, exact_rows=rows)


def nothing_verified(engine):
    counters = engine.counters
    return (counters.verify_passes, counters.rollbacks, counters.recomputed_tokens) == (0, 0, 0)


@pytest.mark.parametrize("variety", VARIETIES)
def test_tokens_are_final_at_once(variety):
    backend = Tampered(ALL_WRONG)
    engine = engine_of(backend, shapes=exact())
    asked = [spec("a prompt of some length", **VARIETIES[variety]), spec("b", **VARIETIES[variety])]
    assert run(engine, asked)[0] == [backend.expected(each) for each in asked]
    assert nothing_verified(engine)


def test_each_step_brings_a_token():
    engine = engine_of(Tampered(ALL_WRONG), shapes=exact())
    key = HandoffId("r", 1)
    engine.submit(key, spec("abc", max_tokens=20))
    said = [len(output.tokens) for _ in range(20) for output in engine.step().outputs]
    assert said == [1] * 20


def test_all_is_ordinary_without_them():
    backend = Tampered()
    run(engine_of(backend, shapes=exact()), [spec("x" * 30, deterministic=False) for _ in range(3)])
    assert backend.shapes == []


def test_prompts_of_others_have_a_forward_of_their_own():
    backend = Tampered(ALL_WRONG)
    engine = engine_of(backend, shapes=exact())
    keys = [HandoffId(f"r{number}", 1) for number in range(3)]
    engine.submit(keys[0], spec("first", max_tokens=25))
    while not engine.step().outputs:
        pass
    for number, key in enumerate(keys[1:], 1):
        engine.submit(key, spec("y" * 70 * number, deterministic=False, max_tokens=25))
    found, _ = drain(engine, keys)
    assert found[0] == backend.expected(spec("first", max_tokens=25))[1:]
    assert nothing_verified(engine)
    decodes = [lens for lens, _ in backend.shapes if max(lens) == 1]
    assert (1,) in decodes, "beside prompts"
    assert (1, 1, 1) in decodes, "others' decode rows come along"


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_no_exact_step_has_more_rows_than_it_may(rows):
    backend = Tampered(ALL_WRONG)
    engine = engine_of(backend, shapes=exact(rows))
    asked = [spec("z" * (3 + number), deterministic=number % 3 != 2, max_tokens=30) for number in range(8)]
    found, _ = run(engine, asked)
    for got, each in zip(found, asked, strict=True):
        if each.deterministic:
            assert got == backend.expected(each)
    assert nothing_verified(engine)
    decodes = [len(lens) for lens, _ in backend.shapes if max(lens) == 1]
    assert max(decodes) == rows


def test_delivered_tokens_are_replayed_by_passes_and_the_rest_is_exact():
    backend = Tampered(ALL_WRONG)
    engine = engine_of(backend, shapes=exact())
    asked = spec("some prompt that was computed elsewhere", max_tokens=60, temperature=0.8)
    wanted = backend.expected(asked)
    assert run(engine, [replace(asked, known=tuple(wanted[:20]))])[0] == [wanted[20:]]
    assert engine.counters.verify_passes == 3, "20 tokens in windows of 8"
    assert engine.counters.rollbacks == 0


def test_preempted_ones_come_back():
    backend = Tampered(ALL_WRONG)
    engine = engine_of(backend, shapes=exact(), total_blocks=12)
    asked = [spec("p" * 20, max_tokens=100, seed=number, temperature=0.9) for number in range(4)]
    assert run(engine, asked)[0] == [backend.expected(each) for each in asked]
    assert engine.counters.preemptions > 0
    assert engine.counters.rollbacks == 0


def item(number, *, count=1, known=20, verified=None, final=None):
    """`verified`: of a deterministic sequence."""
    sequence = Sequence(HandoffId(f"r{number}", 1), number, known, 10, known - count)
    if verified is not None:
        sequence.fixed = Fixed(SHAPES, 10, verified, verified - 1 if final is None else final)
    return Work(sequence, count)


def test_which_forwards_a_batch_needs():
    sure, plain, chunk = item(1, verified=20), item(2), item(3, count=7)
    doubtful = item(4, verified=18)  # has candidates
    assert parts([plain, chunk], 4) == [([plain, chunk], False)]
    assert parts([sure, plain], 0) == [([sure, plain], False)]
    assert parts([plain, doubtful], 4) == [([plain, doubtful], False)]
    assert parts([plain, sure], 4) == [([plain, sure], True)]
    assert parts([chunk, sure, plain], 4) == [([sure, plain], True), ([chunk], False)]
    assert parts([plain, sure, doubtful], 1) == [([sure], True), ([plain, doubtful], False)]
    several = [item(number, verified=20) for number in range(5)]
    assert parts([*several, plain, chunk], 3) == [
        (several[:3], True),
        ([*several[3:], plain], True),
        ([chunk], False),
    ]


@pytest.mark.parametrize("kind", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "logprobs": 2}])
def test_real_bits_are_those_of_verify_passes(kind):
    """Whichever of both ways each token comes, and whatever else is in the batch."""
    backend, tokenizer = load_model(DEMO, dtype="bfloat16", attention_splits="load_bf16"), load_tokenizer(DEMO)
    if backend.model.kernels.name != "compiled":
        pytest.skip("no compiled kernels on this machine: no decode step is exact")
    text = tokenizer.encode("The days of the week are known to all. " * 12)
    asked = SequenceSpec(tuple(text), Sampling(max_tokens=70, ignore_eos=True, seed=3, **kind), deterministic=True)
    other = SequenceSpec(tuple(text[:50]), Sampling(max_tokens=50, ignore_eos=True, seed=4))
    answers, engines = [], []
    for rows, others in ((0, 0), (0, 6), (64, 0), (64, 6), (3, 6)):
        engines.append(
            Engine(backend, tokenizer, total_blocks=512, prefix_cache=False, shapes=FixedShapes(exact_rows=rows))
        )
        answers.append(bits_of(engines[-1], asked, [other] * others))
    assert all(answer == answers[0] for answer in answers)
    assert [engine.counters.verify_passes > 0 for engine in engines] == [True, True, False, False, False]


def bits_of(engine, asked, others):
    """Ids and logprobs of `asked`, which comes when the others are decoding."""
    key, found = HandoffId("asked", 1), []
    for number, each in enumerate(others):
        engine.submit(HandoffId(f"other{number}", 1), each)
        engine.step()
    engine.submit(key, asked)
    while engine.has_work():
        for output in engine.step().outputs:
            if output.key == key:
                found += [(token.token_id, token.logprobs) for token in output.tokens]
    return found


def test_a_profile_that_prefers_other_products_costs_no_exact_step(monkeypatch):
    """Fixed forwards take the same one up to 96 rows; the ordinary batch takes what is the fastest."""
    backend = load_model(DEMO, dtype="float32")
    if backend.model.kernels.name != "compiled":
        pytest.skip("no compiled kernels on this machine: no decode step is exact")
    tokenizer, logits = load_tokenizer(DEMO), []
    monkeypatch.setattr("baton.engine.kernels.choose.load_profile", lambda path: Profile(static=Choice(1, tall=True)))
    other = load_model(DEMO, dtype="float32")
    assert isinstance(other.model.kernels, CpuKernels)
    assert other.model.kernels.profile.static == Choice(1, tall=True)
    for each in (backend, other):
        assert exact_rows(each, FixedShapes(exact_rows=64)) == 64
        engine = Engine(each, tokenizer, total_blocks=64, shapes=FixedShapes(exact_rows=64))
        asked = SequenceSpec((1, 2, 3), Sampling(max_tokens=20, ignore_eos=True, logprobs=3), deterministic=True)
        logits.append(bits_of(engine, asked, [replace(asked, deterministic=False)] * 3))
    assert logits[0] == logits[1]


@pytest.mark.parametrize("rows", [0, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_others_left_in_a_block_is_not_read(rows, dtype):
    """Fixed forwards look at whole chunks of positions; what is no number there must not spread."""
    backend, tokenizer = load_model(DEMO, dtype=dtype), load_tokenizer(DEMO)
    asked = SequenceSpec((1, 2, 3), Sampling(max_tokens=40, ignore_eos=True, temperature=0.0), deterministic=True)
    answers = []
    for value in (0.0, float("nan")):
        engine = Engine(backend, tokenizer, total_blocks=20, shapes=FixedShapes(exact_rows=rows))
        for tensor in engine.kv.tensors:
            tensor[:, :-1].fill_(value)
        answers.append(bits_of(engine, asked, []))
    assert len(answers[0]) == 40
    assert answers[0] == answers[1]
