"""Sending process of the raw limits. It starts the receiving one (`transfer_raw_partner`) and takes the times."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.lib import transfer_bare as bare
from benchmarks.lib.protocol import serve
from benchmarks.lib.transfer_partner import Partner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from benchmarks.lib.protocol import Answer, Handler, Setup

DEVICES = {"gloo": "cpu", "nccl": "cuda:0"}
MAX_RING = 64 << 20  # bytes of shared memory, for the largest requested frames and slots


class Raw:
    """The measurements. Each returns seconds by way, so that the best way is the limit."""

    def __init__(self, setup: Setup) -> None:
        self._file = os.memfd_create("baton-bench", os.MFD_CLOEXEC)
        os.ftruncate(self._file, MAX_RING)
        self._partner = Partner("benchmarks.lib.transfer_raw_partner", setup, [self._file])
        self._groups: dict[str, bare.Group] = {}

    def pair(self, kind: str, nbytes: int, frame: int, slots: int, repeats: int) -> Answer:
        """Measure `kind` gloo or nccl, from the first send until the receiver signals completion."""
        group = self._group(kind)
        data, byte = bare.buffer(nbytes, DEVICES[kind]), bare.buffer(1, DEVICES[kind])

        def run(window: int) -> float:
            self._partner.tell("pair", kind=kind, nbytes=nbytes, frame=frame, window=window)
            _take(group, byte)  # the receiver is ready
            began = time.perf_counter()
            bare.stream(group.send, bare.RECEIVER, data, frame, window)  # type: ignore[union-attr]  # not in the stub
            _take(group, byte)
            took = time.perf_counter() - began
            self._partner.answer()
            return took

        windows = dict.fromkeys((1, slots))
        return {"ways": {f"{window} in flight": _repeated(partial(run, window), repeats) for window in windows}}

    def shm(self, nbytes: int, frame: int, slots: int, repeats: int) -> Answer:
        """Measure a copy into a shared ring and concurrently out of it, from the first byte to the last."""
        ring, data = bare.SharedRing(self._file, slots, frame), bare.buffer(nbytes)
        ring.reset()
        self._partner.ask("ready", file=self._file, nbytes=nbytes, frame=frame, slots=slots)

        def run() -> float:
            self._partner.tell("shm")
            ring.wait_reader()
            began = time.perf_counter()
            ring.write(data)
            took = time.perf_counter() - began
            self._partner.answer()
            return took

        return {"ways": {"memcpy in, memcpy out": _repeated(run, repeats)}}

    def nixl(self, nbytes: int, frame: int, slots: int, repeats: int) -> Answer:
        """Measure reads from the partner's memory by bare NIXL, on the interface and with the settings of Baton."""
        try:
            reader = bare.NixlReader(nbytes, lambda: self._partner.ask("nixl", nbytes=nbytes))
        except (ImportError, OSError) as error:
            raise RuntimeError(f"NIXL is not installed, or cannot be used here: {error}") from error

        def run(window: int) -> float:
            return _timed(lambda: reader.read(frame, window))

        windows = dict.fromkeys((1, slots))
        ways = {f"{window} in flight": _repeated(partial(run, window), repeats) for window in windows}
        reader.close()
        return {"ways": ways}

    def copy(self, nbytes: int, repeats: int) -> Answer:
        """Measure one copy between two buffers of one process."""
        source, target = bare.buffer(nbytes), bare.buffer(nbytes)
        ways: dict[str, Callable[[], object]] = {
            "memcpy": lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes),
            "torch": lambda: target.copy_(source),
        }
        return {"ways": {name: _repeated(partial(_timed, way), repeats) for name, way in ways.items()}}

    def device_copy(self, nbytes: int, repeats: int) -> Answer:
        """Measure one copy within the memory of GPU 0, from the CPU: launch and wait."""
        source, target = bare.buffer(nbytes, "cuda:0"), bare.buffer(nbytes, "cuda:0")

        def run() -> None:
            target.copy_(source)
            torch.cuda.synchronize()

        return {"ways": {"device to device": _repeated(partial(_timed, run), repeats)}}

    def _group(self, kind: str) -> bare.Group:
        if kind == "nccl" and torch.cuda.device_count() < 2:
            raise RuntimeError("a bare NCCL pair needs two GPUs")
        if kind not in self._groups:
            self._groups[kind] = self._meet(kind)
        return self._groups[kind]

    def _meet(self, kind: str) -> bare.Group:
        with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
            store = str(Path(folder) / "store")
            self._partner.tell("meet", kind=kind, store=store)
            group = bare.PAIRS[kind](store, bare.SENDER)
            _take(group, bare.buffer(1, DEVICES[kind]))  # the file is not needed from here on
            self._partner.answer()
        return group


def _take(group: bare.Group, byte: Tensor) -> None:
    bare.stream(group.recv, bare.RECEIVER, byte, 1, 1)  # type: ignore[union-attr]  # not in the stub


def _repeated(run: Callable[[], float], repeats: int) -> list[float]:
    run()  # warms caches and pages
    return [run() for _ in range(repeats)]


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def load(setup: Setup) -> tuple[Answer, Mapping[str, Handler]]:
    """Return the version and the handlers for `serve`."""
    torch.set_num_threads(1)
    raw = Raw(setup)
    handlers: dict[str, Handler] = {
        "pair": raw.pair,
        "shm": raw.shm,
        "nixl": raw.nixl,
        "copy": raw.copy,
        "device_copy": raw.device_copy,
    }
    return {"version": f"torch {torch.__version__}"}, handlers


if __name__ == "__main__":
    serve(load)
