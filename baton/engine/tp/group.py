"""The process group of a worker's ranks: gloo for messages from rank 0, and an exchange of the partial sums.

Ranks find each other through a file in a folder that only this user can enter. gloo listens on loopback only. Rank 0
may be silent for days, so the others wait without a timeout; they are killed with it (see `rank_process`).

On CPUs, all ranks add the same parts in rank order, so a sum has the same bits on each rank, in each run, with each
kind of exchange. On GPUs, NCCL adds the parts of ordinary forwards. The ranks add those of fixed ones in rank order.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    FileStore,
    PrefixStore,
    Store,
)

from baton.engine.kernels.base import Splits
from baton.engine.kernels.kv_levels import KVDtype
from baton.engine.kernels.quantized import Quantize
from baton.errors import RankLost

Gloo: TypeAlias = "dist.ProcessGroupGloo"  # some builds of torch do not have it
Nccl: TypeAlias = "dist.ProcessGroupNCCL"  # a torch for CPUs has no NCCL
OptionsType = TypeVar("OptionsType", AllgatherOptions, AllreduceOptions, BroadcastOptions)
FRAME = 2048  # int64 numbers in the first broadcast of a message; a longer message takes a second one
FOREVER = timedelta(days=365)
LOOPBACK = "127.0.0.1"
END, CACHE, GRAPHS, STEP, STATES = range(5)
LINE = 64  # bytes; counters of different ranks are in different cache lines
SPINS = 200
FUTEX, FUTEX_WAIT, FUTEX_WAKE = 202, 0, 1  # x86-64
ALL = 2**31 - 1
_LIBC = ctypes.CDLL(None)
_SLICE = (ctypes.c_long * 2)(0, 50_000_000)  # seconds, nanoseconds


class Exchange(ABC):
    """One rank's end of the exchange, used by one thread. `capacity` is the maximum size of a part in elements. Sums of
    a `fixed` forward do not depend on the size of a part or on its place in memory.
    """

    def __init__(self, rank: int, size: int, capacity: int) -> None:
        self.rank, self.size, self.capacity = rank, size, capacity
        self.fixed = False

    @abstractmethod
    def place(self, rows: int, width: int) -> Tensor:
        """Return the tensor for this rank's part of the next swap: float32 [rows, width], contiguous."""

    @abstractmethod
    def swap(self) -> list[Tensor]:
        """Return the parts of all ranks, valid until the next swap. Raises RankLost."""

    def add(self, out: Tensor) -> None:
        """Swap, and write the sum of the parts in rank order to `out` [rows, width]. Raises RankLost."""
        total, *between, last = self.swap()
        for part in between:
            total = total + part
        torch.add(total, last, out=out)  # rounded once


class GlooExchange(Exchange):
    """An exchange over gloo between CPUs. Raises RankLost after `timeout_s` of silence."""

    def __init__(self, group: Gloo, size: int, capacity: int, timeout_s: float) -> None:
        super().__init__(group.rank(), size, capacity)
        self._group = group
        self._options = AllgatherOptions()
        self._options.timeout = timedelta(seconds=timeout_s)
        self._own = torch.empty(capacity)
        self._all = [torch.empty(capacity) for _ in range(size)]
        self._shape = (0, 0)

    def place(self, rows: int, width: int) -> Tensor:
        self._shape = (rows, width)
        return self._own[: rows * width].view(rows, width)

    def swap(self) -> list[Tensor]:
        count = self._shape[0] * self._shape[1]
        own, parts = self._own[:count], [part[:count] for part in self._all]
        _wait(lambda: self._group.allgather([parts], [own], self._options))  # type: ignore[attr-defined]  # not in the stub
        return [part.view(self._shape) for part in parts]


