"""Speculation: streams with proposals, right and wrong ones, equal those without, with all features and little room."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from structlog.testing import capture_logs

from baton.core import Constraint, FinishReason
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.kernels.cpu.kernel_choice import Profile
from baton.engine.kernels.cpu.ops import CpuKernels
from baton.engine.kv_cache import DTYPES
from baton.engine.oracle import OracleBackend, oracle_layout
from baton.engine.sampling.logits import Row
from baton.engine.speculation.checks import MOST_ROWS, EqualRows, equal_rows
from baton.engine.speculation.control import Acceptance, ProposalControl, StepSeconds
from baton.engine.speculation.draft import DraftModel
from baton.engine.speculation.forwards import MOST, Speculation, SpeculationOptions
from baton.engine.speculation.proposer import Source
from baton.engine.speculation.suffix_index import LONGEST, SLICE, NgramProposer, SuffixIndex
from baton.tokenizer import ORACLE_EOS
from baton.worker.engine_factory import generate
from benchmarks.lib.random_weights import random_model
from tests.support.compiled_kernels import compiled_or_skip
from tests.support.engines import (
    BLOCK,
    Faulty,
    Streams,
    arriving,
    block_names,
    engine_of,
    hand_over,
    key_of,
    move,
    numbers,
    oracle,
    spec_of,
)

EXACT = FixedShapes(rows=4, tokens=8, exact_rows=16)


class Everything(ProposalControl):
    """Propose as much as possible."""

    def counts(self, each, possible, rows):
        found = []
        for most in possible:
            found.append(min(most, rows))
            rows -= found[-1]
        return found


class Foreseen(Source):
    """The answer of a request, with wrong tokens at `wrong` places."""

    def __init__(self, tokens, answers, wrong):
        self.tokens, self.answers, self.wrong = tokens, answers, wrong

    def available(self, limit):
        return limit

    def continuation(self, count):
        end = len(self.tokens)
        whole: list[int] = next((a for a in self.answers if a[:end] == self.tokens), [])
        right = (whole[end:] + [7] * count)[:count]
        return [token ^ 1 if end + place in self.wrong else token for place, token in enumerate(right)]


class Oracular(NgramProposer):
    """A drafter with the right answers, except at some places."""

    def __init__(self, answers, wrong=()):
        self.answers, self.wrong = [list(answer) for answer in answers], set(wrong)

    def begin(self, tokens, row):
        return Foreseen(tokens, self.answers, self.wrong)


class Failing(Oracular):
    """A drafter that fails at its third call."""

    left = 3

    def propose(self, sources, counts):
        self.left -= 1
        if not self.left:
            raise MemoryError("no room for a draft")
        return super().propose(sources, counts)


def speculating(backend, proposer=None, *, rows=16, total_blocks=64, control=None, fixed=False, **options):
    exact = options.get("shapes") and options["shapes"].exact_rows
    chosen = SpeculationOptions(proposer or NgramProposer(), rows, fixed, exact or 0, control or Everything())
    return engine_of(backend, total_blocks, speculation=chosen, **options)


def foreseeing(backend, specs, wrong=(), **options):
    answers = [(*spec.prompt, *backend.expected(spec)) for spec in specs]
    return speculating(backend, Oracular(answers, wrong), **options)


def seen(generation):
    return [(t.token_id, t.text, t.logprobs) for t in generation.tokens], generation.text, generation.finish


def mixed_spec(rng, number, *, deterministic=False):
    length = rng.randint(1, 40)
    constraint = rng.choice([None, None, None, Constraint("regex", ("[a-d ]{3,30}",))])
    return spec_of(
        rng.choice([b"abcabcabcab", b"the cat and the dog and the cat", numbers(rng, rng.randint(1, 20))]),
        max_tokens=length,
        min_tokens=0 if constraint else rng.choice([0, 0, length // 2]),
        temperature=rng.choice([0.0, 0.0, 0.2, 1.0]),
        top_p=rng.choice([1.0, 0.8]),
        seed=number,
        stop=rng.choice([(), (), ("a",), ("e", "t ")]),
        stop_token_ids=rng.choice([(), (65, 66)]),
        ignore_eos=constraint is None and rng.random() < 0.7,
        logit_bias=rng.choice([(), ((97, 30.0), (98, 30.0)), ((ORACLE_EOS, 2.0),)]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        bad_words=rng.choice([(), (), ("ab",)]),
        logprobs=rng.choice([None, None, 2]),
        constraint=constraint,
        deterministic=deterministic,
    )


@pytest.mark.parametrize("number", range(6))
def test_streams_with_any_proposals_are_those_without(number):
    rng = random.Random(number)
    backend, exact = oracle(), rng.random() < 0.5
    specs = [mixed_spec(rng, i, deterministic=exact and rng.random() < 0.3) for i in range(9)]
    plain = engine_of(backend, shapes=EXACT)
    alone = [generate(plain, spec) for spec in specs]
    wrong = rng.sample(range(100), rng.choice([0, 10, 50]))
    answers = [(*spec.prompt, *(t.token_id for t in a.tokens)) for spec, a in zip(specs, alone, strict=True)]
    drafter = rng.choice([NgramProposer(), Oracular(answers, wrong)])
    engine = speculating(
        backend,
        drafter,
        rows=rng.choice([12, 16]),
        total_blocks=rng.choice([20, 30, 200]),
        prefix_cache=rng.random() < 0.5,
        max_running=rng.choice([2, 8]),
        fixed=rng.random() < 0.5,
        shapes=EXACT,
    )
    streams = arriving(engine, specs)
    for i, right in enumerate(alone):
        found = streams.tokens[key_of(i)]
        assert [(t.token_id, t.text, t.logprobs) for t in found] == seen(right)[0]
        assert streams.finishes[key_of(i)] == right.finish
    assert engine.pool.counts().owned == 0
    assert engine.counters.speculated_tokens > 0 or type(drafter) is NgramProposer  # random text may have no match
    assert engine.counters.decode_tokens <= sum(len(each) + 1 for each in streams.tokens.values()) + len(specs)


def test_right_proposals_make_steps_fewer_and_are_counted():
    backend, asked = oracle(), spec_of(max_tokens=33)
    engine = foreseeing(backend, [asked])
    streams = Streams()
    engine.submit(key_of(), asked)
    streams.drain(engine)
    assert streams.ids(key_of()) == backend.expected(asked)
    assert streams.steps == 1 + 32 // (1 + MOST)
    assert engine.counters.accepted_tokens == engine.counters.speculated_tokens == 30
    assert (engine.counters.decode_tokens, engine.counters.decode_steps) == (32, 2)


@pytest.mark.parametrize("at", range(1, 8))
def test_a_wrong_proposal_costs_what_is_behind_it_and_changes_nothing(at):
    backend, asked = oracle(), spec_of(max_tokens=10)
    engine = foreseeing(backend, [asked], wrong=[3 + at])
    engine.submit(key_of(), asked)
    streams, counters = Streams(), engine.counters
    streams.drain(engine)
    assert streams.ids(key_of()) == backend.expected(asked)
    assert counters.accepted_tokens < counters.speculated_tokens


def test_an_acceptance_that_ignores_the_draw_would_be_noticed(monkeypatch):
    """A control: the same test with a broken acceptance must fail."""

    def careless(self, item, request, draws, counters):
        draws.ready = [draws.ready[0]._replace(token_id=token) for token in request.speculating.proposal] + draws.ready
        return take(self, item, request, draws, counters)

    take = Speculation.take
    monkeypatch.setattr(Speculation, "take", careless)
    with pytest.raises(AssertionError, match="=="):
        test_a_wrong_proposal_costs_what_is_behind_it_and_changes_nothing(3)


def test_rejected_proposals_are_neither_cached_nor_handed_over():
    backend, asked = oracle(), spec_of("abcabcabc", max_tokens=30)
    engine = foreseeing(backend, [asked], wrong=range(12, 60, 3))
    engine.submit(key_of(), asked)
    streams, right = Streams(), [*asked.prompt, *backend.expected(asked)]
    names = block_names(backend, right)
    while engine.has_work():
        streams.step(engine)
        known = len(asked.prompt) + len(streams.tokens[key_of()])
        assert len(engine.pool.find(names)) == (known - 1) // BLOCK
        assert engine.pool._index.keys() <= set(names)
    again = spec_of(right[:-1], max_tokens=1)
    assert generate(engine, again).tokens[0].token_id == backend.expected(again)[0]
    assert engine.counters.cached_tokens == (len(right) - 2) // BLOCK * BLOCK


@pytest.mark.parametrize(("after", "ahead"), [(1, 0), (4, 0), (3, 7), (2, 1)])
def test_a_move_stops_exactly_where_it_shall(after, ahead):
    backend, asked = oracle(), spec_of(max_tokens=30, temperature=0.7, seed=3)
    sender = foreseeing(backend, [asked], wrong=[9, 15])
    receiver = foreseeing(backend, [asked], wrong=[20], recompute_preempted=False)
    assert move(sender, receiver, asked, after, ahead).ids(key_of()) == backend.expected(asked)
    assert receiver.counters.accepted_tokens > 0


def test_a_handed_over_sequence_is_speculated_on():
    backend, asked = oracle(), spec_of("abcabcabcabc", max_tokens=20, logit_bias=((97, 40.0),))
    receiver = speculating(backend)
    assert hand_over(engine_of(backend), receiver, asked).ids(key_of()) == backend.expected(asked) == [97] * 20
    assert receiver.counters.accepted_tokens > 5


def test_proposals_take_no_blocks_that_others_need():
    """The pool has just enough blocks for both sequences. All proposals are wrong, so steps are as many as without."""
    backend = oracle()
    free = [spec_of(max_tokens=60), spec_of("xyz", max_tokens=60)]
    texts = [generate(engine_of(backend), spec).text for spec in free]
    specs = [replace_stop(spec, text[at : at + 4]) for spec, text, at in zip(free, texts, (10, 14), strict=True)]
    steps = []
    for engine in (engine_of(backend, 10), foreseeing(backend, free, wrong=range(200), total_blocks=10)):
        streams = Streams()
        for number, spec in enumerate(specs):
            engine.submit(key_of(number), spec)
        streams.drain(engine)
        assert len(streams.finishes) == 2
        steps.append((streams.steps, engine.counters.preemptions))
    assert steps[0] == steps[1]
    assert engine.counters.speculated_tokens > 0


def replace_stop(spec, stop):
    return replace(spec, sampling=replace(spec.sampling, stop=(stop,)))


def test_an_end_within_accepted_tokens_drops_those_behind_it():
    backend = oracle()
    free = spec_of(max_tokens=14)
    text = generate(engine_of(backend), free).text
    asked = spec_of(max_tokens=14, stop=(text[5:7],))
    engine = speculating(backend, Oracular([(*free.prompt, *backend.expected(free))]))
    found, right = generate(engine, asked), generate(engine_of(backend), asked)
    assert seen(found) == seen(right)
    assert found.finish.reason is FinishReason.STOP_STRING
    assert len(found.tokens) < 14


def test_a_step_that_cannot_draw_first_delivers_what_it_drew():
    backend = Faulty("nan", poison=backend_token())
    asked = spec_of(max_tokens=12)
    engine = speculating(backend, Oracular([(*asked.prompt, *backend.expected(asked))]))
    engine.submit(key_of(), asked)
    outputs, failed = 0, []
    while engine.has_work():
        result = engine.step()
        outputs += sum(len(output.tokens) for output in result.outputs)
        failed += result.failed
    assert outputs == 6
    assert len(failed) == 1


def backend_token():
    return OracleBackend(oracle_layout(block_size=BLOCK), max_model_len=128).expected(spec_of(max_tokens=12))[5]


def test_steps_stay_within_the_rows_that_are_exact():
    class Watching(OracleBackend):
        widest = 0

        def forward(self, batch, kv):
            if len(batch.logit_rows) == len(batch.token_ids):
                Watching.widest = max(Watching.widest, len(batch.token_ids))
            return super().forward(batch, kv)

    backend = Watching(oracle_layout(block_size=BLOCK), max_model_len=128)
    specs = [spec_of(numbers(random.Random(i), 3), max_tokens=30) for i in range(5)]
    engine = foreseeing(backend, specs, rows=11, total_blocks=200)
    for number, spec in enumerate(specs):
        engine.submit(key_of(number), spec)
    streams = Streams().drain(engine)
    assert [streams.ids(key_of(number)) for number in range(5)] == [backend.expected(spec) for spec in specs]
    assert Watching.widest == 11


@pytest.mark.parametrize("shapes", [None, FixedShapes(rows=4, tokens=8, ragged=True), EXACT])
@pytest.mark.parametrize("fixed", [True, False])
def test_a_drafter_that_fails_is_not_asked_again_and_no_request_fails(shapes, fixed):
    backend = oracle()
    specs = [spec_of(numbers(random.Random(i), 5), max_tokens=40, deterministic=shapes is not None) for i in range(2)]
    drafter = Failing([[*spec.prompt, *backend.expected(spec)] for spec in specs])
    engine = speculating(backend, drafter, fixed=fixed, shapes=shapes, total_blocks=128)
    for number, spec in enumerate(specs):
        engine.submit(key_of(number), spec)
    with capture_logs() as logged:
        streams = Streams().drain(engine)
    assert [streams.ids(key_of(number)) for number in range(2)] == [backend.expected(spec) for spec in specs]
    assert (drafter.left, [entry["event"] for entry in logged]) == (0, ["drafter_failed"])


def test_proposals_as_candidates_make_verify_passes_follow_each_other():
    """A verify pass needs few ordinary steps before it if its candidates are proposals, right or wrong."""
    backend, shapes = oracle(), FixedShapes(rows=4, tokens=8, ragged=True)
    asked = spec_of(max_tokens=40, deterministic=True, temperature=0.9, seed=4)
    engine = foreseeing(backend, [asked], wrong=[20, 27], shapes=shapes)
    engine.submit(key_of(), asked)
    streams = Streams().drain(engine)
    assert streams.ids(key_of()) == backend.expected(asked)
    plain = engine_of(backend, shapes=shapes)
    plain.submit(key_of(), asked)
    assert streams.steps < Streams().drain(plain).steps * 2 / 3
    assert engine.counters.rollbacks == 0  # a wrong proposal costs nothing


def test_no_proposals_hasten_passes_of_requests_with_constraints():
    """Passes take no proposals behind constraints, so a sequence with some is not due sooner."""
    spec = spec_of(numbers(random.Random(3), 9), max_tokens=60, deterministic=True, ignore_eos=False)
    spec = replace(spec, constraint=Constraint("regex", ("(abc){12}",)))
    passes = []
    for proposer in (None, NgramProposer()):
        shapes = FixedShapes(rows=2, tokens=16, ragged=True)
        plain, proposing = partial(engine_of, oracle()), partial(speculating, oracle(), proposer)
        engine = (plain if proposer is None else proposing)(shapes=shapes, total_blocks=128)
        engine.submit(key_of(), spec)
        assert Streams().drain(engine).ids(key_of()) == oracle().expected(spec)
        passes.append(engine.counters.verify_passes)
    assert passes[0] == passes[1]


# --- a small model ---------------------------------------------------------------------------------------------------


def drafting(small, backend, blocks=128, **options):
    drafter = DraftModel(small)
    engine = speculating(backend, drafter, total_blocks=drafter.reserve(blocks, backend.layout), **options)
    return engine, drafter


@pytest.mark.parametrize("any_rules", [False, True])
def test_a_draft_with_the_same_distribution_proposes_the_draws(any_rules):
    """Rules that depend on tokens, such as penalties, are not those of the draft."""
    backend = oracle()
    specs = [spec_of(numbers(random.Random(i), 5), max_tokens=30, temperature=i / 2, seed=i) for i in range(3)]
    if any_rules:
        specs = [mixed_spec(random.Random(7 + i), i) for i in range(4)]
    engine, drafter = drafting(oracle(), backend)
    for number, spec in enumerate(specs):
        engine.submit(key_of(number), spec)
    streams = Streams().drain(engine)
    assert [streams.ids(key_of(n)) for n in range(len(specs))] == [backend.expected(spec) for spec in specs]
    counters = engine.counters
    assert (0 < counters.accepted_tokens < counters.speculated_tokens) is any_rules
    assert sorted(drafter._free) == list(range(64)), "ended sequences leave no blocks behind"


def test_a_draft_that_is_asked_again_without_new_tokens_computes_the_last_one_again():
    engine, drafter = drafting(oracle(), oracle())
    tokens, asked = [5, 6, 7], spec_of([5, 6, 7], max_tokens=9)
    source = drafter.begin(tokens, Row(tokens, asked.sampling, (), engine.backend.vocab_size, None))
    first = drafter.propose([source], [3])
    assert drafter.propose([source], [3]) == first == [oracle().expected(asked)[:3]]


def test_a_draft_of_another_distribution_changes_nothing_and_computes_rejected_positions_again():
    class Wrong(OracleBackend):
        def forward(self, batch, kv):
            logits = super().forward(batch, kv)
            at = batch.positions[batch.logit_rows] % 3 == 0
            logits[at] = logits[at].roll(5, dims=-1)
            return logits

    backend, asked = oracle(), spec_of(max_tokens=60, temperature=0.8, seed=2)
    engine, _ = drafting(Wrong(oracle_layout(block_size=BLOCK), max_model_len=128), backend)
    assert [t.token_id for t in generate(engine, asked).tokens] == backend.expected(asked)
    assert 30 < engine.counters.accepted_tokens < engine.counters.speculated_tokens


def test_a_draft_does_not_read_sequences_that_are_longer_than_its_context(monkeypatch):
    monkeypatch.setattr("baton.engine.speculation.draft.SLICE", 16)
    small = OracleBackend(oracle_layout(block_size=BLOCK), max_model_len=64)
    engine, drafter = drafting(small, oracle())
    row = Row([1], spec_of([1]).sampling, (), engine.backend.vocab_size, None)
    short, long = (drafter.begin([1] * length, row) for length in (60, 65))
    drafter.read([long])
    drafter.read([short])
    assert (long.computed, short.computed) == (0, 16)


def test_a_small_cache_of_the_draft_serves_sequences_in_turn_and_long_prompts_in_slices(monkeypatch):
    monkeypatch.setattr("baton.engine.speculation.draft.SLICE", 16)
    backend = oracle()
    engine, drafter = drafting(oracle(), backend, blocks=40)
    engine = speculating(backend, drafter, total_blocks=200)  # the draft has 20 blocks, and each sequence needs 14
    specs = [spec_of(numbers(random.Random(i), 40), max_tokens=30) for i in range(3)]
    for number, spec in enumerate(specs):
        engine.submit(key_of(number), spec)
        Streams().step(engine)
    streams = Streams()
    streams.drain(engine)
    found = [streams.ids(key_of(n)) for n in range(3)]
    assert [each[-9:] for each in found] == [backend.expected(spec)[-9:] for spec in specs]
    assert engine.counters.accepted_tokens > 0


# --- bits of real kernels --------------------------------------------------------------------------------------------


MODEL = {"architectures": ["LlamaForCausalLM"], "vocab_size": 257, "hidden_size": 64, "intermediate_size": 48}
MODEL |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
MODEL |= {"max_position_embeddings": 2048, "tie_word_embeddings": True}


def compiled_model(dtype, splits="auto"):
    kernels = compiled_or_skip(lambda: CpuKernels(DTYPES[dtype], Profile(), splits=splits))
    return random_model(MODEL, device=torch.device("cpu"), dtype=dtype, block_size=16, kernels=kernels)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_one_sequence_have_the_bits_of_single_steps(dtype):
    assert equal_rows(compiled_model(dtype), 2048) == EqualRows(MOST_ROWS, fixed=False)


def test_attention_that_splits_single_rows_needs_fixed_forwards():
    """A single row's long context is computed in parts by `attention_splits: load`, but not in fixed forwards."""
    assert equal_rows(compiled_model("float32", "load"), 2048) == EqualRows(MOST_ROWS, fixed=True)


