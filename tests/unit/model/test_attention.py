"""Paged attention against plain attention, at the edges of tiles, groups, windows and blocks."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch

from baton.engine.batch import Batch
from baton.engine.kernels import paged as attention
from baton.engine.kernels.paged import PagedAttention

HEADS, KV_HEADS, DIM, BLOCK = 6, 3, 8, 4


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """One sequence, in float64: q [L, heads, dim] are its last L positions, k and v [S, kv_heads, dim] are all."""
    group = HEADS // KV_HEADS
    k, v = k.repeat_interleave(group, 1).double(), v.repeat_interleave(group, 1).double()
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / DIM**0.5
    query, key = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
    hidden = (key > query) if window is None else (key > query) | (key <= query - window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1).float()


@pytest.mark.parametrize("window", [None, 1, 5, 16, 1000])
@pytest.mark.parametrize(("tile_rows", "group_slots"), [(256, 65536), (3, 40), (1, 1)])
def test_any_mix(window: int | None, tile_rows: int, group_slots: int, monkeypatch, seed: int):
    monkeypatch.setattr(attention, "TILE_ROWS", tile_rows)
    monkeypatch.setattr(attention, "GROUP_SLOTS", group_slots)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    contexts = [1, 2, 4, 5, 16, 17, *(rng.randint(1, 150) for _ in range(4))]
    queries = [rng.choice([1, context, rng.randint(1, context)]) for context in contexts]
    blocks = list(range(1, 1 + sum(-(-context // BLOCK) for context in contexts)))
    rng.shuffle(blocks)
    keys = torch.full((len(blocks) + 1, BLOCK, KV_HEADS, DIM), float("nan"))
    values = keys.clone()
    tables = torch.zeros(len(contexts), 80, dtype=torch.int32)
    query, expected = [], []
    for i, (new, context) in enumerate(zip(queries, contexts, strict=True)):
        own = [blocks.pop() for _ in range(-(-context // BLOCK))]
        tables[i, : len(own)] = torch.tensor(own)
        q, k, v = (torch.randn(n, h, DIM, generator=generator) for n, h in ((new, HEADS), *[(context, KV_HEADS)] * 2))
        slots = [own[p // BLOCK] * BLOCK + p % BLOCK for p in range(context)]
        keys.view(-1, KV_HEADS, DIM)[slots], values.view(-1, KV_HEADS, DIM)[slots] = k, v
        query.append(q)
        expected.append(plain(q, k, v, window))
    none = torch.empty(0, dtype=torch.int64)
    starts = torch.tensor(list(accumulate(queries, initial=0)), dtype=torch.int32)
    kv_lens = torch.tensor(contexts, dtype=torch.int32)
    batch = Batch(none, none, none, queries, contexts, starts, kv_lens, tables, none)
    queries_flat = torch.cat(query)
    out = torch.empty(len(queries_flat), HEADS * DIM)
    PagedAttention(batch, BLOCK, window, DIM**-0.5)(queries_flat, keys, values, out)
    torch.testing.assert_close(out, torch.cat(expected), atol=2e-5, rtol=1e-4)


def test_groups_waste_at_most_half_and_stay_within_their_bound():
    rng = random.Random(3)
    singles = [(i, i, rng.randint(1, 9000)) for i in range(200)]
    groups = list(attention._similar(singles, None))
    assert sorted(member for group in groups for member in group) == singles
    for group in groups:
        lengths = [context for _, _, context in group]
        assert max(lengths) <= 2 * min(lengths) + 64
        assert len(lengths) * max(lengths) <= attention.GROUP_SLOTS
