"""Copies of weights to a GPU: a thread stages pieces in two pinned buffers while the device fetches them.

During a copy, the caller reads the next tensor of the file, to check and digest it. A copy from pageable memory would
block the caller, and pass through a small staging buffer of the driver.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

BUFFERS = 2
AHEAD = 2  # tensors that may wait, so that pages of the file are not read long before they are copied
Piece = tuple[Tensor, Tensor]  # place on the device, and its source of the same shape
Wait = Callable[[], object]


class Lane(Protocol):
    """A way to a device."""

    def buffer(self, nbytes: int) -> Tensor:
        """Return host memory that `send` can read: uint8 [nbytes]."""

    def send(self, place: Tensor, staged: Tensor) -> Wait:
        """Start a copy of the same shape and dtype. The result waits until it is done; then `staged` may change."""


class CudaLane:
    """Copies on a stream of their own. It waits for earlier work on the default stream, which may use the memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # its gap

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def send(self, place: Tensor, staged: Tensor) -> Wait:
        self._stream.wait_stream(torch.cuda.default_stream(place.device))
        with torch.cuda.stream(self._stream):
            place.copy_(staged, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # its gap
            event.record(self._stream)
        return event.synchronize


class Uploads:
    """Copies tensors in order, each in pieces of at most `nbytes` bytes in the dtype of their place."""

    def __init__(self, lane: Lane, nbytes: int) -> None:
        self._lane, self._nbytes = lane, nbytes
        self._jobs: queue.Queue[tuple[Iterable[Piece], Callable[[], object]] | None] = queue.Queue(AHEAD)
        self._buffers: list[Tensor] = []
        self._turns = cycle(range(BUFFERS))
        self._waits: dict[int, Wait] = {}  # by buffer
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def copy(self, pieces: Iterable[Piece], staged: Callable[[], object]) -> None:
        """Copy the pieces of a tensor, then call `staged` on the thread: the sources are not read any more. Raises the
        error of an earlier copy.
        """
        if self._error is not None:
            raise self._error
        self._jobs.put((pieces, staged))

    def settle(self) -> None:
        """Wait until all tensors are in place. Raises the error of a copy."""
        self._jobs.join()
        for wait in self._waits.values():
            wait()
        self._waits.clear()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread after the tensors that wait. Idempotent."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()

    def _run(self) -> None:
        for pieces, staged in iter(self._jobs.get, None):
            if self._error is None:
                self._error = self._take(pieces, staged)
            self._jobs.task_done()

    def _take(self, pieces: Iterable[Piece], staged: Callable[[], object]) -> Exception | None:
        try:
            for place, source in pieces:
                self._upload(place, source, next(self._turns))
            staged()
        except Exception as error:  # noqa: BLE001  (thread boundary: the caller raises it)
            return error
        return None

    def _upload(self, place: Tensor, source: Tensor, turn: int) -> None:
        if turn == len(self._buffers):
            self._buffers.append(self._lane.buffer(self._nbytes))
        if (wait := self._waits.pop(turn, None)) is not None:
            wait()
        staged = self._buffers[turn][: place.nbytes].view(place.dtype).view(place.shape)
        staged.copy_(source)
        self._waits[turn] = self._lane.send(place, staged)
