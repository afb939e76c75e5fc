"""The process group of a worker's ranks: gloo for messages from rank 0, and an exchange of the partial sums.

Ranks find each other through a file in a folder that only this user can enter. gloo listens on loopback only. Rank 0
may be silent for days, so the others wait without a timeout; they are killed with it (see `rank_process`). All ranks
add the same parts in rank order, so a sum has the same bits on each rank, in each run, with each kind of exchange.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions, FileStore, PrefixStore, Store

from baton.engine.kernels.base import Splits
from baton.errors import RankLost

Group: TypeAlias = "dist.ProcessGroupGloo | dist.ProcessGroupNCCL"  # a torch for CPUs has no NCCL
FRAME = 2048  # int64 numbers in the first broadcast of a message; a longer message takes a second one
FOREVER = timedelta(days=365)
LOOPBACK = "127.0.0.1"
END, CACHE, STEP = range(3)
LINE = 64  # bytes; counters of different ranks are in different cache lines
SPINS = 200
FUTEX, FUTEX_WAIT, FUTEX_WAKE = 202, 0, 1  # x86-64
ALL = 2**31 - 1
_LIBC = ctypes.CDLL(None)
_SLICE = (ctypes.c_long * 2)(0, 50_000_000)  # seconds, nanoseconds


class Exchange(Protocol):
    """One rank's end of the exchange, used by one thread. `capacity` is the maximum size of a part in elements."""

    rank: int
    size: int
    capacity: int

    def place(self, rows: int, width: int) -> Tensor:
        """Return the tensor for this rank's part of the next swap: float32 [rows, width], contiguous."""

    def swap(self) -> list[Tensor]:
        """Return the parts of all ranks, valid until the next swap. Raises RankLost."""


class GroupExchange:
    """An exchange over gloo between CPUs or NCCL between GPUs. Raises RankLost after `timeout_s` of silence."""

    def __init__(self, group: Group, size: int, capacity: int, device: torch.device, timeout_s: float) -> None:
        self.rank, self.size, self.capacity = group.rank(), size, capacity
        self._group = group
        self._options = AllgatherOptions()
        self._options.timeout = timedelta(seconds=timeout_s)
        self._own = torch.empty(capacity, device=device)
        self._all = [torch.empty(capacity, device=device) for _ in range(size)]
        self._shape = (0, 0)

    def place(self, rows: int, width: int) -> Tensor:
        self._shape = (rows, width)
        return self._own[: rows * width].view(rows, width)

    def swap(self) -> list[Tensor]:
        count = self._shape[0] * self._shape[1]
        own, parts = self._own[:count], [part[:count] for part in self._all]
        _wait(lambda: self._group.allgather([parts], [own], self._options))  # type: ignore[union-attr]  # not in the stub
        return [part.view(self._shape) for part in parts]


