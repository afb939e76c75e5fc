"""Paged attention: split KV for sequences with one new token, tiles of query rows for prompt chunks.

Each context with one new token is cut into splits of a fixed length, so a long one gets many and the bits of a row do
not depend on other rows. A program computes one split or several in turn. A split writes its base (the maximum score),
sum of weights and weighted values in float32. A second kernel combines the splits that a context fills by log-sum-exp.
All query heads of a KV head are one tile, so that K and V are read once.

A tile of a prompt chunk holds consecutive (token, head) pairs of one sequence and KV head, ordered by token. Groups of
any size fill it, and each key is read once per group. Keys that all rows see need no mask; those on the diagonal do.
Scores are in units of log 2 (`scale` includes log2(e)), because the hardware has exp2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.shapes import SPLIT_TOKENS, Tiles

LOG2E = 1.4426950408889634
# Powers of two from the unified maximum within which float32 sums over a million keys stay finite and keep all bits.
SAFE_RANGE = 60.0
COMBINED = 16  # splits that the second kernel holds at a time


class Pieces(NamedTuple):
    """Results of the splits in float32: bases and sums [B, heads, splits], values [B, heads, splits, value_dim]."""

    bases: Tensor
    sums: Tensor
    values: Tensor

    @classmethod
    def empty(cls, sequences: int, heads: int, splits: int, value_dim: int, device: torch.device) -> Pieces:
        """Return uninitialised memory, which all layers of a forward share."""
        shape = (sequences, heads, splits)
        bases, sums = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        return cls(bases, sums, torch.empty((*shape, value_dim), dtype=torch.float32, device=device))


# fmt: off
@triton.jit
def paged_tile(
    cache: tl.tensor, places: tl.tensor, there: tl.tensor, DIM: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr
) -> tl.tensor:
    """Load [keys, WIDTH] of a cache at element offsets `places`, zero where not `there`. WHOLE means all are there."""
    columns = tl.arange(0, WIDTH)[None, :]
    if WHOLE and DIM == WIDTH:
        return tl.load(cache + places[:, None] + columns)
    return tl.load(cache + places[:, None] + columns, mask=there[:, None] & (columns < DIM), other=0.0)


@triton.jit
def attend(
    query: tl.tensor, last: tl.tensor, begin: tl.tensor, end: tl.tensor, keys: tl.tensor, values: tl.tensor,
    table: tl.tensor, block_size: int, key_block: int, key_slot: int, value_block: int, value_slot: int,
    peak: tl.tensor, total: tl.tensor, result: tl.tensor, scale: float, unified: float,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, WHOLE: tl.constexpr, UNIFIED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add keys [begin, end) to (peak, total, result): the running maximum, sum and weighted values.

    Row i sees positions up to last[i]. WHOLE means that every row sees all keys and they fill whole tiles. UNIFIED
    means that the constant `unified` replaces the maximum, so nothing is rescaled and `peak` is only recorded.
    """
    for start in range(begin, end, TILE):
        positions = start + tl.arange(0, TILE)
        there = positions < end
        blocks = tl.load(table + positions // block_size, mask=there, other=0).to(tl.int64)
        offsets = positions % block_size
        k = paged_tile(keys, blocks * key_block + offsets * key_slot, there, DIM, WIDTH, WHOLE)
        zero = tl.zeros([query.shape[0], TILE], tl.float32)
        scores = tl.dot(query, tl.trans(k), zero, input_precision="ieee") * scale
        if not WHOLE:
            seen = there[None, :] & (positions[None, :] <= last[:, None])
            if WINDOW > 0:
                seen = seen & (positions[None, :] > last[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, axis=1))
        if UNIFIED:
            weights = tl.exp2(scores - unified)
        else:
            # The maximum is -inf before the first visible key, and -inf - -inf is NaN.
            base = tl.where(highest == float("-inf"), 0.0, highest)
            fade = tl.exp2(peak - base)
            total, result = total * fade, result * fade[:, None]
            weights = tl.exp2(scores - base[:, None])
        peak = highest
        total += tl.sum(weights, axis=1)
        v = paged_tile(values, blocks * value_block + offsets * value_slot, there, VALUE_DIM, VALUE_WIDTH, WHOLE)
        result = tl.dot(weights.to(v.dtype), v, result, input_precision="ieee")
    return peak, total, result


@triton.jit(do_not_specialize=["splits"])
def split_kernel(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, tables: tl.tensor, starts: tl.tensor, lengths: tl.tensor,
    bases: tl.tensor, sums: tl.tensor, parts: tl.tensor, splits: int, block_size: int, query_row: int, query_head: int,
    key_block: int, key_slot: int, key_head: int, value_block: int, value_slot: int, value_head: int, table_row: int,
    scale: float, unified: float, safe: float,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, UNIFIED: tl.constexpr, SPLIT: tl.constexpr,
) -> None:
    """Compute every num_programs(2)-th split of one sequence and KV head. `splits` is the room in `bases`."""
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(starts + sequence).to(tl.int64)
    length = tl.load(lengths + sequence)
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    count = tl.cdiv(length - first, SPLIT)
    if tl.load(starts + sequence + 1) - row != 1 or tl.program_id(2) >= count:
        return
    member = tl.arange(0, ROWS)
    columns, value_columns = tl.arange(0, WIDTH)[None, :], tl.arange(0, VALUE_WIDTH)[None, :]
    ours, heads = member < GROUP, kv_head * GROUP + member
    source = query + row * query_row + heads[:, None] * query_head + columns
    q = tl.load(source, mask=ours[:, None] & (columns < DIM), other=0.0)
    last = tl.zeros([ROWS], tl.int32) + length
    none, nothing = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    empty = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    k, v, table = keys + kv_head * key_head, values + kv_head * value_head, tables + sequence * table_row
    for split in range(tl.program_id(2), count, tl.num_programs(2)):
        begin = first + split * SPLIT
        end = tl.minimum(begin + SPLIT, length)
        peak, total, result = attend(
            q, last, begin, end, k, v, table, block_size, key_block, key_slot, value_block, value_slot, none, nothing,
            empty, scale, unified, DIM, VALUE_DIM, WIDTH, VALUE_WIDTH, TILE, 0, False, UNIFIED,
        )
        if UNIFIED:
            # Rows outside the safe range take the running maximum; the others keep the constant.
            far = ours & (peak > float("-inf")) & (tl.abs(peak - unified) > safe)
            base = tl.where(peak == float("-inf"), peak, unified)
            if tl.max(far.to(tl.int32), axis=0) > 0:
                peak, exact_total, exact_result = attend(
                    q, last, begin, end, k, v, table, block_size, key_block, key_slot, value_block, value_slot, none,
                    nothing, empty, scale, unified, DIM, VALUE_DIM, WIDTH, VALUE_WIDTH, TILE, 0, False, False,
                )
                base = tl.where(far, peak, base)
                total = tl.where(far, exact_total, total)
                result = tl.where(far[:, None], exact_result, result)
            peak = base
        place = (sequence * tl.num_programs(1) * GROUP + heads) * splits + split
        tl.store(bases + place, peak, mask=ours)
        tl.store(sums + place, total, mask=ours)
        wanted = ours[:, None] & (value_columns < VALUE_DIM)
        tl.store(parts + place[:, None] * VALUE_DIM + value_columns, result, mask=wanted)


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    bases: tl.tensor, sums: tl.tensor, parts: tl.tensor, starts: tl.tensor, lengths: tl.tensor, out: tl.tensor,
    splits: int, out_row: int,
    DIM: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, CHUNK: tl.constexpr,
) -> None:
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(starts + sequence).to(tl.int64)
    if tl.load(starts + sequence + 1) - row != 1:
        return
    length = tl.load(lengths + sequence)
    count = tl.cdiv(tl.minimum(length, WINDOW) if WINDOW > 0 else length, SPLIT)
    place = (sequence * tl.num_programs(1) + head) * splits
    columns, lanes = tl.arange(0, WIDTH), tl.arange(0, CHUNK)
    highest, totals = tl.full([CHUNK], float("-inf"), tl.float32), tl.zeros([CHUNK], tl.float32)
    for begin in range(0, count, CHUNK):
        base = tl.load(bases + place + begin + lanes, mask=begin + lanes < count, other=float("-inf"))
        highest = tl.maximum(highest, base)
    top = tl.max(highest, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)
    result = tl.zeros([CHUNK, WIDTH], tl.float32)
    for begin in range(0, count, CHUNK):
        at, there = place + begin + lanes, begin + lanes < count
        weights = tl.exp2(tl.load(bases + at, mask=there, other=float("-inf")) - top)
        totals += weights * tl.load(sums + at, mask=there, other=0.0)
        shown = there[:, None] & (columns < DIM)[None, :]
        result += weights[:, None] * tl.load(parts + at[:, None] * DIM + columns[None, :], mask=shown, other=0.0)
    total = tl.sum(totals, axis=0)
    # A sequence without keys is padding and gets zeros.
    final = tl.sum(result, axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * out_row + head * DIM + columns, final.to(out.dtype.element_ty), mask=columns < DIM)


