"""A GPU simulated in main memory and a gRPC server for a loopback peer, for tests of transports."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from baton.engine.kernels.gpu.cuda_memory import HANDLE_BYTES
from baton.rpc.channel import aio_server, bind
from baton.rpc.v1.peer_pb2_grpc import add_PeerServicer_to_server

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
