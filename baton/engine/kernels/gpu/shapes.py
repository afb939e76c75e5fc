"""Decisions of attention kernels and graphs from shapes alone, without tensors, triton or a device."""

from __future__ import annotations

from typing import NamedTuple

WAVES = 2  # target programs per processor, so that one computes while another waits for memory
SPLIT_TOKENS = 256  # a smaller split costs more to combine than it saves
MAX_SPLITS = 64
FINE_BUCKETS = (1, 2, 4)
BUCKET_STEP, WIDE_BUCKET, WIDE_STEP = 8, 256, 32
WIDEST_HEAD = 256  # beyond it, tiles of keys and values do not fit together


class Tiles(NamedTuple):
    """Query rows (tokens x heads of one group) and keys that one program holds at a time."""

    rows: int
    keys: int
    warps: int
    stages: int


def split_count(pairs: int, longest: int, processors: int) -> int:
    """Return the number of splits of each context, a power of two. It fills the device's `processors` without splits
    below SPLIT_TOKENS. `pairs` is sequences x KV heads, the parallelism without splits; `longest` is the longest
    context in tokens.
    """
    wanted = -(-processors * WAVES // max(pairs, 1))
    room = max(longest // SPLIT_TOKENS, 1)
    return min(_power_of_two(wanted), 1 << (room.bit_length() - 1), MAX_SPLITS)


def prefill_tiles(head_dim: int, value_dim: int, element_bytes: int) -> Tiles:
    """Return the tiles of prompt chunks, as large as the shared memory of small GPUs (99 KB) allows."""
    wide = max(head_dim, value_dim)
    if element_bytes > 2:  # without tensor cores, products hold their factors in registers
        return Tiles(32, 32, 8, 1) if wide <= 128 else Tiles(16, 16, 8, 1)
    if wide > 128:
        return Tiles(64, 32, 8, 1)
    return Tiles(128, 64, 8, 3 if wide <= 64 else 2)


def decode_tiles(group: int, head_dim: int, value_dim: int, element_bytes: int) -> Tiles:
    """Return the tiles of decoding: all heads of a group, and at least the 16 rows of a tensor core."""
    rows = max(16, _power_of_two(group))
    if element_bytes > 2:
        return Tiles(rows, 16, 8, 1)
    if max(head_dim, value_dim) > 128:
        return Tiles(rows, 32, 4, 2)
    return Tiles(rows, 64, 4, 3)


def buckets(most: int) -> list[int]:
    """Return the batch sizes of captured graphs: dense for small batches, and up to `most` inclusive."""
    sizes = {*FINE_BUCKETS, *range(BUCKET_STEP, WIDE_BUCKET, BUCKET_STEP), *range(WIDE_BUCKET, most, WIDE_STEP)}
    return sorted({size for size in sizes if size < most} | {most})


def bucket_for(rows: int, sizes: list[int]) -> int | None:
    """Return the smallest of the sorted `sizes` that holds `rows`, or None if all are too small."""
    return next((size for size in sizes if size >= rows), None)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1
