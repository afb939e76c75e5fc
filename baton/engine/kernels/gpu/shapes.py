"""Decisions of attention kernels and graphs from shapes alone, without tensors, triton or a device."""

from __future__ import annotations

from typing import NamedTuple

SPLIT_TOKENS = 1024  # constant, because the bits of a row must not depend on its batch; a multiple of all key tiles
PROGRAMS = 64  # at most so many per processor, because most of a graph's have no split and cost their launch
FEWEST_PROGRAMS = 4  # per sequence and KV head, so that a long context in a large batch is no single program
FINE_BUCKETS = (1, 2, 4)
BUCKET_STEP, WIDE_BUCKET, WIDE_STEP = 8, 256, 32
WIDEST_HEAD = 256  # beyond it, tiles of keys and values do not fit together; such models are rejected


class Tiles(NamedTuple):
    """Query rows (tokens x heads of one group) and keys that one program holds at a time."""

    rows: int
    keys: int
    warps: int
    stages: int


def split_count(longest: int) -> int:
    """Return the number of splits of a context of `longest` tokens, which needs no more memory than that."""
    return max(1, -(-longest // SPLIT_TOKENS))


def split_programs(pairs: int, splits: int, processors: int) -> int:
    """Return how many programs share the splits of each context: one for each split if the device's `processors` can
    start so many quickly. `pairs` is sequences x KV heads.
    """
    return min(splits, max(processors * PROGRAMS // pairs, FEWEST_PROGRAMS))


def prefill_tiles(head_dim: int, value_dim: int, element_bytes: int, generation: int = 9) -> Tiles:
    """Return the tiles of prompt chunks, as large as the shared memory of small GPUs (99 KB) allows, for a GPU of this
    major compute capability.
    """
    wide = max(head_dim, value_dim)
    if element_bytes > 2:  # without tensor cores, products hold their factors in registers
        return Tiles(32, 32, 8, 1) if wide <= 128 else Tiles(16, 16, 8, 1)
    if wide > 128:
        return Tiles(64, 32, 8, 1)
    if generation == 12 and wide > 64:  # wider tiles spill registers there
        return Tiles(128, 32, 8, 3)
    return Tiles(128, 64, 8, 3 if wide <= 64 else 2)


def decode_tiles(group: int, head_dim: int, value_dim: int, element_bytes: int) -> Tiles:
    """Return the tiles of decoding: all heads of a group, and at least the 16 rows of a tensor core."""
    rows = max(16, 1 << (group - 1).bit_length())
    if element_bytes > 2:
        return Tiles(rows, 16, 8, 1)
    if max(head_dim, value_dim) > 128:
        return Tiles(rows, 32, 4, 2)
    return Tiles(rows, 64, 4, 3)


def expert_tiles(rows: int, experts: int) -> int:
    """Return the rows of a tile in products of experts: few where an expert has few of the `rows`, as in decoding."""
    return 64 if rows >= 32 * experts else 16


def buckets(most: int) -> list[int]:
    """Return the batch sizes of captured graphs: dense for small batches, and up to `most` inclusive."""
    sizes = {*FINE_BUCKETS, *range(BUCKET_STEP, WIDE_BUCKET, BUCKET_STEP), *range(WIDE_BUCKET, most, WIDE_STEP)}
    return sorted({size for size in sizes if size < most} | {most})


def bucket_for(rows: int, sizes: list[int]) -> int | None:
    """Return the smallest of the sorted `sizes` that holds `rows`, or None if all are too small."""
    return next((size for size in sizes if size >= rows), None)
