"""The memory of a worker's KV, and access to all of it from rank 0, which alone makes handoffs.

On a CPU, one shared memory has all heads, and each rank has a strided view of its own. If ranks share a KV head, that
memory has a cache for each rank instead, because two ranks must not write to one place. On GPUs, each rank has a cache,
and rank 0 opens those of the others by CUDA IPC on their devices (`ShardedCache`). There a rank frees its memory only
after rank 0 has closed it, which precedes each CACHE or END message.

Never run on GPUs, for lack of two. The order is tested with simulated devices (docs/how-to/gpu.md has the commands).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from baton.core import KVLayout
from baton.engine.kernels.gpu.cuda_memory import HANDLE_BYTES, CudaDevice, Device
from baton.engine.kv_cache import DTYPES, KVCache, Mark, tensors_in
from baton.engine.tp.group import Ranks, TpLayout
from baton.engine.tp.sharding import Heads, Rectangle, read_plan

GpuOf = Callable[[int], Device]  # the device of a rank, as this process uses it


class KVMemory(Protocol):
    """One rank's end of the memory, used by one thread."""

    def prepare(self, total_blocks: int) -> None:
        """Free the previous cache, which must be unused, and reserve memory. Rank 0 calls it before it sends CACHE."""

    def make(self, total_blocks: int) -> tuple[KVCache, KVCache]:
        """Return the engine's cache and this rank's, both finite. All ranks call it after CACHE. Raises RankLost."""

    def close(self) -> None:
        """Free the cache: on rank 0 before it sends END, on the others after they receive it."""


def kv_memory(plan: TpLayout, ranks: Ranks, layout: KVLayout, gpu_of: GpuOf | None = None) -> KVMemory:
    """Return a rank's memory for the `layout` of the whole model. Raises ConfigError if a GPU cannot share memory."""
    if plan.kv >= 0:
        return HostMemory(plan, ranks.rank, layout)
    return GpuMemory(plan, ranks, layout, gpu_of or (lambda rank: CudaDevice(plan.device_of(rank, ranks.rank))))


class HostMemory:
    """Implementation of `KVMemory` on a CPU: the file `plan.kv`, as large as the largest cache so far."""

    def __init__(self, plan: TpLayout, rank: int, layout: KVLayout) -> None:
        self._file, self._layout, self._own = plan.kv, layout, rank_layout(layout, plan.size)
        self._rank, self._heads = rank, Heads(layout.kv_heads, plan.size)
        self._block_bytes = self._own.block_bytes * plan.size

    def prepare(self, total_blocks: int) -> None:
        nbytes = total_blocks * self._block_bytes
        if os.fstat(self._file).st_size < nbytes:
            os.ftruncate(self._file, nbytes)

    def make(self, total_blocks: int) -> tuple[KVCache, KVCache]:
        mapped = mmap.mmap(self._file, total_blocks * self._block_bytes)
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        if self._heads.replicas > 1:
            parts = [tensors_in(part, self._own, total_blocks) for part in memory.chunk(self._heads.size)]
            ranks = [KVCache(self._own, total_blocks, storage=part) for part in parts]
            return ShardedCache(self._layout, ranks), ranks[self._rank]
        tensors, held = tensors_in(memory, self._layout, total_blocks), self._heads.held(self._rank)
        views = [tensor.narrow(3, held.start, len(held)) for tensor in tensors]
        whole = KVCache(self._layout, total_blocks, storage=tensors)
        return whole, KVCache(self._own, total_blocks, storage=views)

    def close(self) -> None:
        """Do nothing, because the memory is freed with its tensors."""


