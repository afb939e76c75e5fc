"""Batches over scattered cache blocks, NaN in all unwritten slots, and plain attention as a reference."""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from baton.engine.batch import Batch


@dataclass
class Paged:
    """`parts`: query, keys and values of each sequence."""

    batch: Batch
    query: Tensor
    keys: Tensor
    values: Tensor
    parts: list[tuple[Tensor, Tensor, Tensor]]

    def expected(self, window: int | None = None) -> Tensor:
        """Return the reference attention in float64."""
        return torch.cat([plain_attention(*part, window) for part in self.parts])


def plain_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Return one sequence's attention in float64. q [L, heads, dim]: last L positions; k, v [S, kv_heads, dim]: all."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).double(), v.repeat_interleave(group, 1).double()
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / q.shape[2] ** 0.5
    query, key = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))
    hidden = (key > query) if window is None else (key > query) | (key <= query - window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).flatten(1)


def paged(
    seed: int,
    lengths: Sequence[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int | None = None,
    block: int = 4,
    dtype: torch.dtype = torch.float32,
    loud: Collection[int] = (),
) -> Paged:
    """Build sequences of (new tokens, positions). Those in `loud` have keys with far larger scores."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    needed = [-(-context // block) for _, context in lengths]
    blocks = list(range(1, 1 + sum(needed)))
    rng.shuffle(blocks)
    keys = torch.full((len(blocks) + 1, block, kv_heads, dim), torch.nan, dtype=dtype)
    values = torch.full((len(blocks) + 1, block, kv_heads, value_dim or dim), torch.nan, dtype=dtype)
    tables, parts = torch.zeros(len(lengths), max(needed) + 5, dtype=torch.int32), []
    for i, (new, context) in enumerate(lengths):
        own = [blocks.pop() for _ in range(needed[i])]
        tables[i, : len(own)] = torch.tensor(own)
        shapes = (new, heads, dim), (context, kv_heads, dim), (context, kv_heads, value_dim or dim)
        q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
        q, k, v = q.to(dtype), (k * 60 if i in loud else k).to(dtype), v.to(dtype)
        slots = [own[position // block] * block + position % block for position in range(context)]
        keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots] = k, v
        parts.append((q, k, v))
    batch = batch_over(tables[:, : max(needed)], [new for new, _ in lengths], [context for _, context in lengths])
    return Paged(batch, torch.cat([q for q, _, _ in parts]), keys, values, parts)


def batch_over(tables: Tensor, new: list[int], contexts: list[int], *, fixed: bool = False) -> Batch:
    """Return a batch with only the fields that attention needs."""
    none = torch.empty(0, dtype=torch.int64)
    starts = torch.tensor(list(accumulate(new, initial=0)), dtype=torch.int32)
    kv_lens = torch.tensor(contexts, dtype=torch.int32)
    return Batch(none, none, none, new, contexts, starts, kv_lens, tables, none, fixed=fixed)
