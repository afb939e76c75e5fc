"""Causal attention over paged KV in plain torch, for any mix of prompt chunks and decode sequences.

`PagedAttention` is built once per forward and window, with all indices and masks; layers then pass their queries.
Prompt chunks run one sequence at a time, in tiles of query rows; single tokens run in groups of similar context length.
Only valid positions are read, so data of other sequences in a block, even NaN, has no effect.

`SteadyAttention` serves fixed forwards and is slower: a row depends only on its position and the KV before it. It
reads a sequence in chunks that begin at multiples of CHUNK. All products have constant shapes (new tokens x CHUNK).
Chunks are added to a running maximum and sums in float32. A chunk invisible to a row leaves its sums unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from baton.engine.batch import Batch
from baton.engine.kernels.elementwise import mapped
from baton.engine.kernels.kv_levels import head_dim, select

TILE_ROWS = 256  # limits the mask of a chunk to TILE_ROWS x context
GROUP_SLOTS = 65536  # limits the copy of KV for one group of decode sequences


@dataclass(frozen=True, slots=True)
class _Chunk:
    """New tokens of one sequence, from `row`; `slots` int64 of its positions from the first visible one."""

    row: int
    slots: Tensor
    tiles: list[_Tile]


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows of a chunk and their visible range of its slots. Without a mask it is a causal square."""

    rows: slice
    keys: slice
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows int64 [R] of one token each, slots int64 [R, S], and mask bool [R, 1, 1, S], False for padding slots."""

    rows: Tensor
    slots: Tensor
    mask: Tensor


class PagedAttention:
    """Implementation of `baton.engine.kernels.base.Attention` for any device and dtype."""

    def __init__(self, batch: Batch, block_size: int, window: int | None, scale: float) -> None:
        self._scale, self._block_size, self._window = scale, block_size, window
        self._tables = batch.block_tables.to(torch.int64)
        starts = accumulate(batch.query_lens, initial=0)
        rows = list(zip(starts, batch.query_lens, batch.context_lens, strict=False))
        self._chunks = [self._chunk(i, *row) for i, row in enumerate(rows) if row[1] > 1]
        singles = [(i, row, context) for i, (row, tokens, context) in enumerate(rows) if tokens == 1]
        self._groups = [self._group(members) for members in _similar(singles, window)]

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
        result = out.view(*query.shape[:2], head_dim(values))
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        for chunk in self._chunks:
            _run_chunk(chunk, query, keys, values, result, self._scale)
        for group in self._groups:
            _run_group(group, query, keys, values, result, self._scale)
        return out

    def _chunk(self, index: int, row: int, tokens: int, context: int) -> _Chunk:
        start = context - tokens
        first = _first_seen(start, self._window)
        positions = torch.arange(first, context, device=self._tables.device)
        tiles = list(_tiles(start, context, first, self._window, self._tables.device))
        return _Chunk(row, self._slots(self._tables[index], positions), tiles)

    def _group(self, members: list[tuple[int, int, int]]) -> _Group:
        device = self._tables.device
        sequences, rows, contexts = (torch.tensor(column, device=device) for column in zip(*members, strict=True))
        last = contexts[:, None] - 1
        seen = contexts if self._window is None else contexts.clamp(max=self._window)
        longest = max(_seen(context, self._window) for _, _, context in members)
        columns = torch.arange(longest, device=device)
        # Padding repeats the row's last position, because its slot is valid and in the CPU cache.
        positions = torch.minimum(contexts[:, None] - seen[:, None] + columns, last)
        slots = self._slots(self._tables[sequences], positions)
        return _Group(rows, slots, (columns < seen[:, None])[:, None, None])

    def _slots(self, tables: Tensor, positions: Tensor) -> Tensor:
        blocks = tables.gather(-1, positions // self._block_size)
        return blocks * self._block_size + positions % self._block_size


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _seen(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)


def _tiles(start: int, end: int, first: int, window: int | None, device: torch.device) -> Iterator[_Tile]:
    """Yield tiles of the query positions [start, end). Key ranges are relative to position `first`."""
    if start == 0 and (window is None or end <= window):
        yield _Tile(slice(0, end), slice(0, end), None)
        return
    for begin in range(start, end, TILE_ROWS):
        stop = min(begin + TILE_ROWS, end)
        low = _first_seen(begin, window)
        query = torch.arange(begin, stop, device=device)[:, None]
        key = torch.arange(low, stop, device=device)
        mask = key <= query if window is None else (key <= query) & (key > query - window)
        yield _Tile(slice(begin - start, stop - start), slice(low - first, stop - first), mask)


def _similar(singles: list[tuple[int, int, int]], window: int | None) -> Iterator[list[tuple[int, int, int]]]:
    """Group (sequence, row, context) by context, so that padding at most doubles the work and the copy is limited."""
    group: list[tuple[int, int, int]] = []
    shortest = 0
    for member in sorted(singles, key=lambda single: single[2]):
        seen = _seen(member[2], window)
        if group and (seen > 2 * shortest + 64 or (len(group) + 1) * seen > GROUP_SLOTS):
            yield group
            group = []
        shortest = shortest if group else seen
        group.append(member)
    if group:
        yield group


def _run_chunk(chunk: _Chunk, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, scale: float) -> None:
    kv_heads, dim = keys.shape[1], query.shape[2]
    # [kv_heads, 1, S, head_dim]
    k, v = (select(cache, chunk.slots, query.dtype).transpose(0, 1)[:, None] for cache in (keys, values))
    for tile in chunk.tiles:
        tokens = tile.rows.stop - tile.rows.start
        rows = slice(chunk.row + tile.rows.start, chunk.row + tile.rows.stop)
        # The KV heads become the batch and their query heads its heads, so that K and V are not repeated in memory.
        q = query[rows].view(tokens, kv_heads, -1, dim).permute(1, 2, 0, 3)
        shape = (-1, q.shape[1], -1, -1)
        seen_k, seen_v = k[:, :, tile.keys].expand(shape), v[:, :, tile.keys].expand(shape)
        result = scaled_dot_product_attention(
            q, seen_k, seen_v, attn_mask=tile.mask, is_causal=tile.mask is None, scale=scale
        )
        out[rows] = result.permute(2, 0, 1, 3).flatten(1, 2)


def _run_group(group: _Group, query: Tensor, keys: Tensor, values: Tensor, out: Tensor, scale: float) -> None:
    # [R, kv_heads, S, head_dim]; index_select copies whole rows and is several times as fast as `cache[slots]`
    shape, slots = group.slots.shape, group.slots.view(-1)
    k, v = (
        select(cache, slots, query.dtype).view(*shape, keys.shape[1], -1).transpose(1, 2) for cache in (keys, values)
    )
    # All query heads of a KV head see the same keys, so they take the place of query rows.
    q = query[group.rows].view(len(group.rows), keys.shape[1], -1, query.shape[2])
    out[group.rows] = scaled_dot_product_attention(q, k, v, attn_mask=group.mask, scale=scale).flatten(1, 2)


CHUNK = 64
SPAN = 512  # limits the scores that are in memory, where bits may depend on the batch
ALIGNED = 16  # elements; libraries round rows of a product differently if not all rows begin at a multiple
# Slots int64 [CHUNK] of consecutive positions, and a mask [tokens, CHUNK], True if hidden from the new token.
FixedChunk = tuple[Tensor, Tensor]


class _Sums(NamedTuple):
    """Running state per query row, float32: maximum score and sum of weights, both [.., 1], and weighted values."""

    peak: Tensor
    total: Tensor
    values: Tensor


class SteadyAttention:
    """Implementation of `baton.engine.kernels.base.Attention` for any device and dtype, in fixed forwards. In others it
    has a `span`, the positions of a chunk, and computes soft caps, sinks, and attention within chunks.
    """

    def __init__(
        self,
        batch: Batch,
        block_size: int,
        window: int | None,
        scale: float,
        *,
        span: int | None = None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        kept: bool = True,
    ) -> None:
        """Chunks of several new tokens are cut again at each use if they are not `kept`, because masks are large."""
        self._scale, self._block_size, self._window = scale, block_size, window
        self._span, self._within, self._soft_cap, self._fixed = span, chunk, soft_cap, batch.fixed
        starts = accumulate(batch.query_lens, initial=0)
        self.rows = [slice(start, start + n) for start, n in zip(starts, batch.query_lens, strict=False)]
        lengths = zip(batch.block_tables.to(torch.int64), batch.query_lens, batch.context_lens, strict=True)
        self._lengths = list(lengths)
        self._kept = [self._cut(*each) if kept or each[1] == 1 else None for each in self._lengths]

    @property
    def chunks(self) -> Iterator[list[FixedChunk]]:
        """The chunks of each sequence."""
        return (kept or self._cut(*each) for kept, each in zip(self._kept, self._lengths, strict=True))

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        sinks: Tensor | None = None,
        selected: Iterable[list[FixedChunk]] | None = None,
    ) -> Tensor:
        """Attend. `sinks` float32 [heads] are scores that take part in each softmax without a value. `selected` has
        other chunks than `chunks` for each sequence.
        """
        result = out.view(*query.shape[:2], head_dim(values))
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        for rows, chunks in zip(self.rows, self.chunks if selected is None else selected, strict=True):
            result[rows] = self._attend(query[rows], chunks, keys, values, sinks)
        return out

    def _cut(self, table: Tensor, tokens: int, context: int) -> list[FixedChunk]:
        first, size = context - tokens, self._span or CHUNK
        own = torch.arange(first, context, device=table.device)[:, None]
        low = _first_seen(first, self._window)
        if self._within is not None:
            low = max(low, first // self._within * self._within)
        return [self._chunk(table, own, at, context) for at in range(low // size * size, context, size)]

    def _chunk(self, table: Tensor, own: Tensor, at: int, context: int) -> FixedChunk:
        end = at + CHUNK if self._span is None else min(at + self._span, context)
        span = torch.arange(at, end, device=table.device)
        hidden = span > own if self._window is None else (span > own) | (span <= own - self._window)
        if self._within is not None:
            hidden |= span < own // self._within * self._within
        there = span.clamp(max=context - 1)  # positions after the end were never written
        return table[there // self._block_size] * self._block_size + there % self._block_size, hidden

    def _attend(
        self, query: Tensor, chunks: list[FixedChunk], keys: Tensor, values: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """Attend with query [tokens, heads, dim] over keys [slots, kv_heads, dim]: [tokens, heads, value_dim]."""
        tokens, _, dim = query.shape
        kv_heads, value_dim = values.shape[1], head_dim(values)
        # The query heads of a KV head are rows of one product: [kv_heads, group * tokens, dim].
        q = query.view(tokens, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim).float()
        nothing = q.new_zeros(*q.shape[:2], 1)
        spare = -value_dim % ALIGNED
        sums = _Sums(nothing - torch.inf, nothing, q.new_zeros(*q.shape[:2], value_dim + spare))
        if sinks is not None:
            peaks = sinks.view(kv_heads, -1, 1).expand(-1, -1, tokens).reshape(nothing.shape)
            sums = sums._replace(peak=peaks, total=nothing + 1)
        for slots, hidden in chunks:
            k, v = (select(cache, slots, torch.float32).transpose(0, 1).float() for cache in (keys, values))
            scores = torch.bmm(q, k.transpose(1, 2)).mul_(self._scale)
            if self._soft_cap is not None:
                scores = mapped(torch.tanh_, scores.div_(self._soft_cap), fixed=self._fixed).mul_(self._soft_cap)
            scores = scores.view(kv_heads, -1, tokens, len(slots)).masked_fill_(hidden, -torch.inf).flatten(1, 2)
            sums = _taken_in(sums, scores, pad(v, (0, spare)), fixed=self._fixed)
        result = sums.values[..., :value_dim] / sums.total
        return result.reshape(kv_heads, -1, tokens, value_dim).permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)


def _taken_in(sums: _Sums, scores: Tensor, values: Tensor, *, fixed: bool) -> _Sums:
    """Return sums that include a chunk of scores [kv_heads, rows, CHUNK] and values [kv_heads, CHUNK, value_dim]."""
    peak = torch.maximum(sums.peak, scores.amax(-1, keepdim=True))
    base = peak.masked_fill(peak == -torch.inf, 0.0)  # before the first visible key, because -inf - -inf is NaN
    fade, weights = (mapped(torch.exp_, x - base, fixed=fixed) for x in (sums.peak, scores))
    total = sums.total * fade + weights.sum(-1, keepdim=True)
    return _Sums(peak, total, sums.values * fade + torch.bmm(weights, values))