def decode_attention(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, starts: Tensor, lengths: Tensor, out: Tensor,
    pieces: Pieces, tiles: Tiles, *, programs: int, scale: float, window: int | None, unified: float | None = None,
    safe_range: float = SAFE_RANGE, split: int = SPLIT_TOKENS,
) -> None:
    """Attend for sequences with one new token. Other rows of `out` are not changed.

    query [N, heads, head_dim], keys [blocks, block_size, kv_heads, head_dim], values [.., value_dim], tables int32
    [B, W], starts int32 [B + 1], lengths int32 [B], out [N, heads * value_dim]. Contexts are cut into splits of `split`
    tokens, a multiple of `tiles.keys`; `pieces` has room for those of the longest one. `programs` share the splits of
    each sequence and KV head, which does not change results. `unified` replaces every row's maximum, in units of scaled
    scores. A row with its best score further than `safe_range` (in powers of two) from it uses the running maximum.
    """
    sequences, (heads, head_dim) = len(lengths), query.shape[1:]
    kv_heads, value_dim = keys.shape[2], values.shape[3]
    room = pieces.bases.shape[2]
    split_kernel[(sequences, kv_heads, programs)](
        query, keys, values, tables, starts, lengths, *pieces, room, keys.shape[1], *query.stride()[:2],
        *keys.stride()[:3], *values.stride()[:3], tables.stride(0), scale * LOG2E, (unified or 0.0) * LOG2E, safe_range,
        GROUP=heads // kv_heads, DIM=head_dim, VALUE_DIM=value_dim, WIDTH=max(16, triton.next_power_of_2(head_dim)),
        VALUE_WIDTH=max(16, triton.next_power_of_2(value_dim)), ROWS=tiles.rows, TILE=tiles.keys, WINDOW=window or 0,
        UNIFIED=unified is not None, SPLIT=split, num_warps=tiles.warps, num_stages=tiles.stages,
    )
    combine_kernel[(sequences, heads)](
        *pieces, starts, lengths, out, room, out.stride(0), DIM=value_dim, WIDTH=triton.next_power_of_2(value_dim),
        WINDOW=window or 0, SPLIT=split, CHUNK=COMBINED, num_warps=4,
    )