class NcclExchange(Exchange):
    """An exchange over NCCL between GPUs, in the current stream. The host never waits, so that forwards can be captured
    in a CUDA graph. All ranks get the same bits, but NCCL's order of a sum depends on its size. Never run.
    """

    def __init__(self, group: Nccl, size: int, capacity: int, device: torch.device) -> None:
        super().__init__(group.rank(), size, capacity)
        self._group = group
        self._gathers, self._reduces = _in_stream(AllgatherOptions()), _in_stream(AllreduceOptions())
        self._own, self._all = torch.empty(capacity, device=device), torch.empty(size * capacity, device=device)
        self._shape = (0, 0)

    def place(self, rows: int, width: int) -> Tensor:
        self._shape = (rows, width)
        return self._part()

    def swap(self) -> list[Tensor]:
        own = self._part().flatten()
        parts = self._all[: self.size * len(own)]
        _issue(lambda: self._group._allgather_base(parts, own, self._gathers))  # type: ignore[attr-defined]  # its gap
        return list(parts.view(self.size, *self._shape))

    def add(self, out: Tensor) -> None:
        if self.fixed:
            return super().add(out)
        own = self._part()
        _issue(lambda: self._group.allreduce([own], self._reduces))  # type: ignore[attr-defined]  # not in the stub
        out.copy_(own)
        return None

    def _part(self) -> Tensor:
        rows, width = self._shape
        return self._own[: rows * width].view(rows, width)


class SharedExchange(Exchange):
    """An exchange over shared memory, with two alternating places and a counter per rank. A rank writes place n, raises
    its counter to n, and waits until all counters reach n. It sums n before it raises its counter to n + 1. Place n + 2
    follows the wait for n + 1 and can thus reuse the memory of n. Requires Linux on x86-64, where stores become visible
    in order. `alive` is called while waiting; RankLost follows after `timeout_s`.
    """

    def __init__(
        self, memory: mmap.mmap, rank: int, size: int, capacity: int, timeout_s: float, alive: Callable[[], None]
    ) -> None:
        super().__init__(rank, size, capacity)
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
    """The start parameters of every rank. `memory` is the descriptor of the exchange's memory, or -1 for none."""

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
    splits: Splits = "auto"
    quantize: Quantize = "none"
    kv_dtype: KVDtype = "auto"

    def device_of(self, rank: int, viewer: int) -> torch.device:
        """Return the CPU, or the GPU of `rank` as it is named in the process of `viewer`. Rank 0 sees the GPUs of all
        ranks, in rank order, because it opens their KV. Each other rank sees only its own, as cuda:0.
        """
        device = torch.device(self.device)
        if device.type == "cpu":
            return device
        return torch.device(device.type, (device.index or 0) + rank if viewer == 0 else 0)


class Message(NamedTuple):
    """A message from rank 0: END; CACHE with the number of blocks; GRAPHS with the most rows and blocks of a decode
    step; STEP with the bucket of the graph, or 0, and a batch (`rank_process.unpack`); STATES with a number of states,
    and the process and the descriptor of their memory file.
    """

    kind: int
    numbers: list[int]
    body: Tensor