class GpuMemory:
    """Implementation of `KVMemory` on GPUs."""

    def __init__(self, plan: TpLayout, ranks: Ranks, layout: KVLayout, gpu_of: GpuOf) -> None:
        self._ranks, self._layout, self._own = ranks, layout, rank_layout(layout, plan.size)
        self._devices = [plan.device_of(rank, ranks.rank) for rank in range(plan.size)]
        reached = range(1, plan.size) if ranks.rank == 0 else (ranks.rank,)
        self._gpus = {rank: gpu_of(rank) for rank in reached}
        self._held = ExitStack()

    def prepare(self, total_blocks: int) -> None:
        self.close()

    def make(self, total_blocks: int) -> tuple[KVCache, KVCache]:
        """See `KVMemory`. If it fails, the ranks are out of step and must end without freeing memory."""
        return self._all(total_blocks) if self._ranks.rank == 0 else self._one(total_blocks)

    def close(self) -> None:
        self._held.close()

    def _all(self, total_blocks: int) -> tuple[KVCache, KVCache]:
        own = KVCache(self._own, total_blocks, self._devices[0])  # no other process opens it
        handles = self._ranks.gather(bytes(HANDLE_BYTES))
        with ExitStack() as undo:
            caches = [own]
            for rank, gpu in self._gpus.items():
                address = gpu.open(handles[rank])
                undo.callback(gpu.close, address)
                caches.append(self._cache(rank, address, total_blocks))
            whole = ShardedCache(self._layout, caches)
            self._held = undo.pop_all()
        return whole, own

    def _one(self, total_blocks: int) -> tuple[KVCache, KVCache]:
        self.close()  # frees the previous cache, which rank 0 closed before it sent CACHE
        rank = self._ranks.rank
        gpu = self._gpus[rank]
        address = gpu.allocate(total_blocks * self._own.block_bytes)
        self._held.callback(gpu.free, address)
        own = self._cache(rank, address, total_blocks)
        for tensor in own.tensors:
            tensor.zero_()
        own.settle()  # rank 0 may write as soon as it has the handle
        self._ranks.gather(gpu.handle(address))
        return own, own

    def _cache(self, rank: int, address: int, total_blocks: int) -> KVCache:
        memory = self._gpus[rank].tensor(address, total_blocks * self._own.block_bytes)
        storage = tensors_in(memory, self._own, total_blocks)
        return KVCache(self._own, total_blocks, self._devices[rank], storage=storage)


def rank_layout(layout: KVLayout, size: int) -> KVLayout:
    """Return the layout of one of `size` ranks. Raises ConfigError if they cannot hold the heads."""
    return replace(layout, kv_heads=Heads(layout.kv_heads, size).per_rank)


class ShardedCache(KVCache):
    """A cache of all heads of `layout` over the caches of `ranks`; `device` is that of rank 0. Its own tensors are on
    device "meta", because models compute with `ranks`.
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
        heads = Heads(layout.kv_heads, size)
        self._reads = read_plan(heads, Heads(layout.kv_heads, 1), 0, layout.layers)
        self._writes = [Rectangle(rank, range(layout.layers), heads.held(rank)) for rank in range(size)]

    def mark(self) -> Mark | None:
        """See `KVCache`. Rank 0's stream waits for the other ranks, so their writes precede a mark on it."""
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return _Mark(event, tuple(dict.fromkeys(cache.device for cache in self.ranks)))

    def settle(self) -> None:
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
        self, plan: list[Rectangle], layers: range, tokens: int, data: Tensor
    ) -> Iterator[tuple[KVCache, range, Tensor]]:
        """Yield the cache of each rank involved in `layers`, its part of them, and the view of that part in `data`."""
        if layers and not 0 <= layers.start < layers.stop <= self.layout.layers:
            last = self.layout.layers - 1
            raise IndexError(f"layer out of range 0..{last}: {layers.start}..{layers.stop - 1}")
        wire = self._pieces(layers, tokens, data)
        for rank, all_layers, heads in plan:
            if part := range(max(all_layers.start, layers.start), min(all_layers.stop, layers.stop)):
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

    def synchronize(self) -> None:
        self.event.synchronize()


def _bytes(piece: Tensor) -> Tensor:
    """Return a contiguous tensor in wire format: uint8 [nbytes]."""
    return piece.view(torch.uint8).view(-1)
