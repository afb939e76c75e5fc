"""Process on the second core of `transfer_slowdown`: it computes without memory, or reads the KV of the first one."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import torch

from baton.engine.memory.exposed import MappedMemory, Shape
from benchmarks.lib.protocol import serve
from benchmarks.lib.transfer_measure import DEFAULTS
from benchmarks.lib.transfer_peer import blocks_of, make_kv
from kvtransfer.frames import Progress
from kvtransfer.transports.base import Places
from kvtransfer.transports.shm import MappedPool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.lib.protocol import Answer, Handler, Setup


class Load:
    """One load at a time, on a thread."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._stop = threading.Event()
        self._thread = threading.Thread()
        self._pool: MappedPool | None = None
        self._nbytes, self._began = 0, 0.0

    def map(self, path: str, blocks: int, kv_bytes: int) -> Answer:
        """Map the exposed memory at `path`, and allocate as much to read into."""
        self._kv = make_kv(self._setup, "cpu")
        file = os.open(path, os.O_RDONLY)
        memory = MappedMemory(file, Shape(blocks, kv_bytes))
        os.close(file)
        self._generations = memory.generations
        self._pool = MappedPool(self._kv.reader_of(self._kv.layout, blocks, memory.kv), memory)
        return {}

    def begin(self, kind: str) -> Answer:
        """Start the load `busy` or `read`."""
        self._stop.clear()
        self._nbytes, self._began = 0, time.monotonic()
        piece = {"busy": lambda: sum(range(10_000)), "read": self._read}[kind]
        self._thread = threading.Thread(target=self._repeat, args=(piece,))
        self._thread.start()
        return {}

    def end(self) -> Answer:
        """End it. Returns the bytes per second that were read."""
        self._stop.set()
        self._thread.join()
        return {"bytes_per_s": self._nbytes / (time.monotonic() - self._began)}

    def _repeat(self, piece: Callable[[], object]) -> None:
        while not self._stop.is_set():
            piece()

    def _read(self) -> None:
        """Read all KV once, in frames as they are announced."""
        assert self._pool is not None
        kv, pool = self._kv, self._pool
        tokens = min(kv.total_blocks, pool.total_blocks) * pool.block_size
        progress, theirs, ours = Progress(kv.layout, 0, tokens), blocks_of(pool.cache, 1), blocks_of(kv, 2)
        progress.computed(kv.layout.layers, tokens)
        while (frame := progress.next(DEFAULTS.frame_size * DEFAULTS.credits)) is not None and not self._stop.is_set():
            needed = theirs[: -(-frame.end // pool.block_size)]
            pool.read(kv, frame, Places(needed, self._generations(needed)), ours)
            progress.took(frame)
            self._nbytes += frame.nbytes


def load(setup: Setup) -> tuple[Answer, Mapping[str, Handler]]:
    """Return an empty description and the handlers for `serve`."""
    torch.set_num_threads(1)
    one = Load(setup)
    return {}, {"map": one.map, "begin": one.begin, "end": one.end}


if __name__ == "__main__":
    serve(load)
