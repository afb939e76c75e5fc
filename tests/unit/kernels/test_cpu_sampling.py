"""The compiled draw against that of torch, which `test_sampler.py` tests, at each level of instructions."""

import math
import random
from typing import Any

import pytest
import torch

from baton.core import Sampling
from baton.engine.kernels.cpu.compiler import LEVELS, load_library
from baton.engine.kernels.cpu.sampling import CompiledDraw
from baton.engine.sampling.logits import NEVER, Row
from baton.engine.sampling.sampler import Sampler
from tests.support.compiled_kernels import compiled_or_skip
from tests.support.cpu_levels import on_levels

pytestmark = on_levels(*LEVELS)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 50.0, "top_p": 0.9999},
    "top-k": {"top_k": 5},
    "most-k": {"top_k": 900},
    "top-p": {"top_p": 0.9173},
    "least-p": {"top_p": 1e-9},
    "min-p": {"min_p": 0.0513},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.8371, "min_p": 0.0113},
    "cold": {"temperature": math.ulp(0.0), "top_p": 0.9, "top_k": 3},
}
WIDTHS = (7, 64, 1025, 4099, 50000)  # below and at one block, few blocks, and more blocks than most-k


@pytest.fixture
def own(level: str) -> Sampler:
    return compiled_or_skip(lambda: Sampler(CompiledDraw(load_library("f32"), "f32")))


def row_of(seed=0, prompt=3, vocab=4099, **options):
    return Row(range(prompt), Sampling(seed=seed, **options), (), vocab, None)


def ids(sampler, logits, rows):
    return [each.token_id for each in sampler.sample(logits, rows)]


@pytest.mark.sample(14)
@pytest.mark.parametrize("vocab", WIDTHS)
@pytest.mark.parametrize("shape", ["smooth", "ties", "sparse", "flat"])
def test_all_kinds_of_rows_draw_torchs_tokens(own, vocab, shape):
    """The chance that rounding changes a token is below 1e-5 in each row: these logits and seeds have none."""
    generator = torch.Generator().manual_seed(vocab)
    rows = [row_of(seed=i, prompt=i % 7 + 1, vocab=vocab, **KINDS[kind]) for i in range(3) for kind in KINDS]
    logits = torch.randn(len(rows), vocab, generator=generator) * (0.01 if shape == "flat" else 3)
    if shape == "ties":
        logits = logits.round()
    if shape == "sparse":
        logits[torch.rand(logits.shape, generator=generator) < 0.6] = NEVER
    assert ids(own, logits, rows) == ids(Sampler(), logits, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_that_are_no_numbers_draw_nothing_and_change_no_other_row(own, kind):
    logits = torch.zeros(6, 2500)
    logits[0, 7] = logits[2, 2100] = 9e4
    logits[1, 2400], logits[3, 5] = float("nan"), float("inf")
    logits[4] = NEVER
    logits[5, :2499] = NEVER
    rows = [row_of(seed=1, vocab=2500, logprobs=0, **KINDS[kind])] * 6
    assert ids(own, logits, rows) == [7, None, 2100, None, None, 2499]


def test_a_token_does_not_depend_on_the_others_in_the_batch(own, seed):
    rng = random.Random(seed)
    options = [rng.choice(list(KINDS.values())) for _ in range(8)]
    rows = [row_of(seed=rng.getrandbits(64), prompt=rng.randint(1, 9), vocab=2100, **each) for each in options]
    logits = torch.randn(8, 2100, generator=torch.Generator().manual_seed(seed))
    together = ids(own, logits, rows)
    assert [ids(own, logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == together
    order = rng.sample(range(8), 8)
    assert ids(own, logits[order], [rows[i] for i in order]) == [together[i] for i in order]


@pytest.mark.parametrize(("options", "kept"), [({"temperature": 0.8}, 12), ({"top_k": 3}, 3)])
def test_frequencies_are_those_of_the_softmax_of_what_is_kept(own, options, kept):
    columns, n = 12, 4000
    logits = torch.linspace(1.5, -2, columns)
    rows = [row_of(seed=i, vocab=columns, **options) for i in range(n)]
    found = torch.tensor(ids(own, logits.expand(n, -1).contiguous(), rows)).bincount(minlength=columns)
    wanted = (logits[:kept] / options.get("temperature", 1.0)).softmax(0) * n
    df = kept - 1
    limit = df * (1 - 2 / (9 * df) + 4 * math.sqrt(2 / (9 * df))) ** 3  # four sigmas (Wilson-Hilferty)
    assert int(found[kept:].sum()) == 0
    assert float(((found[:kept] - wanted) ** 2 / wanted).sum()) < limit
