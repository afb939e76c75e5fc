"""The inner loop of both attention kernels: one tile of query rows against a range of paged keys.

Scores are in units of log 2 (`scale` includes log2(e)), because the hardware has exp2.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
