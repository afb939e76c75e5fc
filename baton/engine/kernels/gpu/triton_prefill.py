"""Causal attention of prompt chunks over their paged prefix and themselves, for any mix of lengths in one launch.

A tile holds consecutive (token, head) pairs of one sequence and KV head, ordered by token. Groups of any size fill it,
and each key is read once per group. Keys that all rows see need no mask; those on the diagonal do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.gpu.shapes import Tiles
from baton.engine.kernels.gpu.triton_decode import LOG2E, attend


# fmt: off
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
