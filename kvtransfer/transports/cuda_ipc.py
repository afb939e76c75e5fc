"""Device memory between processes of one host: the receiver copies from the sender's KV pool, also of another GPU.

The sender passes the handle of its pool (`ExposedGpuMemory`) over a Unix socket. The receiver opens it and copies
straight into its own blocks, on a stream of its own, so that neither side's compute waits. A copied byte counts only if
it is the announced one, because of this order:

    owner:   raise generation (host) -> launch a kernel that overwrites the block
    sender:  kernels that wrote the KV are done -> announce (`Mark.synchronize` on the host, see `kvtransfer.sender`)
    reader:  compare generations -> copy -> synchronize the stream -> compare generations -> the owner's process lives

If a kernel overwrote the block before the copy ended, the second comparison comes after the raise and sees it. The last
step is needed because the kernel of the host frees a dead owner's GPU memory, maybe before it closes its socket.
Handoffs ran within one GPU and never between two (docs/measurements/gpu.md). Tests use a device in main memory.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from baton.engine.kernels.gpu.cuda_memory import HANDLE_BYTES, CudaDevice, Device, ExposedGpuMemory, Words
from baton.engine.kv_cache import KVCache
from baton.engine.memory.exposed import PROBE_BYTES, MappedMemory, Shape, check_platform
from baton.errors import ConfigError
from kvtransfer.frames import FrameSpec
from kvtransfer.transports import unix_socket
from kvtransfer.transports.base import ChannelName, KeyRelay, Places, Ring, Side, translate_errors
from kvtransfer.transports.host_pool import Passed, PoolEnd, pass_pool, receive_pool
from kvtransfer.transports.unix_socket import Watch, credentials, host_reach

_EXITING = 0x4  # PF_EXITING: set in each thread before the kernel closes the files of its process


class CudaIpcTransport:
    """Transport between KV caches on GPUs of one host. A cache that is not exposed can only receive. Raises ConfigError
    if KV is not on an NVIDIA GPU or cannot be shared. `gpu` is for tests.
    """

    name = "cuda_ipc"
    one_sided = True

    def __init__(self, kv: KVCache, gpu: Device | None = None) -> None:
        check_platform()
        self._exposed = kv.exposed if isinstance(kv.exposed, ExposedGpuMemory) else None
        self._gpu = gpu or CudaDevice(kv.device)
        if not all(tensor.is_contiguous() and tensor.device == kv.device for tensor in kv.tensors):
            raise ConfigError("CUDA IPC needs KV in the memory of one process")
        self._kv = kv
        self.reach, self.sends = host_reach("ipc", "pid"), self._exposed is not None

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> PoolEnd:
        """See `Transport`. It fails for two GPUs without peer access."""
        title, build = f"cuda_ipc channel {name}", self._take if side is Side.RECEIVER else self._give
        return translate_errors(f"{title}: not built", lambda: build(title, keys, deadline_s))

    def _give(self, title: str, keys: KeyRelay, deadline_s: float) -> PoolEnd:
        if (exposed := self._exposed) is None:
            raise ConnectionError("the KV cache here is not exposed")
        with ExitStack() as failing:
            connected = failing.enter_context(unix_socket.connect(keys, deadline_s))
            handle = self._gpu.handle(exposed.address)
            exposed.lend(Watch(connected))
            pass_pool(connected, exposed.shape, self._kv.layout, exposed.file, handle)
            failing.pop_all()
        return PoolEnd(title, connected)

    def _take(self, title: str, keys: KeyRelay, deadline_s: float) -> PoolEnd:
        with ExitStack() as leaving, ExitStack() as failing:
            connected = unix_socket.accept(keys, deadline_s)
            failing.callback(connected.close)  # after the memory, as proof for the sender
            passed = receive_pool(connected, self._kv.layout, leaving, HANDLE_BYTES)
            release = failing.enter_context(ExitStack())
            owner = OwnerProcess(connected)
            release.callback(owner.close)
            address = self._gpu.open(passed.handle)
            release.callback(self._gpu.close, address)
            pool = OpenedPool(self._gpu, self._kv, passed, address, owner)
            failing.pop_all()
        return PoolEnd(title, connected, pool, release.close)


class OwnerProcess:
    """The process of the peer. It must be the one that owns the memory."""

    def __init__(self, connected: socket.socket) -> None:
        self._stat = os.open(f"/proc/{credentials(connected)[0]}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def check(self) -> None:
        """Raise OSError if the process is dead or has begun to end. Else its memory has not been freed so far."""
        fields = os.pread(self._stat, 4096, 0).rpartition(b")")[2].split()
        if int(fields[6]) & _EXITING:
            raise ConnectionError("the peer's process has ended")

    def close(self) -> None:
        os.close(self._stat)


class OpenedPool:
    """The sender's pool in device memory that is open here: a `RemotePool`."""

    def __init__(self, gpu: Device, kv: KVCache, passed: Passed, address: int, owner: OwnerProcess) -> None:
        self.total_blocks, self.block_size = passed.shape.blocks, passed.layout.block_size
        self._kv, self._copies, self._owner = kv, gpu.copies(), owner
        self._generations = MappedMemory(passed.file, Shape(passed.shape.blocks, 0)).generations
        self._address, self._pattern = address, address + passed.shape.kv_bytes
        self._row = kv.layout.row_bytes

    def probe(self, number: int, nbytes: int) -> Tensor:
        """See `RemotePool`."""
        there = torch.empty(nbytes, dtype=torch.uint8, device=self._kv.device)
        self._kv.settle()  # torch may have queued other work on this memory
        source, target = self._pattern + number * PROBE_BYTES, there.data_ptr()
        self._copies.copy(*(np.array([value], dtype=np.uint64) for value in (source, target, nbytes)))
        self._finish()
        return there.cpu()

    def read(self, kv: KVCache, spec: FrameSpec, places: Places, ours: Sequence[int]) -> bool:
        """See `RemotePool`. The first copy of a sequence waits for kernels that may still use its blocks."""
        blocks, expected = places.of(spec, self.block_size)
        if self._generations(blocks) != expected:
            return False
        if places.fresh:
            self._copies.follow()
            places.fresh = False
        try:
            self._copies.copy(*self._runs(kv, spec, blocks, ours))
        finally:
            self._finish()  # also for the copies before one that failed
        return self._generations(blocks) == expected

    def _finish(self) -> None:
        translate_errors("cuda_ipc", self._copies.wait)
        translate_errors("cuda_ipc", self._owner.check)

    def _runs(
        self, kv: KVCache, spec: FrameSpec, theirs: Sequence[int], ours: Sequence[int]
    ) -> tuple[Words, Words, Words]:
        """Return source and target address and bytes of each copy, for positions in blocks `theirs` and `ours`."""
        size = kv.layout.block_size
        inside = ours[spec.begin // size : -(-spec.end // size)]
        sources, targets, counts = runs(spec.begin, spec.end, (theirs, self.block_size), (inside, size))
        planes = [(n, layer) for n in range(len(kv.tensors)) for layer in spec.layers]
        plane_bytes = self.total_blocks * self.block_size * self._row
        there = [self._address + (n * kv.layout.layers + layer) * plane_bytes for n, layer in planes]
        here = [kv.tensors[n][layer].data_ptr() for n, layer in planes]
        sizes = np.tile(counts * np.uint64(self._row), len(planes))
        return _addresses(there, sources * self._row), _addresses(here, targets * self._row), sizes


Part = tuple[Sequence[int], int]  # the blocks that hold the positions, and positions per block


def runs(begin: int, end: int, theirs: Part, ours: Part) -> tuple[Words, Words, Words]:
    """Cut positions [begin, end) into the longest runs that are contiguous on both sides. Return the first slot of each
    run there and here, where a pool has a slot for each position, and its number of positions: uint64 [n] each.
    """
    sizes = theirs[1], ours[1]
    inner = [np.arange((begin // size + 1) * size, end, size, dtype=np.uint64) for size in sizes]
    edges = np.unique(np.concatenate([np.array([begin], dtype=np.uint64), *inner]))
    counts = np.diff(np.append(edges, np.uint64(end)))
    there, here = (
        np.array(blocks, dtype=np.uint64)[edges // size - begin // size] * np.uint64(size) + edges % size
        for blocks, size in (theirs, ours)
    )
    joined = (there[1:] == there[:-1] + counts[:-1]) & (here[1:] == here[:-1] + counts[:-1])
    first = np.flatnonzero(np.append([True], ~joined))
    return there[first], here[first], np.add.reduceat(counts, first)


def _addresses(planes: Sequence[int], offsets: Words) -> Words:
    """Return uint64 [planes * offsets], plane by plane."""
    return (np.array(planes, dtype=np.uint64)[:, None] + offsets).ravel()
