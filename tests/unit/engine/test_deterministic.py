"""Deterministic requests in the engine: candidates, verify passes, rollbacks, and exact steps without verification.

The oracle is the reference. The last three tests compare bits of the demo model instead.
"""

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.determinism.checks import exact_rows
from baton.engine.determinism.planner import PATIENCE, VerifiedProgress, WindowPlanner, split_exact
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.engine import Engine
from baton.engine.kernels.cpu.kernel_choice import Choice, Profile
from baton.engine.kernels.cpu.ops import CpuKernels
from baton.engine.models.loading import load_model
from baton.engine.oracle import OracleBackend
from baton.engine.sequence import ScheduledSequence, Sequence
from baton.errors import InvalidRequest
from baton.tokenizer import load_tokenizer
from tests.support import engines
from tests.support.engines import Streams, hand_over, key_of, move, reserved, run
from tests.unit.engine.test_determinism import DEMO

SHAPES = FixedShapes(rows=4, tokens=8)


class Tampered(OracleBackend):
    """The oracle, but its ordinary batch draws wrong tokens at `wrong` positions. Records each fixed forward."""

    def __init__(self, wrong=()):
        super().__init__()
        self.wrong = set(wrong)
        self.shapes = []
        self.struck: Counter[int] = Counter()
        self.decoded: Counter[int] = Counter()  # ordinary forwards by their rows

    def forward(self, batch, kv):
        logits = super().forward(batch, kv)
        if batch.fixed:
            self.shapes.append((tuple(batch.query_lens), len(batch.logit_rows)))
            return logits
        self.decoded[len(batch.query_lens)] += 1
        for row, position in enumerate(batch.positions[batch.logit_rows].tolist()):
            if position + 1 in self.wrong:
                self.struck[position + 1] += 1
                logits[row] = logits[row].roll(7)
        return logits


def engine_of(backend, *, total_blocks=256, shapes=SHAPES, **options):
    return engines.engine_of(backend, total_blocks, **{"max_batched_tokens": 512, "shapes": shapes} | options)


def spec_of(prompt="abc", **options):
    return engines.spec_of(prompt, **{"deterministic": True, "max_tokens": 30, "seed": 5} | options)


def answers(engine, specs):
    found = run(engine, specs)
    assert len(found.finishes) == len(specs)
    assert engine.pool.counts().owned == 0
    return [found.ids(key_of(number)) for number in range(len(specs))]


def nothing_verified(engine):
    counters = engine.counters
    return (counters.verify_passes, counters.rollbacks, counters.recomputed_tokens) == (0, 0, 0)


VARIETIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "filters": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "eos": {"ignore_eos": False, "temperature": 1.0, "max_tokens": 200},
    "min_tokens": {"ignore_eos": False, "temperature": 1.0, "min_tokens": 20, "max_tokens": 40},
    "bias": {"logit_bias": ((65, 3.0), (66, 3.5)), "temperature": 0.7},
}


@pytest.mark.parametrize("at", range(8))
def test_a_mismatch_at_each_index_of_the_window_is_one_rollback(at):
    asked = spec_of(max_tokens=40)
    wrong = len(asked.prompt) + 1 + 8 + at  # in the second window
    backend = Tampered([wrong])
    engine = engine_of(backend)
    assert answers(engine, [asked]) == [backend.expected(asked)]
    struck = backend.struck[wrong] > 0  # the verifier itself draws the last token of a window
    assert engine.counters.rollbacks == backend.struck[wrong]
    assert struck == (at != 7)


