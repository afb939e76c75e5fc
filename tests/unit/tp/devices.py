"""GPUs made of main memory, one for each rank: what a rank allocates there, and what rank 0 opens."""

import itertools
import os
from typing import Any

import torch

from baton.engine.kernels.gpu.cuda_driver import HANDLE_BYTES

Log = list[tuple[str, int]]  # what was done, on the GPU of which rank


class MainMemory:
    """One GPU. `memory` is what is allocated, `opened` what rank 0 has open; freeing what is open fails the test."""

    def __init__(self, rank: int, log: Log) -> None:
        self.rank, self.log = rank, log
        self._numbers = itertools.count(1)
        self._handles: dict[bytes, int] = {}
        self.memory: dict[int, torch.Tensor] = {}
        self.opened: dict[int, int] = {}

    def allocate(self, nbytes: int) -> int:
        self.log.append(("allocate", self.rank))
        address = next(self._numbers)
        self.memory[address] = torch.full((nbytes,), 0xFF, dtype=torch.uint8)  # NaN: as it was left by somebody
        return address

    def free(self, address: int) -> None:
        self.log.append(("free", self.rank))
        assert address not in self.opened.values(), "freed while rank 0 has it open"
        self.memory.pop(address).fill_(0xFF)

    def handle(self, address: int) -> bytes:
        handle = os.urandom(HANDLE_BYTES)
        self._handles[handle] = address
        return handle

    def open(self, handle: bytes) -> int:
        self.log.append(("open", self.rank))
        address = self._handles[handle]
        assert address in self.memory, "opened after it was freed"
        self.opened[mine := next(self._numbers)] = address
        return mine

    def close(self, address: int) -> None:
        self.log.append(("close", self.rank))
        del self.opened[address]

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        memory = self.memory[self.opened.get(address, address)]
        assert memory.numel() == nbytes
        return memory


def gpus(size: int) -> tuple[list[Any], Log]:
    """Those of all ranks, and what happens on them in its order."""
    log: Log = []
    return [MainMemory(rank, log) for rank in range(size)], log
