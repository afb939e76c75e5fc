"""Doubles for tests of transports: a GPU in main memory, a served loopback peer, a transport within one process."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
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
    """A GPU made of main memory, as one process uses it; `beside` is the same GPU in another process.

    It behaves as the CUDA driver API 13.0 documents, with real addresses. cuIpcOpenMemHandle: "If the memory handle has
    already been opened by the current context, the reference count on the handle is incremented by 1 and the existing
    device pointer is returned." cuIpcCloseMemHandle: "Decrements the reference count". Within the owner's process,
    opening fails with "invalid device context" (openucx/ucx pull request 11603). Freeing memory that is open elsewhere
    "will result in undefined behavior": here it fails the test, or poisons the bytes if the owner `dies`.
    Copies run only when their stream is waited for, in no order.
    """

    def __init__(self, rank: int = 0, log: Log | None = None, *, shared: Books | None = None, process: int = 0) -> None:
        self._rank, self._log = rank, [] if log is None else log
        self._books, self._process = shared or Books(), process
        self.memory, self.opened = self._books.memory, self._books.opened
        self.strange: set[int] = set()  # processes whose memory this one cannot open, for lack of peer access
        self.streams: list[MainCopies] = []
        # Called before each copy with its number and the count of its batch, and once after all of them.
        self.before: Callable[[int, int], None] = lambda number, count: None

    def beside(self) -> MainMemory:
        self._books.several = True
        return MainMemory(self._rank, self._log, shared=self._books, process=next(self._books.processes))

    def allocate(self, nbytes: int) -> int:
        self._log.append(("allocate", self._rank))
        file = os.memfd_create("gpu")
        os.ftruncate(file, nbytes)
        memory = torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
        self.memory[address := memory.data_ptr()] = memory.fill_(0xFF)  # NaN, like memory of an earlier owner
        self._books.files[address] = file, self._process
        return address

    def free(self, address: int) -> None:
        self._log.append(("free", self._rank))
        assert address not in {owned for owned, _ in self.opened.values()}, "freed while it is open"
        os.close(self._books.files.pop(address)[0])
        self.memory.pop(address).fill_(0xFF)

    def handle(self, address: int) -> bytes:
        assert address in self.memory, "no base address of an allocation"
        handle = self._books.handles.get(address) or os.urandom(HANDLE_BYTES)
        self._books.handles[address] = handle
        return handle

    def open(self, handle: bytes) -> int:
        self._log.append(("open", self._rank))
        owned = next((address for address, known in self._books.handles.items() if known == handle), 0)
        if owned not in self.memory:
            raise RuntimeError("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_VALUE (1)")
        file, owner = self._books.files[owned]
        if owner == self._process and self._books.several:
            raise RuntimeError("cuIpcOpenMemHandle_v2: CUDA_ERROR_INVALID_CONTEXT (201)")
        if owner in self.strange:
            raise RuntimeError("cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)")
        for address, (known, users) in self.opened.items():
            if known == owned and (address, self._process) in self._books.mapped:
                self.opened[address] = owned, users + 1
                return address
        mapped = torch.frombuffer(mmap.mmap(file, self.memory[owned].numel()), dtype=torch.uint8)
        self._books.mapped[address := mapped.data_ptr(), self._process] = mapped
        self.opened[address] = owned, 1
        return address

    def close(self, address: int) -> None:
        self._log.append(("close", self._rank))
        owned, users = self.opened.pop(address)
        if users > 1:
            self.opened[address] = owned, users - 1
        else:
            del self._books.mapped[address, self._process]

    def tensor(self, address: int, nbytes: int, owner: object = None) -> torch.Tensor:
        """As torch's tensor_from_cuda_array_interface (torch/csrc/utils/tensor_numpy.cpp), whose storage keeps the
        object that it was made from.
        """
        array = self.at(address, nbytes).numpy()[:]
        weakref.finalize(array, id, owner).atexit = False
        return torch.from_numpy(array)

    def at(self, address: int, nbytes: int) -> torch.Tensor:
        """Return memory that this process has, by address. An address outside is an error, as in CUDA."""
        mapped = {begin: there for (begin, process), there in self._books.mapped.items() if process == self._process}
        for begin, memory in {**self.memory, **mapped}.items():
            if begin <= address and address + nbytes <= begin + memory.numel():
                return memory[address - begin :][:nbytes]
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS (700)")

    def copies(self) -> MainCopies:
        self.streams.append(MainCopies(self))
        return self.streams[-1]

    def dies(self) -> None:
        """Free what this process owns, whatever has it open. Another process reads undefined bytes then."""
        for address, (_, owner) in self._books.files.items():
            if owner == self._process:
                self.memory[address].fill_(0xFF)


@dataclass
class Books:
    """Memory of all processes of a GPU: allocations, and those opened, each with its owner's address and its users."""

    memory: dict[int, torch.Tensor] = field(default_factory=dict)
    opened: dict[int, tuple[int, int]] = field(default_factory=dict)
    files: dict[int, tuple[int, int]] = field(default_factory=dict)  # and the owner's process
    handles: dict[int, bytes] = field(default_factory=dict)
    mapped: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # by address and process
    processes: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    several: bool = False


class MainCopies:
    """A stream of copies. `followed` counts how often it waited for the compute stream."""

    def __init__(self, gpu: MainMemory) -> None:
        self.gpu = gpu
        self._queued: list[tuple[int, int, int]] = []
        self.followed = 0

    def follow(self) -> None:
        assert not self._queued
        self.followed += 1

    def copy(self, *arrays: np.ndarray) -> None:
        assert all(array.dtype == np.uint64 and array.flags.c_contiguous for array in arrays)
        self._queued += zip(*(array.tolist() for array in arrays), strict=True)

    def wait(self) -> None:
        queued, self._queued = self._queued, []
        random.Random(len(queued)).shuffle(queued)
        for number, (source, target, size) in enumerate(queued):
            self.gpu.before(number, len(queued))
            ctypes.memmove(target, self.gpu.at(source, size).data_ptr(), size)
        self.gpu.before(len(queued), len(queued))


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
        self._ended = False

    def end(self) -> None:
        """End the waits for a peer. At the end of a test, no peer arrives."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

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

        def met() -> bool:
            return self._waiting.get(key) is not made

        self._changed.wait_for(lambda: self._ended or met(), deadline_s)
        if met():
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