@pytest.mark.parametrize(
    ("deterministic", "wrong", "lengths"),
    [
        (False, (), "10 15-18"),  # a prompt in two chunks, and three steps
        (True, (), "15-23"),  # the prompt is one grid chunk; candidates first, and then the verify pass
        (True, (18,), "15-22 18-23"),  # the verify pass removes the KV behind the wrong token
    ],
)
def test_kv_lengths_after_each_step(deterministic, wrong, lengths):
    engine, found = engine_of(Tampered(wrong), max_batched_tokens=512 if deterministic else 10), dict[Any, Any]()
    asked = spec_of("x" * 15, max_tokens=9 if deterministic else 4, kv_lengths=True, deterministic=deterministic)
    engine.submit(key_of(), asked)
    engine.submit(key_of("other"), replace(asked, kv_lengths=False))
    while engine.has_work():
        found.update(engine.step().kv_lengths)
    assert {key: str(kv) for key, kv in found.items()} == {key_of(): lengths}


def test_what_is_right_costs_no_rollback_and_one_pass_for_each_w_tokens():
    engine = engine_of(Tampered())
    answers(engine, [spec_of(max_tokens=1 + 8 * 5)])
    assert (engine.counters.rollbacks, engine.counters.recomputed_tokens) == (0, 0)
    assert engine.counters.verify_passes == 5


def test_verify_passes_have_one_shape_and_grid_chunks_depend_on_positions_alone():
    backend = Tampered(range(0, 700, 5))
    specs = [spec_of("x" * n, max_tokens=20 + n % 7) for n in (1, 63, 64, 65, 300, 600)]
    answers(engine_of(backend, total_blocks=512), specs)
    verify = {shape for shape in backend.shapes if len(shape[0]) > 1}
    assert verify == {((8, 8, 8, 8), 32)}
    assert {shape[0] for shape in backend.shapes if len(shape[0]) == 1} == {(128,), (256,)}


RAGGED = FixedShapes(rows=2, tokens=16, ragged=True)


def constant(request, most):
    return [97] * most


def oracle_proposer(backend, request, most):
    """Propose the right tokens of a greedy request, with a wrong one among them."""
    right = backend.expected(spec_of(tuple(request.tokens), max_tokens=most, temperature=0.0))
    return [*right[:5], 97, *right[6:]]


def test_windows_of_any_lengths_fill_passes_of_one_total_before_any_is_due():
    backend, specs = Tampered(), [spec_of("abc", max_tokens=1 + 40) for _ in range(8)]
    engine = engine_of(backend, shapes=RAGGED)
    assert answers(engine, specs) == [backend.expected(specs[0])] * 8
    passes = [shape for shape in backend.shapes if shape[1] == 32]
    assert all(sum(lengths) == 32 for lengths, _ in passes)
    assert ((4,) * 8, 32) in passes
    assert engine.counters.decode_tokens <= 8 * 40 * 4 // 5  # each window yields a token that no decode step drew


def test_a_pass_runs_before_the_next_candidates_exceed_it():
    """Else a sequence waits for the next pass, and its next decode step has few others."""
    planner = WindowPlanner()
    assert planner.next([waiting(15) for _ in range(4)], lambda _: True) == []  # 28 of 32 tokens, and four more
    assert len(planner.next([waiting(known) for known in (16, 15, 15, 15)], lambda _: True)) == 4


@pytest.mark.parametrize("prompt", ["a", "ab", "abc", "abcd"])
def test_all_join_each_pass_at_the_ends_of_blocks_too(prompt: str):
    """A pass writes the last token's position, which may be the first one of a block."""
    backend, specs = Tampered(), [spec_of(prompt, max_tokens=1 + 40) for _ in range(8)]
    answers(engine_of(backend, shapes=RAGGED, max_batched_tokens=1024), specs)
    assert backend.decoded == {8: 30}  # a pass yields a fourth token, which no decode step draws


def test_due_sequences_that_fill_a_pass_do_not_wait():
    ordinary = Sequence(key_of("other"), 0, 101, 100, computed=100)
    assert len(WindowPlanner().next([waiting(24), waiting(24), ordinary], lambda _: True)) == 2  # 16 of 32 tokens each


def test_expected_proposals_do_not_let_a_pass_run_early():
    """A candidate that was proposed has counted before."""
    sequences = [waiting(15) for _ in range(3)] + [waiting(16)]
    for sequence in sequences[:3]:
        sequence.policies[0].proposed = 1
        sequence.known -= 1
    assert WindowPlanner().next(sequences, lambda _: True) == []  # 29 of 32 tokens, and one more


