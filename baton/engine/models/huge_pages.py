"""Memory for weights: huge pages for what is large, and pages of files given back as soon as they were copied."""

from __future__ import annotations

import ctypes
import math
import mmap
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

HUGE_PAGE = 2 * 2**20
CACHE_LINE = 64
SMALL = 2**20  # below it, ordinary memory
CHUNK = 64 * 2**20

_LIBC = ctypes.CDLL(None, use_errno=True)


class Arena:
    """Gives tensors on the CPU, 64-byte aligned and without content; from 1 MiB up on huge pages.

    With ordinary pages, a few threads that stream weights wait for address translation instead of for memory. Memory is
    resident only once it is written, and freed with the last tensor of its mapping: tensors of 32 MiB and more have one
    each, which begins at a huge page; smaller ones lie close together in mappings of 64 MiB.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of this shape, to be filled."""
        size = math.prod(shape) * dtype.itemsize
        if size < SMALL:
            return torch.empty(shape, dtype=dtype)
        return (_mapped(size) if size >= CHUNK // 2 else self._cut(size)).view(dtype).view(shape)

    def _cut(self, size: int) -> Tensor:
        if size > len(self._rest):
            self._rest = _mapped(CHUNK)
        place, self._rest = self._rest[:size], self._rest[math.ceil(size / CACHE_LINE) * CACHE_LINE :]
        return place


def _mapped(size: int) -> Tensor:
    """A private mapping as bytes, from a huge page on. What does not fill a huge page at its end stays ordinary."""
    mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    with suppress(OSError, AttributeError):  # a kernel, or a platform, without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE_PAGE * HUGE_PAGE)
    return whole[start : start + size]


def drop_pages(mapped: Tensor) -> None:
    """Let go of the memory behind a contiguous view of a file that is not needed any more; read again, it is reloaded.

    Nothing happens on a platform that cannot do it: the pages are clean, and go when memory is short.
    """
    first = math.ceil(mapped.data_ptr() / mmap.PAGESIZE) * mmap.PAGESIZE
    size = (mapped.data_ptr() + mapped.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0 and hasattr(mmap, "MADV_DONTNEED"):
        _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