def test_kernels_that_round_by_the_number_of_rows_are_found():
    class Rounding(OracleBackend):
        def forward(self, batch, kv):
            return super().forward(batch, kv) + (len(batch.token_ids) > 20) * 2**-20

    assert equal_rows(Rounding(oracle_layout()), 2048) is None
    assert equal_rows(Rounding(oracle_layout()), 20) == EqualRows(20, fixed=False)


def test_streams_of_a_transformer_are_equal_with_and_without():
    model = compiled_model("bfloat16")
    specs = [spec_of(b"the cat and the dog and the cat and", max_tokens=40, temperature=t, seed=3) for t in (0, 0.3, 1)]
    right = [generate(engine_of(model), spec) for spec in specs]
    answers = [(*spec.prompt, *(t.token_id for t in a.tokens)) for spec, a in zip(specs, right, strict=True)]
    engine = speculating(model, Oracular(answers, wrong=range(40, 90, 7)))
    for number, spec in enumerate(specs):
        engine.submit(key_of(number), spec)
    streams = Streams().drain(engine)
    assert [streams.ids(key_of(n)) for n in range(3)] == [[t.token_id for t in each.tokens] for each in right]
    assert engine.counters.accepted_tokens > 60


# --- the suffix index ------------------------------------------------------------------------------------------------