def chunks_of_steps(specs, steps, **options):
    """Return how many forwards on the grid each step has, the requests that got tokens, and the engine."""
    backend, found, keys = Tampered(), [], set()
    engine = engine_of(backend, total_blocks=1024, **options)
    for number, spec in enumerate(specs):
        engine.submit(key_of(number), spec)
    for _ in range(steps):
        before = len(backend.shapes)
        keys |= {output.key for output in engine.step().outputs}
        found.append(len(backend.shapes) - before)
    return found, keys, engine


@pytest.mark.parametrize(
    ("length", "budget", "counts"),
    [(128, 1024, [8, 1]), (128, 300, [2, 2, 2, 2, 1]), (128, 100, [1] * 9), (256, 1152, [9, 8, 1])],
)
def test_chunks_of_the_grid_fill_steps(length: int, budget: int, counts: list[int]):
    """A step leaves a token for each request that was running before it."""
    specs = [spec_of("x" * length, max_tokens=1, ignore_eos=True) for _ in range(9)]
    assert chunks_of_steps(specs, len(counts), max_batched_tokens=budget)[0] == counts


def test_an_ordinary_prompt_goes_on_next_to_chunks_of_the_grid():
    specs = [*(spec_of("x" * 1500) for _ in range(4)), spec_of("y" * 1100, deterministic=False)]
    counts, keys, _ = chunks_of_steps(specs, 4, max_batched_tokens=600)
    assert (counts, keys) == ([4, 2, 1, 1], {key_of(4)})  # chunks of 128, then of 256, in half of a step


def test_a_prompt_on_the_grid_keeps_its_turn_before_a_long_ordinary_one():
    specs = [spec_of("abc"), spec_of("y" * 1500, deterministic=False)]
    assert chunks_of_steps(specs, 1, max_batched_tokens=1024)[1] == {key_of(0)}


def test_a_prompt_on_the_grid_goes_on_next_to_an_ordinary_one_with_the_least_budget():
    specs = [spec_of("x" * 200), spec_of("y" * 50, deterministic=False)]
    assert key_of(0) in chunks_of_steps(specs, 10, max_batched_tokens=1)[1]


def test_new_prompts_do_not_displace_a_verify_pass():
    engine = engine_of(Tampered())
    engine.submit(key_of("first"), spec_of(max_tokens=1 + 16))
    ended = set()
    for number in range(40):
        engine.submit(key_of(number), spec_of(max_tokens=1))
        ended |= {output.key for output in engine.step().outputs if output.finish}
    assert key_of("first") in ended


def test_a_new_prompt_is_admitted_next_to_chunks_of_the_grid():
    *_, engine = chunks_of_steps([spec_of("x" * 1500) for _ in range(4)], 2, max_batched_tokens=1024)
    engine.submit(key_of("new"), spec_of("y" * 500, deterministic=False))
    assert key_of("new") in {output.key for output in engine.step().outputs}


def test_proposals_fill_passes_and_replace_decode_steps_but_change_no_token():
    backend, asked, steps = Tampered(), spec_of("abc", max_tokens=60, temperature=0.0), []
    for propose in (None, constant, partial(oracle_proposer, backend)):
        engine = engine_of(backend, shapes=RAGGED)
        engine._fixed.propose = propose
        assert answers(engine, [asked]) == [backend.expected(asked)]
        assert (engine.counters.rollbacks, engine.counters.recomputed_tokens) == (0, 0)
        steps.append(engine.counters.decode_tokens)
    assert steps[2] < steps[0] // 2
    assert engine.counters.verify_passes <= 60 // 6 + 2  # each takes five right proposals and a token more


def waiting(known, *, margin=math.inf, shapes=RAGGED, waited=0):
    progress = VerifiedProgress(shapes, 8, 9, 8, waited=waited, margin=margin)
    return Sequence(key_of(known), 0, known, 8, policies=(progress,))


