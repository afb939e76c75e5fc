"""Memory read speed of this process: the best of several ways, because the best is the limit."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.lib import isa
from benchmarks.lib.protocol import clock

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = Path(__file__).with_name("read.c")
STREAMS = (1, 4, 8)
HUGE = 2 << 20
LEAST_S = 0.05  # shorter measurements mostly measure their own start


class Reader:
    """A buffer of at least `size` bytes, in huge pages if possible, and ways to read it."""

    def __init__(self, size: int, threads: int, cache: Path) -> None:
        self._size = -(-size // HUGE) * HUGE
        self._map = mmap.mmap(-1, self._size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(self._map, dtype=torch.float32)
        skip = -whole.data_ptr() % HUGE // 4
        self._data = whole[skip : skip + self._size // 4].fill_(1.0)  # pages exist only after a write
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._ways: dict[str, Callable[[int], object]] = {"torch.sum": self._torch_sum}
        library = _compiled(cache)
        if library is not None:
            self._ways |= {f"C, {n} streams a thread": self._c_loop(library, f"read_{n}") for n in STREAMS}

    def measure(self, repeats: int = 3) -> dict[str, float]:
        """Return bytes per second of each way, the best of `repeats`."""
        return {name: max(self._rate(way) for _ in range(repeats)) for name, way in self._ways.items()}

    def _rate(self, way: Callable[[int], object]) -> float:
        passes, seconds = 1, _seconds(way, 1)
        if seconds < LEAST_S:
            passes = int(LEAST_S / seconds) + 1
            seconds = _seconds(way, passes)
        return self._size * passes / seconds

    def _torch_sum(self, passes: int) -> object:
        return [self._data.sum() for _ in range(passes)]

    def _c_loop(self, library: ctypes.CDLL, name: str) -> Callable[[int], object]:
        function = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)((name, library))
        part = self._size // self._threads // 64 * 64
        starts = [self._data.data_ptr() + index * part for index in range(self._threads)]

        def read(passes: int) -> object:
            jobs = [self._pool.submit(function, start, part // 8, passes) for start in starts]
            return [job.result() for job in jobs]

        return read


def _seconds(way: Callable[[int], object], passes: int) -> float:
    began = clock()
    way(passes)
    return clock() - began


def _compiled(cache: Path) -> ctypes.CDLL | None:
    """Return the C loop, compiled for the instructions of this run, or None without a C compiler."""
    compiler, library = shutil.which("cc"), cache / f"read-{isa.here()}.so"
    if compiler is None:
        return None
    cache.mkdir(parents=True, exist_ok=True)
    flags = ["-O3", f"-march={isa.MARCH[isa.here()]}", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", str(library), str(SOURCE)], check=True)
    return ctypes.CDLL(str(library))
