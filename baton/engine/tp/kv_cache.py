"""The KV of all heads over one cache per rank, as one `KVCache` for handoffs.

    gather     rank caches --index_select--> one temporary for each rank, on its device --strided copy--> wire
    scatter    wire --strided copy--> one temporary for each rank, on its device --index_copy--> rank caches

On GPUs this process issues the copies, and they run on the GPU of the rank. Never run on GPUs: see `kv_memory`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from baton.engine.kv_cache import DTYPES, KVCache
from baton.engine.tp.sharding import Heads, overlap, rectangles

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from baton.core import KVLayout
    from baton.engine.kv_cache import Mark

    Plan = tuple[tuple[int, range, range], ...]  # rank, layers, heads


def rank_layout(layout: KVLayout, size: int) -> KVLayout:
    """Return the layout of one of `size` ranks. Raises ConfigError if they cannot hold the heads."""
    return replace(layout, kv_heads=Heads(layout.kv_heads, size).per_rank)


class ShardedCache(KVCache):
    """A cache of all heads of `layout` over the caches of `ranks`; `device` is that of rank 0.

    Its own tensors are on device "meta": models compute with `ranks`. Raises ValueError if those do not fit `layout`.
    """

    def __init__(self, layout: KVLayout, ranks: Sequence[KVCache]) -> None:
        size, blocks = len(ranks), ranks[0].total_blocks
        own = rank_layout(layout, size)
        if wrong := [rank for rank, cache in enumerate(ranks) if (cache.layout, cache.total_blocks) != (own, blocks)]:
            raise ValueError(f"the caches of ranks {wrong} are not {blocks} blocks of {own}")
        shape = (layout.layers, blocks, layout.block_size, layout.kv_heads, layout.head_dim)
        nowhere = [torch.empty(shape, dtype=DTYPES[layout.dtype], device="meta") for _ in layout.tensors]
        super().__init__(layout, blocks, ranks[0].device, storage=nowhere)
        self.ranks = tuple(ranks)
        reads, writes = (rectangles(layout.layers, layout.kv_heads, *sizes) for sizes in ((size, 1), (1, size)))
        self._reads = tuple((each.sender_rank, each.layers, each.heads) for each in reads)
        self._writes = tuple((each.receiver_rank, each.layers, each.heads) for each in writes)

    def mark(self) -> Mark | None:
        """See `KVCache`. Reads on the devices of all ranks wait for the current point of rank 0's stream.

        That suffices, because rank 0's stream waits for the other ranks, so their writes precede this point.
        """
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return _Mark(event, tuple(dict.fromkeys(cache.device for cache in self.ranks)))

    def settle(self) -> None:
        """See `KVCache`, on the devices of all ranks."""
        for cache in self.ranks:
            cache.settle()

    def gather(self, layers: range, blocks: Sequence[int], begin: int, end: int, out: Tensor) -> None:
        """See `KVCache`. Each layer of a head is read from one rank."""
        for cache, part, piece in self._pieces_of(self._reads, layers, end - begin, out):
            if piece.device == cache.device and piece.is_contiguous():
                cache.gather(part, blocks, begin, end, _bytes(piece))
                continue
            own = torch.empty(piece.shape, dtype=piece.dtype, device=cache.device)
            cache.gather(part, blocks, begin, end, _bytes(own))
            piece.copy_(own)

    def scatter(self, layers: range, blocks: Sequence[int], begin: int, end: int, data: Tensor) -> None:
        """See `KVCache`. Each head is written to all ranks that hold it."""
        for cache, part, piece in self._pieces_of(self._writes, layers, end - begin, data):
            cache.scatter(part, blocks, begin, end, _bytes(piece.to(cache.device).contiguous()))

    def _pieces_of(
        self, plan: Plan, layers: range, tokens: int, data: Tensor
    ) -> Iterator[tuple[KVCache, range, Tensor]]:
        """Yield the cache of each rank involved in `layers`, its part of them, and the view of that part in `data`."""
        if layers and not 0 <= layers.start < layers.stop <= self.layout.layers:
            last = self.layout.layers - 1
            raise IndexError(f"layer out of range 0..{last}: {layers.start}..{layers.stop - 1}")
        wire = self._pieces(layers, tokens, data)
        for rank, all_layers, heads in plan:
            if part := overlap(all_layers, layers):
                rows = slice(part.start - layers.start, part.stop - layers.start)
                yield self.ranks[rank], part, wire[rows, :, :, heads.start : heads.stop]


@dataclass(frozen=True, slots=True)
class _Mark:
    """A point of one device's stream that the streams of all `devices` can wait for."""

    event: torch.cuda.Event
    devices: tuple[torch.device, ...]

    def wait(self) -> None:
        for device in self.devices:
            torch.cuda.current_stream(device).wait_event(self.event)


def _bytes(piece: Tensor) -> Tensor:
    """Return a contiguous tensor in wire format: uint8 [nbytes]."""
    return piece.view(torch.uint8).view(-1)