def test_the_least_certain_candidates_are_verified_first_but_due_ones_before_them():
    certain, doubtful, due = waiting(20), waiting(18, margin=0.25), waiting(24, waited=PATIENCE)
    assert [w.sequence for w in WindowPlanner().next([certain, doubtful, due], lambda _: True)] == [due, doubtful]
    assert [w.sequence for w in WindowPlanner().next([certain, doubtful], lambda _: True)] == []  # not full, none due


def test_a_due_sequence_waits_no_longer_than_patience_whatever_comes():
    due, planner = waiting(24), WindowPlanner()
    for _ in range(PATIENCE):
        assert planner.next([due, waiting(10, margin=0.0)], lambda _: True) == []
    assert planner.next([waiting(20, margin=0.0), due], lambda _: True)[0].sequence is due


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_mix_with_little_room_and_any_mistakes(data):
    draw = data.draw
    backend = Tampered(draw(st.sets(st.integers(0, 200), max_size=60)))
    shapes = FixedShapes(*draw(st.sampled_from([(1, 32), (2, 16), (4, 8), (8, 4), (16, 2)])))
    shapes = replace(shapes, exact_rows=draw(st.sampled_from([0, 0, 1, 3, 64])), everywhere=draw(st.booleans()))
    shapes = replace(shapes, ragged=draw(st.booleans()))
    engine = engine_of(
        backend,
        shapes=shapes,
        total_blocks=draw(st.integers(12, 40)),
        max_running=draw(st.integers(1, 8)),
        max_batched_tokens=draw(st.sampled_from([16, 64, 512])),
        prefix_cache=draw(st.booleans()),
    )
    varieties = st.sampled_from([*VARIETIES.values()])
    specs = [
        spec_of(
            "the same beginning of all of them, " * draw(st.integers(0, 2)) + "end" * draw(st.integers(1, 10)),
            deterministic=draw(st.booleans()),
            **draw(varieties) | {"max_tokens": draw(st.integers(20, 60))},
        )
        for _ in range(draw(st.integers(1, 8)))
    ]
    engine._fixed.propose = draw(st.sampled_from([None, constant, partial(oracle_proposer, backend)]))
    for got, each in zip(answers(engine, specs), specs, strict=True):
        if each.deterministic or not backend.wrong:
            assert got == backend.expected(each)


def test_an_end_that_a_candidate_invented_is_taken_back():
    """Wrong candidates may end a request by a stop token that the right ones never draw."""
    backend, asked = Tampered(range(10, 60, 4)), spec_of("revive me", max_tokens=45, temperature=1.0)
    wanted = backend.expected(asked)
    stops = tuple(sorted(set(range(97, 123)) - set(wanted)))[:16]
    ending = replace(asked, sampling=replace(asked.sampling, stop_token_ids=stops))
    assert answers(engine_of(backend), [ending]) == [wanted]


def test_a_stop_string_ends_it_where_verified_tokens_have_it():
    backend = Tampered(range(5, 60, 9))
    options = {"max_tokens": 40, "temperature": 1.0}
    text = bytes(backend.expected(spec_of("stop here", **options))[17:20]).decode("latin-1")
    asked = spec_of("stop here", stop=(text,), **options)
    found = run(engine_of(backend), [asked])
    assert found.ids(key_of(0)) == backend.expected(asked)
    assert found.finishes[key_of(0)].reason.value == "stop_string"


@pytest.mark.parametrize("known", [1, 2, 7, 8, 9, 20])
def test_delivered_tokens_are_replayed_and_never_drawn_again(known):
    backend = Tampered(range(0, 200, 6))
    asked = spec_of("some prompt that was computed elsewhere", max_tokens=40, temperature=0.8)
    wanted = backend.expected(asked)
    assert answers(engine_of(backend), [replace(asked, known=tuple(wanted[:known]))]) == [wanted[known:]]


