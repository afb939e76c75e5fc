"""Sampling on the kernels of a GPU against the sampler of the CPU, which `test_sampler.py` tests."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from baton.core import Sampling
from baton.engine.kernels.gpu import triton_sampling
from baton.engine.sampling.logits import NEVER, Row, log_softmax
from baton.engine.sampling.noise import columns_hash
from baton.engine.sampling.sampler import Sampler
from baton.engine.sampling.sampler import gumbel as exact_gumbel

pytestmark = pytest.mark.sample(3)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.9173},
    "min-p": {"min_p": 0.0513},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.8371, "min_p": 0.0113},
}
WIDTHS = (7, 2048, 4099)  # below one segment, one, and two with a rest


def row_of(seed=0, prompt=3, vocab=4099, **options):
    return Row(range(prompt), Sampling(seed=seed, **options), (), vocab, None)


def fused(logits, rows, device):
    return [each.token_id for each in Sampler(triton_sampling.draw).sample(logits.to(device), rows)]


def exact(logits, rows):
    return [each.token_id for each in Sampler().sample(logits, rows)]


@triton.jit
def noise_kernel(keys: tl.tensor, bits: tl.tensor, noise: tl.tensor, n: int, BLOCK: tl.constexpr) -> None:
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    found = triton_sampling.hashed(columns, tl.load(keys + row * 2), tl.load(keys + row * 2 + 1))
    tl.store(bits + row * n + columns, found, mask=columns < n)
    tl.store(noise + row * n + columns, triton_sampling.gumbel(found), mask=columns < n)


def test_the_noise_has_the_bits_of_the_cpus_and_is_as_exact(device, seed):
    rng, n = random.Random(seed), 4096
    pairs = [(0, 0), (-1, 2**31 - 1), *[(rng.randrange(-(2**31), 2**31), rng.randrange(2**31)) for _ in range(6)]]
    keys = torch.tensor(pairs, dtype=torch.int32)
    bits = torch.empty(len(keys), n, dtype=torch.int32, device=device)
    noise = torch.empty(len(keys), n, device=device)
    noise_kernel[(len(keys),)](keys.to(device), bits, noise, n, BLOCK=n)
    columns = torch.arange(n, dtype=torch.int32)
    assert torch.equal(bits.cpu(), columns_hash(keys, columns))
    torch.testing.assert_close(noise.cpu(), exact_gumbel(keys, columns), rtol=0, atol=3e-6)


@pytest.mark.parametrize("vocab", WIDTHS)
@pytest.mark.parametrize("shape", ["smooth", "ties", "sparse"])
def test_all_kinds_of_rows_draw_the_cpus_tokens(vocab, shape, device, seed):
    """The chance that rounding changes a token is below 1e-5 in each row: these logits and seeds have none."""
    generator = torch.Generator().manual_seed(7)
    rows = [row_of(seed=i, prompt=i + 1, vocab=vocab, **options) for i, options in enumerate(KINDS.values())]
    logits = torch.randn(len(rows), vocab, generator=generator) * 3
    if shape == "ties":
        logits = logits.round()
    if shape == "sparse":
        logits[torch.rand(logits.shape, generator=generator) < 0.6] = NEVER
    assert fused(logits, rows, device) == exact(logits, rows)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 3}, [1, 2, 4]),
        ({"top_k": 2}, [1, 2]),
        ({"top_p": 0.49}, [1, 2, 4]),  # of six columns with one sixth each
        ({"top_p": 0.51}, [1, 2, 4, 5]),
        ({"top_k": 4, "top_p": 0.6}, [1, 2, 4]),
        ({"min_p": 0.9}, [1, 2, 4, 5, 7, 8]),
        ({"top_p": 1e-9}, [1]),
        ({"min_p": 1.0, "top_k": 1}, [1]),
    ],
)
def test_the_lowest_ids_pass_among_ties_at_the_edge(options, kept, device):
    logits = torch.full((12, 10), -30.0)
    logits[:, [1, 2, 4, 5, 7, 8]] = 2.0
    rows = [row_of(seed=i, vocab=10, **options) for i in range(len(logits))]
    found = fused(logits, rows, device)
    assert set(found) <= set(kept)
    assert found == exact(logits, rows)


def test_greedy_ties_go_to_the_lowest_id_and_a_tiny_temperature_is_greedy(device):
    logits = torch.zeros(3, 5000)
    logits[0, [4999, 2047, 2048]] = logits[1, [4100, 4099]] = 5.0
    logits[2, 4711] = 0.1
    tiny = row_of(temperature=math.ulp(0.0), top_p=0.9, top_k=3, vocab=5000)
    rows = [*[row_of(temperature=0.0, vocab=5000)] * 2, tiny]
    assert fused(logits, rows, device) == [2047, 4099, 4711]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_that_are_no_numbers_draw_nothing_and_change_no_other_row(kind, device):
    logits = torch.zeros(6, 2500)
    logits[0, 7] = logits[2, 2100] = 99.0
    logits[1, 2400], logits[3, 5] = float("nan"), float("inf")
    logits[4] = NEVER
    logits[5, :2499] = NEVER
    rows = [row_of(vocab=2500, **KINDS[kind])] * 6
    assert fused(logits, rows, device) == [7, None, 2100, None, None, 2499]


def test_a_rows_token_does_not_depend_on_the_others_in_the_batch(device, seed):
    rng = random.Random(seed)
    options = [rng.choice(list(KINDS.values())) for _ in range(8)]
    rows = [row_of(seed=rng.getrandbits(64), prompt=rng.randint(1, 9), vocab=2100, **each) for each in options]
    logits = torch.randn(8, 2100, generator=torch.Generator().manual_seed(seed))
    together = fused(logits, rows, device)
    assert [fused(logits[i : i + 1], [row], device)[0] for i, row in enumerate(rows)] == together
    order = rng.sample(range(8), 8)
    assert fused(logits[order], [rows[i] for i in order], device) == [together[i] for i in order]
    assert fused(logits, rows, device) == together, "not deterministic"


def test_adjusted_logits_and_logprobs_are_those_of_the_cpu(device):
    base = Sampling(temperature=0.9, seed=4, logit_bias=((6, 2.0),), presence_penalty=1.0, min_tokens=2, logprobs=3)
    mix = [base, replace(base, temperature=0.0, repetition_penalty=1.4), replace(base, top_p=0.8, logprobs=None)]
    rows = [Row((1, 2, 3), sampling, (0, 5), 60, None) for sampling in mix]
    logits = torch.randn(3, 60, generator=torch.Generator().manual_seed(1))
    found, wanted = Sampler(triton_sampling.draw).sample(logits.to(device), rows), Sampler().sample(logits, rows)
    for one, other in zip(found, wanted, strict=True):
        assert one.token_id == other.token_id
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-5)
            assert [token for token, _ in one.logprobs.top] == [token for token, _ in other.logprobs.top]


def test_logprobs_of_equal_rows_have_equal_bits(device):
    """50,257 is the vocabulary of GPT-2: rows begin at four places within 16 bytes."""
    logits = torch.randn(1, 50257, generator=torch.Generator().manual_seed(1)).expand(8, -1).contiguous().to(device)
    found = log_softmax(logits)
    assert torch.equal(found, log_softmax(logits[:1]).expand(8, -1))


def test_a_draw_ahead_is_the_draw_after_the_token(device):
    logits, sampler = torch.zeros(2, 300, device=device), Sampler(triton_sampling.draw)
    rows = [row_of(seed=i, vocab=300) for i in range(2)]
    ahead = sampler.draw(logits, rows, [1, 0]).tolist()
    rows[0].advance(9)
    assert sampler.draw(logits, rows, [0, 0]).tolist() == ahead == exact(logits.cpu(), rows)


@pytest.mark.sample(1, of="long under the interpreter")
@pytest.mark.parametrize(("options", "kept", "n"), [({"temperature": 0.8}, 12, 400), ({"top_k": 3}, 3, 100)])
def test_frequencies_are_those_of_the_softmax_of_what_is_kept(options, kept, n, device):
    columns = 12
    logits = torch.linspace(1.5, -2, columns)
    rows = [row_of(seed=i, vocab=columns, **options) for i in range(n)]
    found = torch.tensor(fused(logits.expand(n, -1).contiguous(), rows, device)).bincount(minlength=columns)
    wanted = (logits[:kept] / options.get("temperature", 1.0)).softmax(0) * n
    df = kept - 1
    limit = df * (1 - 2 / (9 * df) + 4 * math.sqrt(2 / (9 * df))) ** 3  # four sigmas (Wilson-Hilferty)
    assert int(found[kept:].sum()) == 0
    assert float(((found[:kept] - wanted) ** 2 / wanted).sum()) < limit