@triton.jit
def prefill_kernel(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, tables: tl.tensor, starts: tl.tensor, lengths: tl.tensor,
    out: tl.tensor, block_size: int, query_row: int, query_head: int, key_block: int, key_slot: int, key_head: int,
    value_block: int, value_slot: int, value_head: int, table_row: int, out_row: int, scale: float,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, STEADY: tl.constexpr,
) -> None:
    kv_head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.load(starts + sequence).to(tl.int64)
    tokens = (tl.load(starts + sequence + 1) - row).to(tl.int32)
    # The last tiles see the most keys. They go first, so that no long tile starts when the others are done.
    index = tl.cdiv(tokens * GROUP, ROWS) - 1 - tl.program_id(0)
    if tokens == 1 or index < 0:
        return
    length = tl.load(lengths + sequence)
    flat = index * ROWS + tl.arange(0, ROWS)
    token, head = flat // GROUP, kv_head * GROUP + flat % GROUP
    last = length - tokens + token
    lowest = length - tokens + index * ROWS // GROUP
    end = tl.minimum(length, length - tokens + (index * ROWS + ROWS - 1) // GROUP + 1)
    begin = 0
    whole = (lowest + 1) // TILE * TILE
    if WINDOW > 0:
        begin = tl.maximum(lowest - WINDOW + 1, 0) // TILE * TILE
        whole = begin
    if STEADY:
        whole = begin

    ours = (token < tokens)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    source = query + (row + token)[:, None] * query_row + head[:, None] * query_head + columns
    q = tl.load(source, mask=ours & (columns < DIM), other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    k, v, table = keys + kv_head * key_head, values + kv_head * value_head, tables + sequence * table_row
    if WINDOW == 0 and not STEADY:
        peak, total, result = attend(
            q, last, begin, whole, k, v, table, block_size, key_block, key_slot, value_block, value_slot, peak, total,
            result, scale, 0.0, DIM, VALUE_DIM, WIDTH, VALUE_WIDTH, TILE, WINDOW, True, False,
        )
    peak, total, result = attend(
        q, last, whole, end, k, v, table, block_size, key_block, key_slot, value_block, value_slot, peak, total, result,
        scale, 0.0, DIM, VALUE_DIM, WIDTH, VALUE_WIDTH, TILE, WINDOW, False, False,
    )
    result = result / total[:, None]
    value_columns = tl.arange(0, VALUE_WIDTH)[None, :]
    place = out + (row + token)[:, None] * out_row + head[:, None] * VALUE_DIM + value_columns
    tl.store(place, result.to(out.dtype.element_ty), mask=ours & (value_columns < VALUE_DIM))


def prefill_attention(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, starts: Tensor, lengths: Tensor, out: Tensor,
    tiles: Tiles, *, longest_query: int, scale: float, window: int | None, steady: bool = False,
) -> None:
    """Attend for sequences with 2 to `longest_query` new tokens. Other rows are not changed.

    Shapes are those of `decode_attention`. `steady` masks all keys, because a row's place in its tile otherwise selects
    the loop. Loops with and without masks may round differently: only one may fuse a product with a difference.
    """
    heads, head_dim = query.shape[1:]
    kv_heads, value_dim = keys.shape[2], values.shape[3]
    group = heads // kv_heads
    prefill_kernel[(triton.cdiv(longest_query * group, tiles.rows), kv_heads, len(lengths))](
        query, keys, values, tables, starts, lengths, out, keys.shape[1], *query.stride()[:2], *keys.stride()[:3],
        *values.stride()[:3], tables.stride(0), out.stride(0), scale * LOG2E,
        GROUP=group, DIM=head_dim, VALUE_DIM=value_dim, WIDTH=max(16, triton.next_power_of_2(head_dim)),
        VALUE_WIDTH=max(16, triton.next_power_of_2(value_dim)), ROWS=tiles.rows, TILE=tiles.keys, WINDOW=window or 0,
        STEADY=steady, num_warps=tiles.warps, num_stages=tiles.stages,
    )
