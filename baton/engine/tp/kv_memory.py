"""The memory of a worker's KV, and access to all of it from rank 0, which alone makes handoffs.

On a CPU, one memory file has all heads, and each rank has a strided view of its own. If ranks share a KV head, there is
a file with all heads for each of them, because two ranks must not write to one place. Other processes of the host can
read the first file like the cache of a worker without ranks.

On GPUs, each rank has a cache, and rank 0 opens those of the others by CUDA IPC on their devices (`ShardedCache`). A
rank frees its memory there only after rank 0 has closed it, which precedes each CACHE or END message. Never run on
GPUs, for lack of two. The order is tested with simulated devices (docs/how-to/gpu.md has the commands).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from baton.core import KVLayout
from baton.engine.kernels.cpu.ops import CompiledBlockCopy
from baton.engine.kernels.gpu.cuda_memory import HANDLE_BYTES, CudaDevice, Device
from baton.engine.kv_cache import DTYPES, KVCache, Mark, tensors_in
from baton.engine.memory.exposed import ExposedMemory, Shape, check_platform
from baton.engine.tp.group import Ranks, TpLayout
from baton.engine.tp.sharding import Heads, Rectangle, common, read_plan

GpuOf = Callable[[int], Device]  # the device of a rank, as this process uses it


class KVMemory(Protocol):
    """One rank's end of the memory, used by one thread."""

    def prepare(self, *, exposed: bool) -> None:
        """Free the previous cache, which must be unused. Rank 0 calls it before it sends CACHE. Other processes of the
        host can read the next cache if it is `exposed`. Raises ConfigError if the system cannot.
        """

    def make(self, total_blocks: int) -> tuple[KVCache, KVCache]:
        """Return the engine's cache and this rank's, both finite. All ranks call it after CACHE. Raises RankLost."""

    def close(self) -> None:
        """Free the cache: on rank 0 before it sends END, on the others after they receive it."""


def kv_memory(
    plan: TpLayout,
    ranks: Ranks,
    layout: KVLayout,
    gpu_of: GpuOf | None = None,
    copy: CompiledBlockCopy | None = None,
) -> KVMemory:
    """Return a rank's memory for the `layout` of the whole model. Raises ConfigError if a GPU cannot share memory."""
    if gpu_of is None and plan.device_of(0, 0).type == "cpu":
        return HostMemory(plan, ranks, layout, copy)
    return GpuMemory(plan, ranks, layout, gpu_of or (lambda rank: CudaDevice(plan.device_of(rank, ranks.rank))))


class HostMemory:
    """Implementation of `KVMemory` on a CPU: memory files of rank 0, one of which each rank maps. `copy` is for the
    engine's cache.
    """

    def __init__(self, plan: TpLayout, ranks: Ranks, layout: KVLayout, copy: CompiledBlockCopy | None = None) -> None:
        self._parent, self._ranks, self._layout, self._copy = plan.parent, ranks, layout, copy
        self._heads, self._exposed = Heads(layout.kv_heads, plan.size), False

    def prepare(self, *, exposed: bool) -> None:
        if exposed:
            check_platform()
        self._exposed = exposed

    def make(self, total_blocks: int) -> tuple[KVCache, KVCache]:
        """See `KVMemory`. Raises ConfigError without enough memory."""
        heads, layout = self._heads, self._layout
        copies, exposed = self._shared(Shape(total_blocks, total_blocks * layout.block_bytes))
        held = heads.held(self._ranks.rank)
        views = [tensor.narrow(3, held.start, len(held)) for tensor in tensors_in(copies[0], layout, total_blocks)]
        own = KVCache(rank_layout(layout, heads.size), total_blocks, storage=views)
        if self._ranks.rank:
            return own, own
        caches = [
            KVCache(layout, total_blocks, storage=tensors_in(kv, layout, total_blocks), copy=self._copy, exposed=first)
            for kv, first in zip_longest(copies, [exposed])
        ]
        return (CopiedCache(caches) if len(caches) > 1 else caches[0]), own

    def _shared(self, shape: Shape) -> tuple[list[Tensor], ExposedMemory | None]:
        """Return the copy of this rank, and on rank 0 all others: uint8 [shape.kv_bytes] each. Also return the first
        one's memory if other processes can read it.
        """
        replicas, rank = self._heads.replicas, self._ranks.rank
        numbers = struct.Struct(f"<{replicas}q")
        self._ranks.gather(b"\0")  # all have freed the previous cache
        if rank:
            number = numbers.unpack(self._ranks.gather(bytes(numbers.size))[0])[rank % replicas]
            kv = _mapped(Path(f"/proc/{self._parent}/fd/{number}"), shape)
            self._ranks.gather(b"\0")
            return [kv], None
        memories = [ExposedMemory(shape, sealed=False) for _ in range(replicas)]
        self._ranks.gather(numbers.pack(*(memory.file for memory in memories)))
        self._ranks.gather(b"\0")  # all have mapped them, which sealed memory does not permit
        if self._exposed:
            memories[0].seal()
        return [memory.kv for memory in memories], memories[0] if self._exposed else None

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

    def prepare(self, *, exposed: bool) -> None:
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


