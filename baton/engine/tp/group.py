"""The process group of a worker's ranks: gloo for messages from rank 0, and an exchange for the sums.

Ranks find each other through a file in a folder that only this user can enter. gloo listens on loopback only. Rank 0
may be silent for days, so the others wait without a timeout; they are killed with it (see `rank_process`).
"""

from __future__ import annotations

import json
import mmap
import platform
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, BroadcastOptions, FileStore, PrefixStore

from baton.engine.tp.all_reduce import Exchange, GroupExchange, SharedExchange
from baton.errors import RankLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch._C._distributed_c10d import Store

    from baton.engine.kernels.base import Splits

    Group = dist.ProcessGroupGloo | dist.ProcessGroupNCCL

FRAME = 2048  # int64 numbers in the first broadcast of a message; a longer message takes a second one
FOREVER = timedelta(days=365)
LOOPBACK = "127.0.0.1"
END, CACHE, STEP = range(3)


@dataclass(frozen=True, slots=True)
class TpLayout:
    """The start parameters of every rank. `memory` and `kv` are descriptors of shared memory, or -1 for none.

    `capacity` is the largest part of an exchange in elements. `timeout_s` limits a rank's silence in a forward.
    """

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
    capacity: int
    timeout_s: float
    memory: int = -1
    kv: int = -1
    splits: Splits = "auto"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TpLayout:
        return cls(**json.loads(text))

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
    """One rank's end of the group, used by one thread. All ranks construct theirs at the same time.

    `alive` is called while waiting. On rank 0, which watches the others, it raises RankLost if a rank has ended.
    """

    def __init__(self, plan: TpLayout, rank: int, alive: Callable[[], None]) -> None:
        self.rank, self.size, self.device = rank, plan.size, plan.device_of(rank)
        store = FileStore(plan.store, plan.size)
        self._control = _gloo(PrefixStore("control", store), rank, plan)
        self._frame = torch.zeros(FRAME, dtype=torch.int64)
        self._limit = FOREVER if rank else timedelta(seconds=plan.timeout_s)
        self._data: Group = (
            self._control if self.device.type == "cpu" else _nccl(PrefixStore("data", store), rank, plan)
        )
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
