"""Decode and prefill attention against plain attention in float64, at the edges of blocks, tiles, splits, windows."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch

from baton.engine.kernels.gpu.ops import GpuKernels
from baton.engine.kernels.gpu.plan import Tiles
from baton.engine.kernels.gpu.triton_decode import Pieces, decode_attention
from baton.engine.kernels.gpu.triton_prefill import prefill_attention
from benchmarks.lib.device import CASES, Case, attention_error

TILES = Tiles(16, 16, 1, 1)
BLOCK = 4


@dataclass
class Drawn:
    """A batch whose cache is NaN wherever nobody has written, and the attention that it should get."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    expected: torch.Tensor

    @property
    def sizes(self):
        """Heads, and the sizes of one head's key and value."""
        return self.query.shape[1], self.query.shape[2], self.values.shape[3]


def plain(q, k, v, window):
    """One sequence, in float64: q [L, heads, dim] are its last L positions, k and v [S, kv_heads, dim] are all."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).double(), v.repeat_interleave(group, 1).double()
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / q.shape[2] ** 0.5
    query, key = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
    hidden = (key > query) if window is None else (key > query) | (key <= query - window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).flatten(1)


def make(seed, device, dtype, queries, contexts, *, heads=4, kv_heads=2, dim=16, value_dim=None, window=None, loud=()):
    """A case with these new tokens and contexts; the sequences `loud` have keys of far larger scores."""
    value_dim = value_dim or dim
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    blocks = list(range(1, 1 + sum(-(-context // BLOCK) for context in contexts)))
    rng.shuffle(blocks)
    nan = float("nan")
    keys = torch.full((len(blocks) + 1, BLOCK, kv_heads, dim), nan, dtype=dtype)
    values = torch.full((len(blocks) + 1, BLOCK, kv_heads, value_dim), nan, dtype=dtype)
    tables = torch.zeros(len(contexts), -(-max(contexts) // BLOCK), dtype=torch.int32)
    query, expected = [], []
    for i, (new, context) in enumerate(zip(queries, contexts, strict=True)):
        own = [blocks.pop() for _ in range(-(-context // BLOCK))]
        tables[i, : len(own)] = torch.tensor(own)
        shapes = (new, heads, dim), (context, kv_heads, dim), (context, kv_heads, value_dim)
        q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
        q, k, v = q.to(dtype), (k * 60 if i in loud else k).to(dtype), v.to(dtype)
        slots = torch.tensor([own[p // BLOCK] * BLOCK + p % BLOCK for p in range(context)])
        keys.view(-1, kv_heads, dim)[slots], values.view(-1, kv_heads, value_dim)[slots] = k, v
        query.append(q)
        expected.append(plain(q, k, v, window))
    # Queries are a part of the fused projection: their rows lie apart.
    fused = torch.cat([torch.cat(query), torch.full((sum(queries), 2 * kv_heads, dim), nan, dtype=dtype)], 1)
    starts = torch.tensor(list(accumulate(queries, initial=0)), dtype=torch.int32)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    parts = (fused.to(device)[:, :heads], keys, values, tables, starts, lengths, torch.cat(expected))
    return Drawn(*(part.to(device) for part in parts))


def decoded(case, splits, *, window=None, unified=None, safe_range=60.0, tiles=TILES):
    heads, dim, value_dim = case.sizes
    out = torch.full((len(case.query), heads * value_dim), 7.0, dtype=case.query.dtype, device=case.query.device)
    pieces = Pieces.empty(len(case.lengths), heads, splits, value_dim, out.device)
    for part in pieces:
        part.fill_(float("nan"))
    batch = (case.tables, case.starts, case.lengths, out, pieces, tiles)
    options = {"scale": dim**-0.5, "window": window, "unified": unified, "safe_range": safe_range}
    decode_attention(case.query, case.keys, case.values, *batch, **options)
    return out, pieces


def prefilled(case, longest, *, window=None, tiles=TILES):
    heads, dim, value_dim = case.sizes
    out = torch.full((len(case.query), heads * value_dim), 7.0, dtype=case.query.dtype, device=case.query.device)
    batch = (case.tables, case.starts, case.lengths, out, tiles)
    options = {"longest_query": longest, "scale": dim**-0.5, "window": window}
    prefill_attention(case.query, case.keys, case.values, *batch, **options)
    return out


def close(found, expected):
    tolerance = 2**-6 if found.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_decode_at_the_edges_of_blocks_tiles_and_splits(splits, device, dtype, seed):
    contexts = [1, 4, 5, 16, 17, 64, 65]  # with 8 splits, most of them have empty ones
    case = make(seed, device, dtype, [1] * len(contexts), contexts)
    found, pieces = decoded(case, splits)
    close(found, case.expected)
    empty = pieces.bases == float("-inf")
    assert bool((pieces.sums[empty] == 0).all())
    assert bool(empty.any()) == (splits > 1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (8, 1), (7, 1), (20, 1)])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (128, 128), (24, 40)])
def test_decode_groups_and_head_sizes(heads, kv_heads, dim, value_dim, device, dtype, seed):
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "value_dim": value_dim}
    case = make(seed, device, dtype, [1, 1], [19, 2], **shape)
    tiles = TILES._replace(rows=32 if heads // kv_heads > 16 else 16)
    close(decoded(case, 2, tiles=tiles)[0], case.expected)


@pytest.mark.parametrize("window", [1, 5, 16, 1000])
@pytest.mark.parametrize("splits", [1, 4])
def test_decode_window(window, splits, device, dtype, seed):
    case = make(seed, device, dtype, [1] * 4, [1, 5, 37, 50], window=window)
    close(decoded(case, splits, window=window)[0], case.expected)


def test_decode_leaves_chunks_and_padding_alone(device, dtype, seed):
    case = make(seed, device, dtype, [3, 1, 2, 1], [9, 21, 2, 4])
    case.lengths[3] = 0  # a row that only fills a bucket
    found, _ = decoded(case, 2)
    close(found[3:4], case.expected[3:4])
    assert bool((found[[0, 1, 2, 4, 5]] == 7).all())
    assert bool((found[6] == 0).all())


@pytest.mark.parametrize("splits", [1, 4])
def test_one_loud_row_alone_leaves_the_unified_maximum(splits, device, dtype, seed):
    case = make(seed, device, dtype, [1] * 3, [40, 40, 40], loud={1})
    found, pieces = decoded(case, splits, unified=0.5)
    close(found, case.expected)
    constant = torch.tensor(0.5 * 1.4426950408889634)
    left = (pieces.bases != constant.to(device)) & (pieces.bases > float("-inf"))
    assert left.flatten(1).any(1).tolist() == [False, True, False]


def test_the_unified_maximum_is_left_downwards_too(device, dtype, seed):
    case = make(seed, device, dtype, [1, 1], [40, 7])
    found, _ = decoded(case, 2, unified=400.0)  # every weight underflows
    close(found, case.expected)


def test_without_the_fallback_the_loud_row_is_lost(device, seed):
    case = make(seed, device, torch.float32, [1] * 2, [40, 40], loud={1})
    found, _ = decoded(case, 2, unified=0.5, safe_range=float("inf"))
    close(found[:1], case.expected[:1])
    assert not bool(torch.isfinite(found[1]).all())


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("tiles", [Tiles(16, 16, 1, 1), Tiles(32, 16, 1, 1)])
def test_prefill_over_a_prefix(window, tiles, device, dtype, seed):
    queries, contexts = [2, 1, 7, 16, 33, 5], [2, 8, 7, 49, 40, 21]
    case = make(seed, device, dtype, queries, contexts, window=window)
    found = prefilled(case, 33, window=window, tiles=tiles)
    assert bool((found[2] == 7).all())  # the one new token is the decode kernel's
    found[2] = case.expected[2]
    close(found, case.expected)


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim"), [(2, 2, 64, 64), (8, 1, 128, 128), (7, 1, 24, 40)])
def test_prefill_groups_and_head_sizes(heads, kv_heads, dim, value_dim, device, dtype, seed):
    case = make(seed, device, dtype, [9], [12], heads=heads, kv_heads=kv_heads, dim=dim, value_dim=value_dim)
    close(prefilled(case, 9), case.expected)


SMALL = (Case((1, 40, 1), (130, 70, 5), 8, 2, 64, 16), Case((9, 1), (75, 33), 2, 1, 128, 256, 30))


@pytest.mark.parametrize("case", CASES if torch.cuda.is_available() else SMALL)
@pytest.mark.parametrize("unified", [None, 0.0])
def test_with_the_tiles_and_splits_of_the_engine(case, unified, device):
    assert attention_error(case, GpuKernels(16, unified=unified), device, torch.bfloat16) < 0.02


def test_a_head_too_wide_for_a_tile_takes_the_reference(device):
    case = CASES[0]._replace(dim=576, contexts=(33,))
    assert attention_error(case, GpuKernels(16), device, torch.float32) < 1e-4