def _mapped(path: Path, shape: Shape) -> Tensor:
    """Return the KV in a memory file of rank 0: uint8 [shape.kv_bytes]. It stays mapped while it is used."""
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), shape.nbytes), dtype=torch.uint8)[shape.kv_at :]


class CopiedCache(KVCache):
    """A cache in several equal `copies`. Reads use the first one, and each write goes to all of them."""

    def __init__(self, copies: Sequence[KVCache]) -> None:
        first = copies[0]
        super().__init__(
            first.layout, first.total_blocks, storage=first.tensors, copy=first._copy, exposed=first.exposed
        )
        self.copies = tuple(copies)

    def scatter(self, layers: range, blocks: Sequence[int], begin: int, end: int, data: Tensor) -> None:
        for cache in self.copies:
            cache.scatter(layers, blocks, begin, end, data)

    def copy_from(
        self, source: KVCache, layers: range, theirs: Sequence[int], ours: Sequence[int], begin: int, end: int
    ) -> None:
        for cache in self.copies:
            cache.copy_from(source, layers, theirs, ours, begin, end)


class ShardedCache(KVCache):
    """A cache of all heads of `layout` over the caches of `ranks`; `device` is that of rank 0. Its own tensors are on
    device "meta", because models compute with `ranks`.
    """

    def __init__(self, layout: KVLayout, ranks: Sequence[KVCache]) -> None:
        size, blocks = len(ranks), ranks[0].total_blocks
        own = rank_layout(layout, size)
        if wrong := [rank for rank, cache in enumerate(ranks) if (cache.layout, cache.total_blocks) != (own, blocks)]:
            raise ValueError(f"the caches of ranks {wrong} are not {blocks} blocks of {own}")
        shape = (layout.layers, blocks, layout.block_size, layout.kv_heads, layout.head_width)
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

    def copy_from(
        self, source: KVCache, layers: range, theirs: Sequence[int], ours: Sequence[int], begin: int, end: int
    ) -> None:
        """See `KVCache`. Each rank that holds a head gets each layer of it from one rank of `source`."""
        givers = source.ranks if isinstance(source, ShardedCache) else (source,)
        there, here = (Heads(self.layout.kv_heads, size) for size in (len(givers), len(self.ranks)))
        for rank, cache in enumerate(self.ranks):
            for giver, rows, heads in read_plan(there, here, rank, self.layout.layers):
                own, theirs_ = _narrow(cache, heads, here.held(rank)), _narrow(givers[giver], heads, there.held(giver))
                if part := common(rows, layers):
                    own.copy_from(theirs_, part, theirs, ours, begin, end)

    def _pieces_of(
        self, plan: list[Rectangle], layers: range, tokens: int, data: Tensor
    ) -> Iterator[tuple[KVCache, range, Tensor]]:
        """Yield the cache of each rank involved in `layers`, its part of them, and the view of that part in `data`."""
        if layers and not 0 <= layers.start < layers.stop <= self.layout.layers:
            last = self.layout.layers - 1
            raise IndexError(f"layer out of range 0..{last}: {layers.start}..{layers.stop - 1}")
        wire = self._pieces(layers, tokens, data)
        for rank, all_layers, heads in plan:
            if part := common(all_layers, layers):
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


def _narrow(cache: KVCache, heads: range, held: range) -> KVCache:
    """Return a view of some heads of a cache with the heads `held` of the model."""
    views = [tensor.narrow(3, heads.start - held.start, len(heads)) for tensor in cache.tensors]
    return KVCache(replace(cache.layout, kv_heads=len(heads)), cache.total_blocks, cache.device, storage=views)


def _bytes(piece: Tensor) -> Tensor:
    """Return a contiguous tensor in wire format: uint8 [nbytes]."""
    return piece.view(torch.uint8).view(-1)