def proposed(tokens, count=4):
    index = SuffixIndex(tokens)
    for _ in range(1 + len(tokens) // SLICE):
        available = index.available(count)
    return index.continuation(available)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([], []),
        ([1, 2], []),
        ([1, 2, 3, 4, 5], []),
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2]),
        ([9, 1, 2, 3, 4, 8, 1, 2, 3, 5, 9, 1, 2, 3], [4, 8, 1, 2]),  # the longest match, not the last one
        ([5, 5, 5, 5], [5, 5, 5, 5]),
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2]),  # behind its end, the text repeats
    ],
)
def test_the_index_continues_the_longest_earlier_match(tokens, found):
    assert proposed(tokens) == found


def test_the_index_grows_with_its_tokens_and_a_long_prompt_is_indexed_in_slices():
    rng = random.Random(1)
    tokens = [rng.randrange(5) for _ in range(3 * SLICE)]
    index = SuffixIndex(tokens)
    assert [index.available(3) for _ in range(3)][:2] == [0, 0]
    for _ in range(200):
        tokens.append(rng.randrange(5))
        assert index.available(6) in {0, 6}
        if found := index.continuation(6):
            places = [at for at in range(3, len(tokens)) if tokens[at - 3 : at] == tokens[-3:]]
            assert any((tokens[at:] * 6)[:6] == found for at in places)


