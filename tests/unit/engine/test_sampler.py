import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core import Sampling
from baton.engine.sampling.filters import GROUPS, LANES, SLACK, Limits, descending, kept, kept_leaders, leaders, mass
from baton.engine.sampling.logits import NEVER, Adjustments, Row, log_softmax
from baton.engine.sampling.noise import _mix32, columns_hash, mix64, mix64_tensor, signed32, signed64
from baton.engine.sampling.sampler import Sampler, gumbel

VOCAB = 40
WIDE = 3 * GROUPS * LANES  # wide enough for a draw from a part of the columns
MASK32 = 0xFFFFFFFF


def logits_of(rng, rows, vocab=VOCAB, ties=False):
    levels = [-3.0, -1.0, 0.0, 0.5, 2.0]
    return torch.tensor([[rng.choice(levels) if ties else rng.gauss(0, 3) for _ in range(vocab)] for _ in range(rows)])


def make_row(sampling, prompt=(1, 2, 3), output=(), end_ids=(0,), vocab=VOCAB):
    row = Row(prompt, sampling, end_ids, vocab, None)
    for token in output:
        row.advance(token)
    return row


def sample(logits, rows):
    return Sampler().sample(logits, rows)


def draw(logits, rows):
    return torch.tensor([s.token_id for s in sample(logits, rows)])


def columns(n):
    return torch.arange(n, dtype=torch.int32)


def limits_of(options, vocab=VOCAB):
    return Limits.of(options, vocab, torch.device("cpu"))


samplings = st.builds(
    Sampling,
    max_tokens=st.just(100),
    min_tokens=st.sampled_from([0, 3, 50]),
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-9]),
    top_k=st.sampled_from([0, 1, 5, VOCAB, 10**6]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.7]),
    logit_bias=st.sampled_from([(), ((7, 5.0), (9, -100.0))]),
    logprobs=st.sampled_from([None, 0, 3]),
)


@settings(max_examples=60)
@given(st.lists(samplings, min_size=1, max_size=7), st.integers(0, 2**32), st.booleans())
def test_a_row_does_not_depend_on_the_others(mix, number, ties):
    rng = random.Random(number)
    logits = logits_of(rng, len(mix), ties=ties)
    before = logits.clone()
    rows = [make_row(s, output=[rng.randrange(VOCAB) for _ in range(rng.randrange(6))]) for s in mix]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    order = rng.sample(range(len(rows)), len(rows))
    shuffled = sample(logits[order], [rows[i] for i in order])
    assert together == alone
    assert shuffled == [together[i] for i in order]
    assert torch.equal(logits, before)


def naive_kept(scaled, sampling):
    """Return the columns that a draw may take, by a full sort: one row, best at 0. The others are NEVER."""
    scaled = scaled.masked_fill(scaled < torch.tensor(sampling.min_p).log(), NEVER)
    order = scaled.sort(descending=True, stable=True).indices
    if sampling.top_k:
        scaled = scaled.index_fill(0, order[sampling.top_k :], NEVER)
    if sampling.top_p < 1:
        shares = scaled[order].double().softmax(0)
        scaled = scaled.index_fill(0, order[shares.cumsum(0) - shares >= sampling.top_p], NEVER)
    return scaled


