"""The KV of all heads where each rank has a cache of its own: one `KVCache` to those who hand over.

    gather     rank caches --index_select--> one temporary for each rank, on its device --strided copy--> wire
    scatter    wire --strided copy--> one temporary for each rank, on its device --index_copy--> rank caches

On GPUs the copies run on the GPU of the rank, issued from this process. Never run on one: see `memory`.
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
    """What one of `size` ranks has of a cache. Raises ConfigError if they cannot hold its heads."""
    return replace(layout, kv_heads=Heads(layout.kv_heads, size).per_rank)


class ShardedCache(KVCache):
    """All heads of `layout`, of which each of `ranks` holds its own (`heads`); `device` is that of rank 0.

    Its own tensors have a shape and a type and lie nowhere (device "meta"): a model computes with the caches of its
    ranks. Raises ValueError if those do not fit the layout.
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
        """As of `KVCache`. What rank 0's stream was given until now waits for the other ranks where it needs them, so
        what they have written for it is written when it comes here; reads on their devices then wait for it as well.
        """
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return _Mark(event, tuple(dict.fromkeys(cache.device for cache in self.ranks)))

    def settle(self) -> None:
        """As of `KVCache`, on the devices of all ranks."""
        for cache in self.ranks:
            cache.settle()

    def gather(self, layers: range, blocks: Sequence[int], begin: int, end: int, out: Tensor) -> None:
        """As of `KVCache`; each layer of a head comes from one rank."""
        for cache, part, piece in self._pieces_of(self._reads, layers, end - begin, out):
            if piece.device == cache.device and piece.is_contiguous():
                cache.gather(part, blocks, begin, end, _bytes(piece))
                continue
            own = torch.empty(piece.shape, dtype=piece.dtype, device=cache.device)
            cache.gather(part, blocks, begin, end, _bytes(own))
            piece.copy_(own)

    def scatter(self, layers: range, blocks: Sequence[int], begin: int, end: int, data: Tensor) -> None:
        """The inverse of `gather`; each head goes to all ranks that hold it."""
        for cache, part, piece in self._pieces_of(self._writes, layers, end - begin, data):
            cache.scatter(part, blocks, begin, end, _bytes(piece.to(cache.device).contiguous()))

    def _pieces_of(
        self, plan: Plan, layers: range, tokens: int, data: Tensor
    ) -> Iterator[tuple[KVCache, range, Tensor]]:
        """Of each rank that has to do with `layers`: its cache, its share of them, and the place of that in `data`."""
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
    """A point of one device's stream, for which the streams of all `devices` wait."""

    event: torch.cuda.Event
    devices: tuple[torch.device, ...]

    def wait(self) -> None:
        for device in self.devices:
            torch.cuda.current_stream(device).wait_event(self.event)


def _bytes(piece: Tensor) -> Tensor:
    """A contiguous tensor as the wire has it: uint8 [nbytes]."""
    return piece.view(torch.uint8).view(-1)
