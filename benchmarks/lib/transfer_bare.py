"""Least cost of a transfer between two processes: a gloo pair that only sends, memory that is only copied.

It has no gathering, digests or announcements. The bytes move between two buffers of the whole size, in Baton's frames
and number of slots.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from baton.engine.memory.huge_pages import Arena
from kvtransfer.transports.nixl import Reader
from kvtransfer.transports.nixl_agent import load, tcp_on

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Group = dist.ProcessGroupGloo | dist.ProcessGroupNCCL
    Post = Callable[[list[Tensor], int, int], dist.Work]

SENDER, RECEIVER = 0, 1
DEADLINE = timedelta(seconds=30)
NIXL_CONFIG = tcp_on("lo")  # as for a worker on the loopback


def buffer(nbytes: int, device: str = "cpu") -> Tensor:
    """Return memory like that of the KV cache (in huge pages on a CPU), with all pages present: uint8 [nbytes]."""
    if device != "cpu":
        return torch.ones(nbytes, dtype=torch.uint8, device=device)
    return Arena().empty((nbytes,), torch.uint8).fill_(1)


def gloo_pair(store: str, side: int) -> dist.ProcessGroupGloo:
    """Return one end of a pair that meets at the file `store`, over the loopback."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub calls it Options
    options._timeout = DEADLINE
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(FileStore(store, 2), side, 2, options)


def nccl_pair(store: str, side: int) -> dist.ProcessGroupNCCL:
    """Return one end of a pair between GPUs 0 and 1. It was never run, for lack of a machine with two GPUs."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = DEADLINE
    torch.cuda.set_device(side)
    return dist.ProcessGroupNCCL(FileStore(store, 2), side, 2, options)


PAIRS: dict[str, Callable[[str, int], Group]] = {"gloo": gloo_pair, "nccl": nccl_pair}


def stream(post: Post, peer: int, data: Tensor, frame: int, window: int) -> None:
    """Send or receive all of `data` in frames, at most `window` in flight. Returns when it is done."""
    under_way: deque[dist.Work] = deque()
    for piece in torch.split(data, frame):
        if len(under_way) == window:
            under_way.popleft().wait()
        under_way.append(post([piece], peer, 0))
    for work in under_way:
        work.wait()
    if data.is_cuda:  # NCCL's wait blocks the CUDA stream, not this thread
        torch.cuda.synchronize(data.device)


class SharedRing:
    """Slots in memory that two processes map, with the frame counts of both. Both sides spin, so only copying takes
    time. On a machine with one core the result would not be a limit.
    """

    _WRITTEN, _READ, _HERE = 0, 8, 16  # in units of 8 bytes: one cache line each

    def __init__(self, file: int, slots: int, size: int) -> None:
        self._slots, self._size = slots, size
        self._map = mmap.mmap(file, ring_bytes(slots, size), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._counts = memoryview(self._map)[: mmap.PAGESIZE].cast("q")
        self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr() + mmap.PAGESIZE

    def reset(self) -> None:
        """Set the counts to 0. Only the writer may call it, without a reader."""
        for which in (self._WRITTEN, self._READ, self._HERE):
            self._counts[which] = 0

    def wait_reader(self) -> None:
        """Wait for the next `read`."""
        self._wait(self._HERE, 1)
        self._counts[self._HERE] = 0

    def write(self, data: Tensor) -> None:
        """Copy all of `data` in, and wait until it is copied out."""
        first, frames = self._counts[self._WRITTEN], torch.split(data, self._size)
        for number, frame in enumerate(frames, first):
            self._wait(self._READ, number + 1 - self._slots)
            ctypes.memmove(self._slot(number), frame.data_ptr(), len(frame))
            self._counts[self._WRITTEN] = number + 1
        self._wait(self._READ, first + len(frames))

    def read(self, data: Tensor) -> None:
        """Fill `data` from the ring."""
        self._counts[self._HERE] = 1
        for number, frame in enumerate(torch.split(data, self._size), self._counts[self._READ]):
            self._wait(self._WRITTEN, number + 1)
            ctypes.memmove(frame.data_ptr(), self._slot(number), len(frame))
            self._counts[self._READ] = number + 1

    def _slot(self, number: int) -> int:
        return self._address + number % self._slots * self._size

    def _wait(self, which: int, count: int) -> None:
        while self._counts[which] < count:
            os.sched_yield()


class NixlReader:
    """Reads all of a partner's buffer by NIXL, a frame as one piece. `ask` returns its address and metadata."""

    def __init__(self, nbytes: int, ask: Callable[[], dict[str, Any]]) -> None:
        library = load("nixl._bindings")
        there = ask()
        self._address, self._data = int(there["address"]), buffer(nbytes)
        self._reader = Reader(library, NIXL_CONFIG, bytes.fromhex(there["metadata"]), DEADLINE.total_seconds())
        self._reader.register(self._data.data_ptr(), nbytes)

    def read(self, frame: int, window: int) -> None:
        """Read in frames, at most `window` in flight."""
        under_way: deque[int] = deque()
        for at in range(0, len(self._data), frame):
            if len(under_way) == window:
                self._reader.wait(under_way.popleft())
            here, there, nbytes = self._data.data_ptr() + at, self._address + at, min(frame, len(self._data) - at)
            under_way.append(self._reader.start(here, there, nbytes))
        for handle in under_way:
            self._reader.wait(handle)

    def close(self) -> None:
        """End the connection."""
        self._reader.close()


def ring_bytes(slots: int, size: int) -> int:
    """Return the size of the map: counts and slots."""
    return mmap.PAGESIZE + slots * size
