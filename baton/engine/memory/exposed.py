"""KV memory that other processes of this host can map, for reading only, with the generation of each block.

    file:  generations, uint64 [blocks] | pattern for probes, uint8 [PROBES * PROBE_BYTES] | KV
The owner raises a block's generation before it gives the block to another sequence. A reader compares the generation
before and after its copy, as with a seqlock. Stores of x86-64 become visible in order, and loads are done in order, so
no fences are needed there. No other processor is supported.

The file has no name and belongs to the processes that hold it, so a killed process leaves nothing. It is sealed: its
size is fixed, and no later mapping can write. Ranks of a worker map it before that (`baton/engine/tp/kv_memory.py`).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import sys
from collections.abc import MutableSequence, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.errors import ConfigError

HUGE_PAGE = 2 * 2**20
PROBES, PROBE_BYTES = 4, 2**20  # pieces of the pattern, and bytes of each
_WORD = 8
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FUTURE_WRITE, _POPULATE_WRITE = 0x10, 23  # F_SEAL_FUTURE_WRITE, and MADV_POPULATE_WRITE of Linux 5.14
FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if sys.platform == "linux" else 0


def pattern(number: int, nbytes: int) -> Tensor:
    """Return piece `number` of the pattern that probes a channel: uint8 [nbytes], without equal words or pieces."""
    words = np.arange(1, -(-nbytes // _WORD) + 1, dtype=np.uint64) * _STEP + np.uint64(number << 32)
    return torch.from_numpy(words.view(np.uint8)[:nbytes])


@dataclass(frozen=True, slots=True)
class Shape:
    """The parts of the file, for `kv_bytes` bytes of KV in `blocks` blocks."""

    blocks: int
    kv_bytes: int

    @property
    def probe_at(self) -> int:
        return -(-self.blocks * _WORD // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def kv_at(self) -> int:
        return -(-(self.probe_at + PROBES * PROBE_BYTES) // HUGE_PAGE) * HUGE_PAGE

    @property
    def nbytes(self) -> int:
        return self.kv_at + self.kv_bytes


class ExposedMemory:
    """The owner's end. `kv` is uint8 [kv_bytes], zeroed; `generations` has one number per block, at first 0. Readers
    reject it unless it is `sealed`. Raises ConfigError if the system has no sealed memory files or not enough memory.
    """

    def __init__(self, shape: Shape, *, sealed: bool = True) -> None:
        if sealed:
            check_platform()
        self.shape = shape
        try:
            self.file, mapping = _created(shape.nbytes, sealed=sealed)
        except OSError as error:
            raise ConfigError(f"KV memory of {shape.nbytes} bytes for readers on this host: {error}") from error
        words = memoryview(mapping)[: shape.blocks * _WORD].cast("Q")
        self.generations: MutableSequence[int] = words  # type: ignore[assignment]  # a memoryview cannot grow
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        for number in range(PROBES):
            _probe(whole, shape, number)[:] = pattern(number, PROBE_BYTES)
        self.kv = whole[shape.kv_at :]

    def seal(self) -> None:
        """Fix the size, and forbid later mappings that can write; existing ones stay. Raises OSError."""
        _seal(self.file)

    def __del__(self) -> None:
        if (file := self.__dict__.pop("file", None)) is not None:
            os.close(file)


class MappedMemory:
    """A reader's end: `file` of another process, mapped for reading. `kv` is uint8 [kv_bytes] and must not be written.
    Raises ConnectionError if the file is not of that shape, or its size can change.
    """

    def __init__(self, file: int, shape: Shape) -> None:
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & FIXED_SIZE != FIXED_SIZE:
            raise ConnectionError("the memory of the peer is not sealed")
        if (size := os.fstat(file).st_size) != shape.nbytes:
            raise ConnectionError(f"the memory of the peer has {size} bytes instead of {shape.nbytes}")
        mapping = mmap.mmap(file, shape.nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        # torch warns about memory that is not writable, unless it gets an address.
        array = (ctypes.c_ubyte * shape.nbytes).from_address(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
        array.mapping = mapping  # type: ignore[attr-defined]  # unmapped with the last tensor
        whole = torch.frombuffer(array, dtype=torch.uint8)
        self.kv = whole[shape.kv_at :]
        self._whole, self._shape = whole, shape
        self._generations = memoryview(mapping)[: shape.blocks * _WORD].cast("Q")

    def probe(self, number: int) -> Tensor:
        """Return piece `number` of the pattern as it is here: uint8 [PROBE_BYTES]."""
        return _probe(self._whole, self._shape, number)

    def generations(self, blocks: Sequence[int]) -> list[int]:
        """Return the current generations of these blocks."""
        return [self._generations[block] for block in blocks]


def _probe(whole: Tensor, shape: Shape, number: int) -> Tensor:
    return whole[shape.probe_at + number * PROBE_BYTES :][:PROBE_BYTES]


def check_platform() -> None:
    """Raise ConfigError unless stores of other processes become visible in order here, and memory can be sealed, which
    needs Linux 5.1.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise ConfigError(f"shared KV memory needs Linux on x86-64, not {sys.platform} on {platform.machine()}")
    try:
        file, mapping = _created(mmap.PAGESIZE, sealed=True)
    except OSError as error:
        raise ConfigError(f"shared KV memory needs sealed memory files: {error}") from error
    mapping.close()
    os.close(file)


def _created(nbytes: int, *, sealed: bool) -> tuple[int, mmap.mmap]:
    """Return a descriptor of new, zeroed memory, and a writable mapping, the only one if `sealed`. Raises OSError."""
    with ExitStack() as failing:
        file = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        failing.callback(os.close, file)
        os.ftruncate(file, nbytes)
        mapping = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED)
        failing.callback(mapping.close)
        with suppress(OSError):  # huge pages where shmem_enabled permits; a mapping gets them only when it is written
            mapping.madvise(mmap.MADV_HUGEPAGE)
            mapping.madvise(_POPULATE_WRITE)
        os.posix_fallocate(file, 0, nbytes)  # an error now instead of SIGBUS later
        if sealed:
            _seal(file)
        failing.pop_all()
    return file, mapping


def _seal(file: int) -> None:
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, FIXED_SIZE | _FUTURE_WRITE)