filters = st.builds(
    Sampling,
    top_p=st.sampled_from([1.0, 0.9713, 0.7913, 0.3119, 1e-6]),
    top_k=st.sampled_from([0, 1, 2, 7, VOCAB - 1, VOCAB, VOCAB + 1]),
    min_p=st.sampled_from([0.0, 0.013, 0.2, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
)


@settings(max_examples=150)
@given(st.lists(filters, min_size=1, max_size=5), st.integers(0, 2**32), st.booleans())
def test_filters_keep_exactly_the_naive_set(options, number, ties):
    rng = random.Random(number)
    logits = logits_of(rng, len(options), ties=ties)
    scaled = (logits - logits.max(-1, keepdim=True).values) / torch.tensor([[s.temperature] for s in options])
    for found, row, sampling in zip(kept(scaled, limits_of(options)), scaled, options, strict=True):
        assert torch.equal(found, naive_kept(row, sampling) > NEVER)


@settings(max_examples=60)
@given(st.lists(samplings, min_size=1, max_size=4), st.integers(0, 2**32))
def test_adjust_equals_the_naive_rules(mix, number):
    rng = random.Random(number)
    logits = logits_of(rng, len(mix))
    outputs = [[rng.randrange(6) for _ in range(rng.randrange(8))] for _ in mix]
    prompt, end_ids = [4, 4, 7], (0, 39, VOCAB + 5)
    rows = [make_row(s, prompt, output, end_ids) for s, output in zip(mix, outputs, strict=True)]
    found = Adjustments(rows).apply(logits)
    for i, (s, output) in enumerate(zip(mix, outputs, strict=True)):
        times, bias = Counter(output), dict(s.logit_bias)
        for column in range(VOCAB):
            x = float(logits[i, column])
            if column in prompt or column in output:
                x = x / s.repetition_penalty if x > 0 else x * s.repetition_penalty
            x -= s.frequency_penalty * times[column] + s.presence_penalty * (times[column] > 0)
            x += bias.get(column, 0.0)
            barred = column in end_ids and len(output) < s.min_tokens
            assert float(found[i, column]) == (NEVER if barred else pytest.approx(x, rel=1e-5, abs=1e-5))


def test_greedy_ties_go_to_the_lowest_id_and_a_tiny_temperature_is_greedy():
    logits = torch.tensor([[0.0, 5.0, 5.0, 5.0], [2.0, 2.0, 1.0, 2.0], [1.0, 3.0, 3.5, -80.0]])
    tiny = Sampling(temperature=math.ulp(0.0), top_p=0.9, top_k=3, min_p=0.1)
    rows = [make_row(sampling, vocab=4) for sampling in (*[Sampling(temperature=0.0)] * 2, tiny)]
    assert draw(logits, rows).tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("sampling", "vocab"),
    [
        (Sampling(temperature=0.0), VOCAB),
        (Sampling(top_k=1), VOCAB),
        (Sampling(temperature=0.1, top_p=0.9, logprobs=2), WIDE),
    ],
)
def test_logits_that_are_no_numbers_draw_nothing_and_hurt_nobody_else(sampling, vocab):
    """A row whose tokens are all barred by `min_tokens` draws nothing either."""
    logits = torch.zeros(4, vocab)
    logits[0, 7] = logits[2, 3] = 9.0
    logits[1, 20] = float("nan")
    barred = make_row(replace(sampling, min_tokens=1), end_ids=range(vocab), vocab=vocab)
    rows = [*[make_row(sampling, vocab=vocab)] * 3, barred]
    assert [s.token_id for s in sample(logits, rows)] == [7, None, 3, None]


def test_same_seed_and_position_give_the_same_token_elsewhere():
    logits = logits_of(random.Random(1), 1)
    whole = make_row(Sampling(seed=5), prompt=range(10), output=[4, 5])
    recovered = make_row(Sampling(seed=5), prompt=[*range(10), 4], output=[5])
    assert whole.noise_key == recovered.noise_key
    assert sample(logits, [whole]) == sample(logits, [recovered])
    keys = {make_row(Sampling(seed=s), prompt=[0] * n).noise_key for s in range(30) for n in range(30)}
    assert len(keys) == 900


def chi_square_limit(df, z=4.0):
    """Return the quantile of the chi-square distribution at `z` sigmas (Wilson-Hilferty)."""
    return df * (1 - 2 / (9 * df) + z * math.sqrt(2 / (9 * df))) ** 3


def chi_square(found, wanted):
    return sum((f - w) ** 2 / w for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("vary", "options", "kept"),
    [("position", {"temperature": 0.8}, 12), ("seed", {"temperature": 0.8}, 12), ("seed", {"top_k": 3}, 3)],
)
def test_frequencies_are_those_of_the_softmax_of_what_is_kept(vary, options, kept):
    n, columns = 20_000, 12
    logits = torch.linspace(1.5, -2, columns)
    rows = [make_row(Sampling(seed=i if vary == "seed" else 99, **options), vocab=columns) for i in range(n)]
    for i, row in enumerate(rows):
        row.position = i if vary == "position" else 17
    found = draw(logits.expand(n, -1).contiguous(), rows).bincount(minlength=columns).tolist()
    wanted = (logits[:kept] / options.get("temperature", 1.0)).softmax(0) * n
    assert sum(found[kept:]) == 0
    assert chi_square(found[:kept], wanted.tolist()) < chi_square_limit(kept - 1)


def test_neighbouring_positions_are_independent():
    n, columns = 20_000, 4
    logits = torch.zeros(n, columns)
    rows = [make_row(Sampling(seed=3), vocab=columns) for _ in range(n)]
    for i, row in enumerate(rows):
        row.position = i
    tokens = draw(logits, rows)
    pairs = (tokens[:-1] * columns + tokens[1:]).bincount(minlength=columns**2).tolist()
    assert chi_square(pairs, [(n - 1) / columns**2] * columns**2) < chi_square_limit(columns**2 - 1)


def test_noise_has_the_moments_of_gumbel_and_reaches_into_its_tail():
    noise = gumbel(torch.tensor([(i, -i) for i in range(20)], dtype=torch.int32), columns(50_000)).double()
    assert float(noise.mean()) == pytest.approx(0.57722, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert 11 < float(noise.max()) < 22.5
    assert bool(noise.isfinite().all())


@pytest.mark.parametrize("bits", [0, 0x7FFFFFFF])
def test_noise_is_finite_at_the_ends_of_the_hash(bits, monkeypatch):
    monkeypatch.setattr("baton.engine.sampling.sampler.columns_hash", lambda keys, columns: torch.tensor([[bits]]))
    assert bool(gumbel(torch.zeros(1, 2, dtype=torch.int32), columns(1)).isfinite().all())


def naive_mix32(x):
    x ^= x >> 16
    x = x * 0x85EBCA6B & MASK32
    x ^= x >> 13
    x = x * 0xC2B2AE35 & MASK32
    return x ^ (x >> 16)


@given(st.integers(0, MASK32), st.integers(0, MASK32))
def test_columns_hash_is_murmur_on_unsigned_numbers(first, second):
    found = columns_hash(torch.tensor([[signed32(first), signed32(second)]], dtype=torch.int32), columns(5))[0].tolist()
    wanted = [naive_mix32(naive_mix32(c * 0x9E3779B1 & MASK32 ^ first) ^ second) & 0x7FFFFFFF for c in range(5)]
    assert found == wanted
    on_a_gpu = _mix32(torch.tensor([signed32(first), signed32(second)], dtype=torch.int32))
    assert on_a_gpu.tolist() == [signed32(naive_mix32(first)), signed32(naive_mix32(second))]


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
def test_mix64_is_the_same_on_tensors(numbers):
    tensor = torch.tensor([signed64(x) for x in numbers])
    assert mix64_tensor(tensor).tolist() == [signed64(mix64(x)) for x in numbers]


def test_logprobs_are_the_models_own():
    logits = logits_of(random.Random(2), 3)
    base = Sampling(temperature=0.7, logit_bias=((6, 100.0),), presence_penalty=2.0, seed=1)
    none, chosen, best = sample(logits, [make_row(replace(base, logprobs=n)) for n in (None, 0, 4)])
    raw = logits.double().log_softmax(-1)
    assert none.logprobs is None
    assert chosen.token_id == best.token_id == 6
    assert chosen.logprobs is not None
    assert best.logprobs is not None
    assert (chosen.logprobs.logprob, chosen.logprobs.top) == (pytest.approx(float(raw[1, 6]), abs=1e-5), ())
    wanted = sorted(range(VOCAB), key=lambda i: -float(raw[2, i]))[:4]
    assert [token for token, _ in best.logprobs.top] == wanted
    assert [p for _, p in best.logprobs.top] == pytest.approx([float(raw[2, i]) for i in wanted], abs=1e-5)


@pytest.mark.parametrize("vocab", [7, 40, 30_000])
def test_alternatives_are_those_of_the_row_alone_and_the_lowest_of_equal_ones(vocab, seed):
    """Many values are equal in bfloat16, and torch takes arbitrary ones at the edge of the widest row."""
    rng = random.Random(seed)
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(seed)).bfloat16().float()
    logits[0] = logits[0].round()
    counts = [rng.choice([0, 1, 5, 10, 20]) for _ in logits]
    rows = [make_row(Sampling(temperature=0.0, logprobs=count), vocab=vocab) for count in counts]
    for one, row, found in zip(logits, rows, sample(logits, rows), strict=True):
        assert found.logprobs == sample(one[None], [row])[0].logprobs
        assert found.logprobs is not None
        exact = one.log_softmax(-1).tolist()
        best = sorted(range(vocab), key=lambda token: (-exact[token], token))
        assert [token for token, _ in found.logprobs.top] == best[: row.sampling.logprobs]


def slow_token(logits, row):
    scaled = naive_kept((logits - logits.max()) / torch.tensor(row.sampling.temperature), row.sampling)
    return int((scaled + gumbel(torch.tensor([row.noise_key], dtype=torch.int32), columns(len(logits)))[0]).argmax())


def wide_logits(rng, shape, vocab):
    """Return logits of a named kind. Kinds differ in the number of relevant columns."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    x = torch.randn(vocab, generator=generator)
    if shape == "ties":
        return (x * 4).round() / 2
    if shape == "sparse":
        return x.masked_fill(torch.rand(vocab, generator=generator) < 0.998, NEVER)
    return x * {"flat": 0.1, "usual": 4.0, "peaked": 12.0}[shape]


wide_options = st.tuples(
    st.sampled_from(["flat", "usual", "peaked", "ties", "sparse"]),
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.6, 1.0, 1.4]),
        top_p=st.sampled_from([1.0, 0.9, 0.99, 0.3, 1e-9]),
        top_k=st.sampled_from([0, 0, 1, 40, GROUPS, 2 * GROUPS, GROUPS * LANES + 5, 10**6]),
        min_p=st.sampled_from([0.0, 0.0, 0.1, 1e-4]),
        seed=st.integers(0, 2**64 - 1),
    ),
)


@settings(max_examples=60)
@given(st.lists(wide_options, min_size=1, max_size=4), st.sampled_from([WIDE, WIDE + 3]), st.integers(0, 2**32))
def test_a_draw_from_the_leaders_is_the_draw_from_all(mix, vocab, number):
    """If the leaders are sure, they keep the same columns as all logits."""
    rng = random.Random(number)
    logits = torch.stack([wide_logits(rng, shape, vocab) for shape, _ in mix])
    rows = [make_row(sampling, prompt=range(rng.randrange(1, 9)), vocab=vocab) for _, sampling in mix]
    wanted = [slow_token(line, row) for line, row in zip(logits, rows, strict=True)]
    assert [s.token_id for s in sample(logits, rows)] == wanted
    scaled = logits - logits.max(-1, keepdim=True).values
    limits = limits_of([row.sampling for row in rows], vocab)
    every, found = kept(scaled, limits), leaders(scaled)
    some, sure = kept_leaders(found, limits, mass(scaled))
    for i, row in enumerate(rows):
        all_kept = every[i].nonzero()[:, 0].tolist()
        assert set(all_kept) >= set((naive_kept(scaled[i], row.sampling) > NEVER).nonzero()[:, 0].tolist())
        assert not sure[i] or found.columns[i][some[i]].tolist() == all_kept


def test_leaders_are_sure_of_a_peak_and_not_of_a_plain():
    rng = random.Random(3)
    logits = torch.stack([wide_logits(rng, shape, WIDE) for shape in ("peaked", "flat")])
    scaled = logits - logits.max(-1, keepdim=True).values
    limits = limits_of([Sampling(top_p=0.9)] * 2, WIDE)
    assert kept_leaders(leaders(scaled), limits, mass(scaled))[1].tolist() == [True, False]


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 5.0, 30.0])
def test_mass_is_as_exact_as_the_slack_asks(scale):
    x = torch.randn(3, 150_000, generator=torch.Generator().manual_seed(1)) * scale
    x -= x.max(-1, keepdim=True).values
    wanted = x.double().exp().sum(-1, keepdim=True)
    assert float(((mass(x) - wanted) / wanted).abs().max()) < SLACK / 2


def test_descending_puts_what_is_no_number_first_and_the_rest_in_order():
    x = torch.tensor([[1.0, NEVER, 3.0, float("nan"), -0.5]])
    found = descending(x)[0].tolist()
    assert math.isnan(found[0])
    assert found[1:] == [3.0, 1.0, -0.5, NEVER]


@pytest.mark.parametrize("number", range(3))
def test_one_sampler_follows_its_rows_through_joins_leaves_and_new_tokens(number):
    rng = random.Random(number)
    some: dict[str, Any] = {"max_tokens": 99, "min_tokens": 4, "frequency_penalty": 0.4, "repetition_penalty": 1.1}
    options = Sampling(**some, logit_bias=((3, 2.0),))
    mix = [options, replace(options, temperature=0.0), replace(options, min_tokens=0, top_p=0.7, logprobs=2)]
    sampler, rows = Sampler(), list[Row]()
    for _ in range(40):
        if rows and rng.random() < 0.2:
            rows.pop(rng.randrange(len(rows)))
        if not rows or rng.random() < 0.3:
            rows.append(make_row(replace(rng.choice(mix), seed=rng.getrandbits(64))))
        logits = logits_of(rng, len(rows))
        found = sampler.sample(logits, rows)
        assert found == sample(logits, rows)
        for row, drawn in zip(rows, found, strict=True):
            assert drawn.token_id is not None
            row.advance(drawn.token_id)


@pytest.mark.parametrize(("vocab", "width"), [(60, 60), (61, 64), (63, 64)])
def test_rows_of_log_probabilities_begin_at_a_multiple_of_16_bytes_on_a_gpu(vocab, width):
    """torch's softmax on CUDA sums a row in an order that depends on its place; tests/unit/gpu compares the bits."""
    found = log_softmax(torch.empty(3, vocab, device="meta"))
    assert (found.shape, found.stride()) == ((3, vocab), (width, 1))