def test_handed_over_after_the_first_token():
    backend = Tampered(range(0, 200, 6))
    asked = spec_of("p" * 100, max_tokens=40, temperature=0.8)
    prefill, decode = engine_of(backend), engine_of(backend)
    found = hand_over(prefill, decode, asked, reserved(decode, len(asked) + 1))
    assert found.ids(key_of()) == backend.expected(asked)
    assert decode.pool.counts().owned == 0
    assert prefill.counters.decode_steps == decode.counters.prefill_tokens == 0


@pytest.mark.parametrize("after", [1, 2, 7, 8, 20])
def test_moved_in_the_middle(after):
    """Candidates that no pass has verified are not moved, whatever they are."""
    backend = Tampered(range(0, 200, 6))
    asked = spec_of("p" * 70, max_tokens=40, temperature=0.8)
    assert move(engine_of(backend), engine_of(backend), asked, after).ids(key_of()) == backend.expected(asked)


@pytest.mark.parametrize("known", [1, 2, 8, 9, 30])
def test_computed_again_for_another_worker_it_says_one_token_and_decodes_none(known):
    backend = Tampered(range(0, 200, 6))
    asked = spec_of("p" * 70, max_tokens=60, temperature=0.8)
    wanted = backend.expected(asked)
    engine, keys = engine_of(backend), [key_of(number) for number in range(3)]
    for key in keys:
        engine.submit(key, replace(asked, known=tuple(wanted[:known])), hold=True)
    found = Streams().drain(engine)
    assert [found.ids(key) for key in keys] == [wanted[known : known + 1]] * 3
    assert engine.counters.decode_steps == 0
    for key in keys:
        assert len(engine.held(key).blocks) >= engine.layout.blocks_for(len(asked) + known)
        engine.release(key)


def test_cached_blocks_are_used_up_to_the_grid_and_kept_apart():
    engine = engine_of(Tampered())
    for deterministic, cached in (
        (False, 0),
        (True, 0),  # blocks of the ordinary batch are not used
        (True, 128),  # the last chunk of the grid is computed again
        (False, 128 + 192),  # ordinary requests find their blocks
    ):
        answers(engine, [spec_of("q" * 200, deterministic=deterministic)])
        assert engine.counters.cached_tokens == cached


@pytest.mark.parametrize("everywhere", [False, True])
def test_where_every_forward_is_exact_prompts_have_none_of_their_own(everywhere):
    backend, specs = Tampered(range(400)), [spec_of("x" * 70, max_tokens=20), spec_of("y" * 40, max_tokens=20)]
    engine = engine_of(backend, total_blocks=64, shapes=replace(SHAPES, exact_rows=64, everywhere=everywhere))
    assert answers(engine, specs) == [backend.expected(each) for each in specs]
    assert nothing_verified(engine)
    assert (((70, 40), 2) in backend.shapes) == everywhere


def test_others_go_on_between_verify_passes():
    engine = engine_of(Tampered(range(400)))
    keys = [key_of(number) for number in range(6)]
    for number, key in enumerate(keys):
        engine.submit(key, spec_of("x" * 20, deterministic=number > 0, max_tokens=60))
    said = []
    while engine.has_work():
        said.append(any(output.key == keys[0] for output in engine.step().outputs))
    assert all(said[: said.index(True) + 60]), "the ordinary one has a token in each step"


@pytest.mark.parametrize("length", range(1, 20))
def test_one_that_is_alone_never_waits(length):
    """A block may fill just when a pass is due. A sequence that computes nothing must not wait."""
    engine = engine_of(Tampered(range(0, 200, 9)))
    engine.submit(key_of(), spec_of("x" * length, max_tokens=60))
    while engine.has_work():
        assert engine.step().computed > 0


def test_a_worker_without_shapes_refuses():
    with pytest.raises(InvalidRequest, match="deterministic"):
        engine_of(OracleBackend(), shapes=None).submit(key_of(), spec_of())


@pytest.mark.parametrize(("rows", "tokens"), [(0, 32), (2, 1), (3, 7), (1, 16)])
def test_shapes_that_cannot_be(rows, tokens):
    with pytest.raises(ValueError, match="multiple of 32"):
        FixedShapes(rows, tokens)