# --- control ---------------------------------------------------------------------------------------------------------


def control_of(step_s, row_s, share):
    control = ProposalControl()
    for rows in (1, 9, 1, 9, 17, 1) * 20:
        control.note_step(rows, step_s + row_s * rows)
    control.overall.right, control.overall.tried = 1000 * share, 1000.0
    return control


@pytest.mark.parametrize(
    ("row_s", "share", "batch", "found"),
    [
        (0.0, 0.5, 1, [MOST]),  # rows cost nothing
        (0.02, 0.95, 1, [MOST]),
        (0.02, 0.3, 1, [3]),
        (0.5, 0.3, 1, [0]),  # rows cost more than they bring
        (0.2, 0.6, 8, [0] * 8),
        (0.2, 0.95, 8, [1] * 8),
    ],
)
def test_proposals_are_made_while_they_pay(row_s, share, batch, found):
    control = control_of(1.0, row_s, share)
    assert control.counts([Acceptance() for _ in range(batch)], [MOST] * batch, 8 if batch > 1 else 15) == found


def test_acceptance_is_measured_for_each_sequence_and_forgotten():
    good, bad, control = Acceptance(), Acceptance(), control_of(1.0, 0.1, 0.6)
    for _ in range(20):
        good.note(4, 4)
        bad.note(4, 0)
    assert control.counts([good, bad], [4, 4], 8) == [4, 0]
    for _ in range(2000):  # proposals that are possible are tried again some time
        control.counts([bad], [4], 8)
    assert control.counts([bad], [4], 8) != [0]


def test_a_slow_drafter_is_tried_again_some_time():
    control, acceptance = ProposalControl(), Acceptance()
    for _ in range(50):
        control.note_step(1, 0.01)
    control.note_drafter(4, 0.004)
    control.note_drafter(1, 30.0)  # a delay of no meaning for the next proposal
    assert control.counts([acceptance], [4], 15) != [0]
    control.proposal_s = 1.0
    assert any(control.counts([acceptance], [4], 15) != [0] for _ in range(2000))


def test_the_slope_survives_many_equal_steps_and_follows_a_change():
    steps = StepSeconds()
    for rows in (1, 9) * 50:
        steps.note(rows, 1.0 + 0.1 * rows)
    for _ in range(1000):
        steps.note(1, 1.1)
    assert steps.row_s == pytest.approx(0.1, rel=0.1)
    for rows in (1, 9) * 50:
        steps.note(rows, 1.0 + 0.3 * rows)
    assert steps.row_s == pytest.approx(0.3, rel=0.1)


def test_longest_matches_end_the_search():
    tokens = [1, 2, 3, 4] * 40
    index = SuffixIndex(tokens)
    assert index.available(5) == 5
    assert index.continuation(5) == [1, 2, 3, 4, 1]
    assert len(tokens) > LONGEST