class Ranks:
    """One rank's end of the group, used by one thread. All ranks construct theirs at the same time. `alive` is called
    while waiting; on rank 0 it raises RankLost if a rank has ended.
    """

    def __init__(self, plan: TpLayout, rank: int, alive: Callable[[], None]) -> None:
        self.rank, self.size, self.device = rank, plan.size, plan.device_of(rank, rank)
        store = FileStore(plan.store, plan.size)
        self._control = _gloo(PrefixStore("control", store), rank, plan)
        self._frame = torch.zeros(FRAME, dtype=torch.int64)
        self._limit = FOREVER if rank else timedelta(seconds=plan.timeout_s)
        self._nccl = None if self.device.type == "cpu" else _nccl(PrefixStore("data", store), rank, plan, self.device)
        self._streamed = _in_stream(BroadcastOptions())
        self.exchange = self._exchange(plan, alive)

    def send(self, kind: int, numbers: list[int], body: Tensor | None = None) -> None:
        """Send a message to all other ranks, on rank 0. `body` is int64 [..] on the device. Raises RankLost."""
        body = torch.empty(0, dtype=torch.int64, device=self.device) if body is None else body
        packed = torch.tensor([kind, len(numbers), len(body), *numbers])
        if self._nccl is None:
            packed = torch.cat((packed, body))
        self._frame[: len(packed)] = packed[:FRAME]
        self._broadcast(self._frame)
        if len(packed) > FRAME:
            self._broadcast(packed[FRAME:])
        self._stream(body)

    def receive(self) -> Message:
        """Receive a message, on ranks above 0. It is valid until the next one. Raises RankLost."""
        self._broadcast(self._frame)
        kind, count, size = self._frame[:3].tolist()
        total = 3 + count + (size if self._nccl is None else 0)
        packed = self._frame
        if total > FRAME:
            packed = torch.cat((packed, torch.empty(total - FRAME, dtype=torch.int64)))
            self._broadcast(packed[FRAME:])
        numbers, body = packed[3 : 3 + count].tolist(), packed[3 + count : total]
        if self._nccl is not None:
            body = torch.empty(size, dtype=torch.int64, device=self.device)
        self._stream(body)
        return Message(kind, numbers, body)

    def gather(self, own: bytes) -> list[bytes]:
        """Exchange equally many bytes between all ranks, and return them in rank order. Raises RankLost."""
        sent = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = self._limit
        _wait(lambda: self._control.allgather([received], [sent], options))  # type: ignore[attr-defined]  # not in the stub
        return [bytes(part.tolist()) for part in received]

    def _broadcast(self, data: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank, options.timeout = 0, self._limit
        _wait(lambda: self._control.broadcast([data], options))  # type: ignore[attr-defined]  # not in the stub

    def _stream(self, body: Tensor) -> None:
        if (group := self._nccl) is not None and len(body):
            _issue(lambda: group.broadcast([body], self._streamed))  # type: ignore[attr-defined]  # not in the stub

    def _exchange(self, plan: TpLayout, alive: Callable[[], None]) -> Exchange:
        if self._nccl is not None:
            return NcclExchange(self._nccl, plan.size, plan.capacity, self.device)
        if plan.memory < 0:
            return GlooExchange(self._control, plan.size, plan.capacity, plan.timeout_s)
        memory = mmap.mmap(plan.memory, SharedExchange.nbytes(plan.size, plan.capacity))
        return SharedExchange(memory, self.rank, plan.size, plan.capacity, plan.timeout_s, alive)


def _wait(start: Callable[[], dist.Work]) -> None:
    _issue(lambda: start().wait())


def _issue(start: Callable[[], object]) -> None:
    try:
        start()
    except RuntimeError as error:
        raise RankLost(f"a rank of this worker does not respond: {error}") from error


def _in_stream(options: OptionsType) -> OptionsType:
    """Let NCCL use the current stream (`ProcessGroupNCCL::collective` of torch 2.13), which then needs no wait."""
    options.asyncOp = False
    return options


def memory_is_ordered() -> bool:
    """Return whether `SharedExchange` works on this machine."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


def _gloo(store: Store, rank: int, plan: TpLayout) -> Gloo:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub calls it Options
    options._timeout = timedelta(seconds=plan.timeout_s)
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return dist.ProcessGroupGloo(store, rank, plan.size, options)


def _nccl(store: Store, rank: int, plan: TpLayout, device: torch.device) -> Nccl:
    """Create the NCCL group. Not run yet, for lack of two GPUs."""
    # torch would look for orders to dump in the store every second. Its file is gone after the start, each look at a
    # missing file takes 300 s, and the end of the group waits for it.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * plan.timeout_s)  # `Watchdog` ends the process first, and gives the cause
    with torch.cuda.device(device):
        group = dist.ProcessGroupNCCL(store, rank, plan.size, options)
        group.eager_connect_single_device(device)
    return group
