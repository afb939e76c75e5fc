"""In fixed forwards a row's attention has the same bits wherever it lies, and whatever lies beside and behind it."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch

from baton.engine.batch import Batch
from baton.engine.kernels.cpu.attention import CompiledAttention
from baton.engine.kernels.cpu.build import load_library
from baton.engine.kernels.cpu.ops import ELEMENTS
from baton.engine.kernels.paged import PagedAttention
from baton.engine.kernels.plain import torch_attention
from baton.engine.kernels.steady import SteadyAttention
from tests.support.compiled_kernels import compiled_or_skip

BLOCK, LONGEST, TOKENS = 16, 400, 32
HEADS = [(4, 4, 64, 64), (12, 4, 48, 48), (8, 1, 128, 128), (4, 1, 96, 64), (6, 2, 10, 10), (2, 1, 640, 20)]
WINDOWS = [None, 1, 20, 64, 100]


def compiled(dtype, window, unified=None):
    element = ELEMENTS[dtype]
    return compiled_or_skip(lambda: CompiledAttention(load_library(element), element, window, unified))


def by_compiled(dtype, window, unified=None):
    made = compiled(dtype, window, unified)
    return lambda batch, scale: made.bind(batch, BLOCK, scale)


def by_torch(dtype, window):
    return lambda batch, scale: torch_attention(batch, BLOCK, window, scale)


class Sequence:
    """Queries, keys and values of one sequence; forwards of it in any company give outputs by position."""

    def __init__(self, seed: int, dtype, heads: int, kv_heads: int, dim: int, value_dim: int) -> None:
        self.rng, self.dtype, self.generator = random.Random(seed), dtype, torch.Generator().manual_seed(seed)
        self.heads, self.kv_heads, self.dim, self.value_dim = heads, kv_heads, dim, value_dim
        self.query = self.normal(LONGEST, heads, dim)
        self.keys, self.values = self.normal(LONGEST, kv_heads, dim), self.normal(LONGEST, kv_heads, value_dim)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def forward(self, make, rows: int, slot: int, start: int, known: int, tokens: int = TOKENS) -> torch.Tensor:
        """Outputs of positions [start, start + known): the row's other tokens, and all other rows, are random."""
        starts = [self.rng.randrange(LONGEST - tokens) for _ in range(rows)]
        starts[slot] = start
        contexts = [begin + tokens for begin in starts]
        needed = [-(-context // BLOCK) for context in contexts]
        blocks = list(range(1, 1 + sum(needed)))
        self.rng.shuffle(blocks)
        tables = torch.zeros(rows, max(needed) + self.rng.randrange(3), dtype=torch.int32)
        keys = torch.full((len(blocks) + 1, BLOCK, self.kv_heads, self.dim), torch.nan, dtype=self.dtype)
        values = torch.full((len(blocks) + 1, BLOCK, self.kv_heads, self.value_dim), torch.nan, dtype=self.dtype)
        query = self.normal(rows * tokens, self.heads, self.dim)
        for row, context in enumerate(contexts):
            own = [blocks.pop() for _ in range(needed[row])]
            tables[row, : len(own)] = torch.tensor(own)
            k, v = self.normal(context, self.kv_heads, self.dim), self.normal(context, self.kv_heads, self.value_dim)
            if row == slot:
                k[: start + known], v[: start + known] = self.keys[: start + known], self.values[: start + known]
                query[row * tokens :][:known] = self.query[start : start + known]
            slots = [own[p // BLOCK] * BLOCK + p % BLOCK for p in range(context)]
            keys.view(-1, self.kv_heads, self.dim)[slots] = k
            values.view(-1, self.kv_heads, self.value_dim)[slots] = v
        none = torch.empty(0, dtype=torch.int64)
        row_starts = torch.tensor(list(accumulate([tokens] * rows, initial=0)), dtype=torch.int32)
        lens = torch.tensor(contexts, dtype=torch.int32)
        batch = Batch(none, none, none, [tokens] * rows, contexts, row_starts, lens, tables, none, fixed=True)
        out = torch.full((rows * tokens, self.heads * self.value_dim), torch.nan, dtype=self.dtype)
        make(batch, self.dim**-0.5)(query, keys, values, out)
        assert not out.isnan().any()
        return out[slot * tokens :][:known].view(torch.uint8).clone()


def differing(sequence: Sequence, make, rounds: int = 24) -> list[int]:
    """Positions whose output had other bits in one of the forwards."""
    seen: dict[int, torch.Tensor] = {}
    found: set[int] = set()
    rng = sequence.rng
    for n in range(rounds):
        rows = 2
        # Around 150, so that positions meet at many offsets; some at the beginning, where a row's first chunk is.
        start = rng.randrange(130, 170) if n % 4 else rng.randrange(40)
        known = TOKENS if n % 3 else rng.randrange(1, TOKENS)
        for position, bits in enumerate(sequence.forward(make, rows, rng.randrange(rows), start, known), start):
            if not torch.equal(seen.setdefault(position, bits), bits):
                found.add(position)
    assert len(seen) > TOKENS
    return sorted(found)


@pytest.mark.parametrize("dtype", list(ELEMENTS), ids=str)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kernels", [by_compiled, by_torch])
def test_bits_depend_on_the_position_alone(seed, threads, dtype, window, kernels):
    for shape in HEADS:
        assert differing(Sequence(seed, dtype, *shape), kernels(dtype, window)) == [], shape


@pytest.mark.parametrize("dtype", list(ELEMENTS), ids=str)
def test_a_preset_maximum_and_its_fallback_are_steady_too(seed, dtype):
    sequence = Sequence(seed, dtype, 6, 2, 64, 64)
    sequence.query[150::3] *= 40  # some rows leave the range that is safe
    assert differing(sequence, by_compiled(dtype, None, unified=0.0)) == []


def test_the_attention_of_ordinary_forwards_is_not_steady(seed):
    """Else the tests above would prove nothing."""
    make = lambda batch, scale: PagedAttention(batch, BLOCK, 100, scale)  # noqa: E731
    assert differing(Sequence(seed, torch.float32, 4, 2, 64, 64), make)


@pytest.mark.parametrize("dtype", list(ELEMENTS), ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_steady_attention_is_right(seed, dtype, window):
    for shape in HEADS:
        results = []
        for kind in (SteadyAttention, PagedAttention):
            sequence = Sequence(seed, dtype, *shape)
            make = lambda batch, scale, kind=kind: kind(batch, BLOCK, window, scale)  # noqa: E731
            results.append([sequence.forward(make, 2, 1, start, TOKENS).view(dtype) for start in (0, 50, 200)])
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tokens", [64, 256])
def test_chunks_of_prompts_do_not_see_their_padding(seed, threads, tokens):
    for dtype in ELEMENTS:
        for kernels in (by_compiled, by_torch):
            sequence = Sequence(seed, dtype, 4, 2, 32, 32)
            make = kernels(dtype, None)
            first = sequence.forward(make, 1, 0, 64, tokens, tokens)
            for known in (1, tokens // 2, tokens - 1):
                assert torch.equal(sequence.forward(make, 1, 0, 64, known, tokens), first[:known])