class SharedExchange:
    """An exchange over shared memory, with two alternating places and a counter per rank. A rank writes place n, raises
    its counter to n, and waits until all counters reach n. It sums n before it raises its counter to n + 1. Place n + 2
    follows the wait for n + 1 and can thus reuse the memory of n. Requires Linux on x86-64, where stores become visible
    in order. `alive` is called while waiting; RankLost follows after `timeout_s`.
    """

    def __init__(
        self, memory: mmap.mmap, rank: int, size: int, capacity: int, timeout_s: float, alive: Callable[[], None]
    ) -> None:
        self.rank, self.size, self.capacity = rank, size, capacity
        self._timeout_s, self._alive = timeout_s, alive
        self._counters = memoryview(memory)[: size * LINE].cast("q")
        floats = torch.frombuffer(memory, dtype=torch.float32, offset=size * LINE)
        self._address = floats.data_ptr() - size * LINE
        self._places = floats[: 2 * size * capacity].view(2, size, capacity)
        self._views: dict[tuple[int, int, int], list[Tensor]] = {}
        self._count, self._shape = 0, (0, 0)

    @staticmethod
    def nbytes(size: int, capacity: int) -> int:
        return size * LINE + 2 * size * capacity * 4

    def place(self, rows: int, width: int) -> Tensor:
        self._shape = (rows, width)
        return self._parts(self._count + 1)[self.rank]

    def swap(self) -> list[Tensor]:
        self._count += 1
        self._counters[self.rank * LINE // 8] = self._count
        _LIBC.syscall(FUTEX, ctypes.c_void_p(self._address + self.rank * LINE), FUTEX_WAKE, ALL, None)
        for rank in range(self.size):
            self._wait_for(rank)
        return self._parts(self._count)

    def _parts(self, count: int) -> list[Tensor]:
        rows, width = self._shape
        key = (count % 2, rows, width)
        if key not in self._views:
            self._views[key] = [place[: rows * width].view(rows, width) for place in self._places[count % 2]]
        return self._views[key]

    def _wait_for(self, rank: int) -> None:
        """Wait until that rank's counter reaches this rank's: spin with yields first, then sleep on a futex."""
        index = rank * LINE // 8
        for _ in range(SPINS):
            if self._counters[index] >= self._count:
                return
            os.sched_yield()
        deadline = time.monotonic() + self._timeout_s
        while (current := self._counters[index]) < self._count:
            address, lower_half = self._address + rank * LINE, ctypes.c_uint32(current & 0xFFFFFFFF)
            _LIBC.syscall(FUTEX, ctypes.c_void_p(address), FUTEX_WAIT, lower_half, _SLICE)  # at most 50 ms
            self._alive()
            if time.monotonic() > deadline:
                raise RankLost(f"rank {rank} of this worker made no progress for {self._timeout_s:g} s")


@dataclass(frozen=True, slots=True)
class TpLayout:
    """The start parameters of every rank. `memory` and `kv` are descriptors of shared memory, or -1 for none."""

    folder: str
    key: str
    size: int
    dtype: str
    device: str
    block_size: int
    max_model_len: int | None
    threads: int
    store: str
    parent: int
    capacity: int  # largest part of an exchange, in elements
    timeout_s: float  # limit of a rank's silence in a forward
    memory: int = -1
    kv: int = -1
    splits: Splits = "auto"

    def device_of(self, rank: int) -> torch.device:
        """Return the CPU, or the GPU `rank` places after that of rank 0."""
        device = torch.device(self.device)
        return device if device.type == "cpu" else torch.device(device.type, (device.index or 0) + rank)


class Message(NamedTuple):
    """A message from rank 0: END, CACHE with the number of blocks, or STEP with a batch (`rank_process.unpack`)."""

    kind: int
    numbers: list[int]
    body: Tensor


class Ranks:
    """One rank's end of the group, used by one thread. All ranks construct theirs at the same time. `alive` is called
    while waiting; on rank 0 it raises RankLost if a rank has ended.
    """

    def __init__(self, plan: TpLayout, rank: int, alive: Callable[[], None]) -> None:
        self.rank, self.size, self.device = rank, plan.size, plan.device_of(rank)
        store = FileStore(plan.store, plan.size)
        self._control = _gloo(PrefixStore("control", store), rank, plan)
        self._frame = torch.zeros(FRAME, dtype=torch.int64)
        self._limit = FOREVER if rank else timedelta(seconds=plan.timeout_s)
        cpu = self.device.type == "cpu"
        self._data: Group = self._control if cpu else _nccl(PrefixStore("data", store), rank, plan)
        self.exchange = self._exchange(plan, alive)

    def send(self, kind: int, numbers: list[int], body: Tensor | None = None) -> None:
        """Send a message to all other ranks, on rank 0. `body` is int64 [..] on the device. Raises RankLost."""
        body = torch.empty(0, dtype=torch.int64, device=self.device) if body is None else body
        packed = torch.tensor([kind, len(numbers), len(body), *numbers])
        if self._data is self._control:
            packed = torch.cat((packed, body))
        self._frame[: len(packed)] = packed[:FRAME]
        self._broadcast(self._control, self._frame)
        if len(packed) > FRAME:
            self._broadcast(self._control, packed[FRAME:])
        if self._data is not self._control:
            self._broadcast(self._data, body)

    def receive(self) -> Message:
        """Receive a message, on ranks above 0. It is valid until the next one. Raises RankLost."""
        self._broadcast(self._control, self._frame)
        kind, count, size = self._frame[:3].tolist()
        total = 3 + count + (size if self._data is self._control else 0)
        packed = self._frame
        if total > FRAME:
            packed = torch.cat((packed, torch.empty(total - FRAME, dtype=torch.int64)))
            self._broadcast(self._control, packed[FRAME:])
        numbers, body = packed[3 : 3 + count].tolist(), packed[3 + count : total]
        if self._data is not self._control:
            body = torch.empty(size, dtype=torch.int64, device=self.device)
            self._broadcast(self._data, body)
        return Message(kind, numbers, body)

    def gather(self, own: bytes) -> list[bytes]:
        """Exchange equally many bytes between all ranks, and return them in rank order. Raises RankLost."""
        sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = self._limit
        _wait(lambda: self._control.allgather([received], [sent], options))  # type: ignore[union-attr]  # not in the stub
        return [bytes(part.tolist()) for part in received]

    def _broadcast(self, group: Group, data: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank, options.timeout = 0, self._limit
        _wait(lambda: group.broadcast([data], options))  # type: ignore[union-attr]  # not in the stub

    def _exchange(self, plan: TpLayout, alive: Callable[[], None]) -> Exchange:
        if plan.memory < 0:
            return GroupExchange(self._data, plan.size, plan.capacity, self.device, plan.timeout_s)
        memory = mmap.mmap(plan.memory, SharedExchange.nbytes(plan.size, plan.capacity))
        return SharedExchange(memory, self.rank, plan.size, plan.capacity, plan.timeout_s, alive)


def _wait(start: Callable[[], dist.Work]) -> None:
    try:
        start().wait()
    except RuntimeError as error:
        raise RankLost(f"a rank of this worker does not respond: {error}") from error


def memory_is_ordered() -> bool:
    """Return whether `SharedExchange` works on this machine."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


def _gloo(store: Store, rank: int, plan: TpLayout) -> Group:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub calls it Options
    options._timeout = timedelta(seconds=plan.timeout_s)
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return dist.ProcessGroupGloo(store, rank, plan.size, options)


def _nccl(store: Store, rank: int, plan: TpLayout) -> Group:
    """Create the NCCL group. Not run yet, for lack of two GPUs."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=plan.timeout_s)
    with torch.cuda.device(plan.device_of(rank)):
        group = dist.ProcessGroupNCCL(store, rank, plan.size, options)
        group.eager_connect_single_device(plan.device_of(rank))
    return group
