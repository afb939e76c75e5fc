"""Causal attention of fixed forwards in plain torch: a row depends on its position and on the KV before it alone.

Each sequence is walked in chunks that begin at multiples of CHUNK, all products have constant shapes (the new tokens of
the sequence x CHUNK), and a running maximum and sums in float32 take the chunks in, one after another. A chunk of which
a row sees nothing leaves that row's sums exactly as they are. `baton.engine.kernels.paged` is faster, and not steady.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from torch import Tensor

    from baton.engine.batch import Batch

CHUNK = 64
ALIGNED = 16  # elements: libraries round rows of a product apart where these do not all begin at such a place


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Slots int64 [CHUNK] of positions side by side, and which of them each new token does not see: [tokens, CHUNK]."""

    slots: Tensor
    hidden: Tensor


class _Sums(NamedTuple):
    """By query row, float32: the greatest score so far, the sum of weights, both [.., 1], and of weighted values."""

    peak: Tensor
    total: Tensor
    values: Tensor


class SteadyAttention:
    """Implements `baton.engine.kernels.base.Attention` for any device and dtype, in fixed forwards."""

    def __init__(self, batch: Batch, block_size: int, window: int | None, scale: float) -> None:
        self._scale, self._block_size, self._window = scale, block_size, window
        starts = accumulate(batch.query_lens, initial=0)
        self._rows = [slice(start, start + n) for start, n in zip(starts, batch.query_lens, strict=False)]
        tables = batch.block_tables.to(torch.int64)
        lengths = zip(tables, batch.query_lens, batch.context_lens, strict=True)
        self._chunks = [self._cut(*sequence) for sequence in lengths]

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
        result = out.view(*query.shape[:2], values.shape[-1])
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        for rows, chunks in zip(self._rows, self._chunks, strict=True):
            result[rows] = self._attend(query[rows], chunks, keys, values)
        return out

    def _cut(self, table: Tensor, tokens: int, context: int) -> list[_Chunk]:
        own = torch.arange(context - tokens, context, device=table.device)[:, None]
        low = 0 if self._window is None else max(0, context - tokens - self._window + 1)
        return [self._chunk(table, own, at, context) for at in range(low // CHUNK * CHUNK, context, CHUNK)]

    def _chunk(self, table: Tensor, own: Tensor, at: int, context: int) -> _Chunk:
        span = torch.arange(at, at + CHUNK, device=table.device)
        hidden = span > own if self._window is None else (span > own) | (span <= own - self._window)
        there = span.clamp(max=context - 1)  # what lies behind the end was never written
        return _Chunk(table[there // self._block_size] * self._block_size + there % self._block_size, hidden)

    def _attend(self, query: Tensor, chunks: list[_Chunk], keys: Tensor, values: Tensor) -> Tensor:
        """[tokens, heads, value_dim] of query [tokens, heads, head_dim] over keys [slots, kv_heads, head_dim]."""
        tokens, _, dim = query.shape
        kv_heads, value_dim = values.shape[1:]
        # All query heads of a KV head are rows of one product: [kv_heads, group * tokens, dim].
        q = query.view(tokens, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim).float()
        nothing = q.new_zeros(*q.shape[:2], 1)
        spare = -value_dim % ALIGNED
        sums = _Sums(nothing - torch.inf, nothing, q.new_zeros(*q.shape[:2], value_dim + spare))
        for chunk in chunks:
            k, v = (cache.index_select(0, chunk.slots).transpose(0, 1).float() for cache in (keys, values))
            scores = torch.bmm(q, k.transpose(1, 2)).mul_(self._scale).view(kv_heads, -1, tokens, CHUNK)
            scores = scores.masked_fill_(chunk.hidden, -torch.inf).flatten(1, 2)
            sums = _taken_in(sums, scores, pad(v, (0, spare)))
        result = sums.values[..., :value_dim] / sums.total
        return result.reshape(kv_heads, -1, tokens, value_dim).permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)


def _taken_in(sums: _Sums, scores: Tensor, values: Tensor) -> _Sums:
    """The sums with a chunk more: scores [kv_heads, rows, CHUNK], values [kv_heads, CHUNK, value_dim]."""
    peak = torch.maximum(sums.peak, scores.amax(-1, keepdim=True))
    base = peak.masked_fill(peak == -torch.inf, 0.0)  # of a row that has seen nothing: -inf minus itself is NaN
    fade, weights = (sums.peak - base).exp_(), (scores - base).exp_()
    total = sums.total * fade + weights.sum(-1, keepdim=True)
    return _Sums(peak, total, sums.values * fade + torch.bmm(weights, values))
