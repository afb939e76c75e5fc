"""Doubles for tests of transports: a GPU in main memory, a served loopback peer, a transport within one process."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from baton.engine.kernels.gpu.cuda_memory import HANDLE_BYTES
from baton.errors import ChannelBroken
from baton.rpc.channel import aio_server, bind
from baton.rpc.v1.peer_pb2_grpc import add_PeerServicer_to_server
from kvtransfer.transports.base import RingEnd, Side, local_ring

if TYPE_CHECKING:
    from torch import Tensor

    from kvtransfer.transports.base import ChannelName, KeyRelay, Ring

Log = list[tuple[str, int]]  # (operation, rank of the GPU)


class MainMemory:
    """One GPU. `memory`: allocations; `opened`: those opened by another process. Freeing these fails the test."""

    uuid = "GPU-of-main-memory"

    def __init__(self, rank: int = 0, log: Log | None = None) -> None:
        self._numbers = itertools.count(1)
        self._handles: dict[bytes, Any] = {}
        self._rank, self._log = rank, [] if log is None else log
        self.memory: dict[int, torch.Tensor] = {}
        self.opened: dict[int, int] = {}
        self.recorded: list[int] = []  # number of records of each event
        self.busy = False

    def allocate(self, nbytes: int) -> int:
        self._log.append(("allocate", self._rank))
        address = next(self._numbers)
        self.memory[address] = torch.full((nbytes,), 0xFF, dtype=torch.uint8)  # NaN, like memory of an earlier owner
        return address

    def free(self, address: int) -> None:
        self._log.append(("free", self._rank))
        assert address not in self.opened.values(), "freed while it is open"
        self.memory.pop(address).fill_(0xFF)

    def handle(self, address: int) -> bytes:
        return self._handle_of(address)

    def open(self, handle: bytes) -> int:
        self._log.append(("open", self._rank))
        address = self._handles.get(handle)
        if not isinstance(address, int):
            raise RuntimeError("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE (1)")
        assert address in self.memory, "opened after it was freed"
        self.opened[mine := next(self._numbers)] = address
        return mine

    def close(self, address: int) -> None:
        self._log.append(("close", self._rank))
        del self.opened[address]

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        memory = self.memory[self.opened.get(address, address)]
        assert memory.numel() == nbytes
        return memory

    def event(self) -> tuple[Callable[[], None], bytes]:
        index = len(self.recorded)
        self.recorded.append(0)

        def record() -> None:
            self.recorded[index] += 1

        return record, self._handle_of(lambda: self.recorded[index] > 0 and not self.busy)

    def open_event(self, handle: bytes) -> Callable[[], bool]:
        return self._handles[handle]

    def _handle_of(self, what: object) -> bytes:
        handle = os.urandom(HANDLE_BYTES)
        self._handles[handle] = what
        return handle


@contextmanager
def served(peer) -> Iterator[str]:
    """Serve a loopback peer over gRPC. Yields the address."""

    async def start():
        server = aio_server()
        add_PeerServicer_to_server(peer.service, server)
        address = bind(server, "127.0.0.1:0")
        await server.start()
        return server, address

    server, address = peer.run(start())
    try:
        yield address
    finally:
        peer.run(peer.service.close())
        peer.run(server.stop(5))


class MemoryTransport:
    """A transport within one process, with the same contract as the others. Both ends must be given the same object."""

    name = "memory"
    one_sided, sends = False, True
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.reach = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._waiting: dict[tuple[ChannelName, Side], Meeting] = {}

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> MemoryEnd:
        """See `Transport`. The first end makes the ring, the second one finds it."""
        title = f"memory channel {name}"
        with self._changed:
            meeting = self._waiting.pop((name, Side(1 - side)), None)
            if meeting is None:
                meeting = self._wait((name, side), ring, deadline_s)
            self._changed.notify_all()
        if meeting is None:
            raise ChannelBroken(f"{title}: no peer within {deadline_s} s")
        return MemoryEnd(title, meeting, side, deadline_s)

    def _wait(self, key: tuple[ChannelName, Side], ring: Ring, deadline_s: float) -> Meeting | None:
        made = self._waiting[key] = Meeting(local_ring(ring, self.device))
        if self._changed.wait_for(lambda: self._waiting.get(key) is not made, deadline_s):
            return made
        del self._waiting[key]
        return None


@dataclass(slots=True, eq=False)
class Meeting:
    """State that two ends share. `sizes` has the bytes of frames that were sent and not yet taken, by number."""

    staging: Tensor
    sizes: dict[int, int] = field(default_factory=dict)
    closed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)


class MemoryEnd(RingEnd):
    """An end of a shared ring: a started frame has arrived."""

    def __init__(self, title: str, meeting: Meeting, side: Side, deadline_s: float) -> None:
        super().__init__(title, meeting.staging)
        self._meeting = meeting
        self._side = side
        self._deadline_s = deadline_s
        self._expected: dict[int, int] = {}

    def _start(self, number: int, nbytes: int) -> None:
        with self._meeting.changed:
            self._check()
            (self._expected if self._side else self._meeting.sizes)[number] = nbytes
            self._meeting.changed.notify_all()

    def _finish(self, number: int) -> None:
        meeting = self._meeting
        with meeting.changed:
            here = self._side is Side.SENDER or meeting.changed.wait_for(
                lambda: meeting.closed or number in meeting.sizes, self._deadline_s
            )
            self._check()
            if not here:
                raise TimeoutError(f"no progress within {self._deadline_s} s")
            if self._side is Side.RECEIVER and meeting.sizes.pop(number) != self._expected.pop(number, None):
                raise ConnectionError(f"frame {number} does not have the expected size")

    def _release(self) -> None:
        with self._meeting.changed:
            self._meeting.closed = True
            self._meeting.changed.notify_all()

    def _check(self) -> None:
        if self._meeting.closed:
            raise ConnectionError("closed by the peer")