ALL_WRONG = range(400)  # tokens of a forward that is not fixed


def exact(backend, rows=64, **options):
    return engine_of(backend, shapes=replace(SHAPES, exact_rows=rows), **options)


def decode_steps(backend):
    return [lens for lens, _ in backend.shapes if max(lens) == 1]


@pytest.mark.slow
@pytest.mark.parametrize("variety", VARIETIES)
def test_wrong_candidates_change_no_token_and_exact_steps_verify_nothing(variety):
    asked = [spec_of(prompt, **VARIETIES[variety]) for prompt in ("a prompt of some length", "b")]
    verifying, stepping = engine_of(Tampered(ALL_WRONG)), exact(Tampered(ALL_WRONG))
    assert answers(verifying, asked) == answers(stepping, asked) == [OracleBackend().expected(each) for each in asked]
    assert verifying.counters.rollbacks > 0
    assert nothing_verified(stepping)


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


def forwards(work, rows):
    return [(part.work, part.exact) for part in split_exact(work, rows)]


def test_which_forwards_a_batch_needs():
    sure, plain, chunk = item(1, verified=20), item(2), item(3, count=7)
    doubtful = item(4, verified=18)  # has candidates
    assert forwards([plain, chunk], 4) == [([plain, chunk], False)]
    assert forwards([sure, plain], 0) == [([sure, plain], False)]
    assert forwards([plain, doubtful], 4) == [([plain, doubtful], False)]
    assert forwards([plain, sure], 4) == [([plain, sure], True)]
    assert forwards([chunk, sure, plain], 4) == [([sure, plain], True), ([chunk], False)]
    assert forwards([plain, sure, doubtful], 1) == [([sure], True), ([plain, doubtful], False)]
    several = [item(number, verified=20) for number in range(5)]
    wanted = [(several[:3], True), ([*several[3:], plain], True), ([chunk], False)]
    assert forwards([*several, plain, chunk], 3) == wanted


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
    found, made = [], []
    for rows, others in ((0, 0), (0, 6), (64, 0), (64, 6), (3, 6)):
        made.append(demo_engine(backend, rows, total_blocks=512, prefix_cache=False))
        found.append(bits_of(made[-1], asked, [other] * others))
    assert all(answer == found[0] for answer in found)
    assert [engine.counters.verify_passes > 0 for engine in made] == [True, True, False, False, False]


def test_a_profile_that_prefers_other_products_costs_no_exact_step(monkeypatch):
    """Fixed forwards use the same product up to 96 rows; the ordinary batch uses the fastest."""
    backends = [compiled_demo("float32")]
    monkeypatch.setattr("baton.engine.kernels.select.load_profile", lambda path: Profile(static=Choice(1, tall=True)))
    backends.append(load_model(DEMO, dtype="float32"))
    kernels = backends[1].model.kernels
    assert isinstance(kernels, CpuKernels)
    assert kernels.profile.static == Choice(1, tall=True)
    asked, found = spec_of((1, 2, 3), max_tokens=20, temperature=1.0, logprobs=3), []
    for each in backends:
        assert exact_rows(each, FixedShapes(exact_rows=64)) == 64
        found.append(bits_of(demo_engine(each, 64), asked, [replace(asked, deterministic=False)] * 3))
    assert found[0] == found[1]


@pytest.mark.parametrize("rows", [0, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_others_left_in_a_block_is_not_read(rows, dtype):
    """Fixed forwards read whole chunks of positions, where a NaN must not spread."""
    backend, found = load_model(DEMO, dtype=dtype), []
    for value in (0.0, float("nan")):
        engine = demo_engine(backend, rows, total_blocks=20)
        for tensor in engine.kv.tensors:
            tensor[:, :-1].fill_(value)
        found.append(bits_of(engine, spec_of((1, 2, 3), max_tokens=40), []))
    assert len(found[0]) == 40
    assert found[0] == found[1]
