"""The exchange of partial sums between ranks.

Every rank writes its part to `place`, then calls `swap`, which returns the parts of all ranks in rank order. All ranks
make the same calls with the same shapes and add the same numbers in the same order. A sum thus has the same bits on
each rank, in each run, and with each kind of exchange.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
from torch._C._distributed_c10d import AllgatherOptions

from baton.errors import RankLost

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist
    from torch import Tensor

    Group = dist.ProcessGroupGloo | dist.ProcessGroupNCCL

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
        parts = [part[:count] for part in self._all]
        try:
            work = self._group.allgather(  # type: ignore[union-attr]  # not in the stub
                [parts], [self._own[:count]], self._options
            )
            work.wait()
        except RuntimeError as error:
            raise RankLost(f"a rank of this worker does not respond: {error}") from error
        return [part.view(self._shape) for part in parts]


class SharedExchange:
    """An exchange over shared memory, with two alternating places and a counter per rank.

    A rank writes place n, raises its counter to n, and waits until all counters reach n. It sums n before it raises
    its counter to n + 1. Place n + 2 follows the wait for n + 1 and can thus reuse the memory of n. Requires Linux on
    x86-64, where stores become visible in order. `alive` is called while waiting; RankLost follows after `timeout_s`.
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
        """Return the size of the shared memory in bytes."""
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
            _sleep_while(self._address + rank * LINE, current)
            self._alive()
            if time.monotonic() > deadline:
                raise RankLost(f"rank {rank} of this worker made no progress for {self._timeout_s:g} s")


def _sleep_while(address: int, value: int) -> None:
    """Sleep for 50 ms or until woken, if the lower half of the counter still has this value."""
    _LIBC.syscall(FUTEX, ctypes.c_void_p(address), FUTEX_WAIT, ctypes.c_uint32(value & 0xFFFFFFFF), _SLICE)
