"""Memory for weights: huge pages for large tensors, and release of file pages that were copied."""

from __future__ import annotations

import ctypes
import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

HUGE_PAGE = 2 * 2**20
CACHE_LINE = 64
SMALL = 2**15  # smaller tensors take ordinary memory
CHUNK = 64 * 2**20
_LIBC = ctypes.CDLL(None, use_errno=True)


class Arena:
    """An allocator of uninitialised CPU tensors, 64-byte aligned, on huge pages from 32 KiB. On ordinary pages, threads
    that stream weights wait for address translation instead of memory. Memory becomes resident when written and is
    freed with the last tensor of its mapping. A tensor of 32 MiB or more has its own mapping, which begins at a huge
    page; smaller tensors share mappings of 64 MiB.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if size < SMALL:
            return torch.empty(shape, dtype=dtype)
        if size >= CHUNK // 2:
            return _mapped(size).view(dtype).view(shape)
        if size > len(self._rest):
            self._rest = _mapped(CHUNK)
        place, self._rest = self._rest[:size], self._rest[math.ceil(size / CACHE_LINE) * CACHE_LINE :]
        return place.view(dtype).view(shape)


def _mapped(size: int) -> Tensor:
    """Return a private mapping as bytes, from the start of a huge page. Its last partial huge page stays ordinary."""
    mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    with suppress(OSError, AttributeError):  # kernels and platforms without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE_PAGE * HUGE_PAGE)
    return whole[start : start + size]


def drop_pages(mapped: Tensor) -> None:
    """Free the pages of a contiguous view of a file until it is read again, if the platform supports that."""
    first = math.ceil(mapped.data_ptr() / mmap.PAGESIZE) * mmap.PAGESIZE
    size = (mapped.data_ptr() + mapped.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0 and hasattr(mmap, "MADV_DONTNEED"):
        _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
