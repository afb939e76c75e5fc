"""A channel within one process: for colocated workers and for tests. Shipped, and held to the same contract."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NoReturn

import torch

from baton.errors import ChannelBroken

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvtransfer.transport import ChannelName, KeyRelay, Side


class MemoryTransport:
    """Both workers of one process must be given the same object: it is where their ends meet."""

    name = "memory"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[ChannelName, MemoryChannel] = {}

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, deadline_s: float) -> MemoryChannel:
        """The first end makes the channel, the second finds it. Each object is both ends; a late end times out."""
        with self._lock:
            found = self._waiting.pop(name, None)
            return found or self._waiting.setdefault(name, MemoryChannel(name, deadline_s))


class MemoryChannel:
    """A rendezvous of one message: `send` returns when `recv` has copied it, as with gloo."""

    def __init__(self, name: ChannelName, deadline_s: float) -> None:
        self._name = name
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._offered: Tensor | None = None
        self._closed = False

    def send(self, data: Tensor) -> None:
        with self._changed:
            self._offered = data
            self._changed.notify_all()
            self._wait(lambda: self._offered is None)

    def recv(self, out: Tensor) -> None:
        with self._changed:
            self._wait(lambda: self._offered is not None)
            self._take(out)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _take(self, out: Tensor) -> None:
        if self._offered is None or self._offered.shape != out.shape:
            self._fail("the message is not of the posted size")
        out.copy_(self._offered)
        self._offered = None

    def _wait(self, ready: Callable[[], bool]) -> None:
        if not self._changed.wait_for(lambda: self._closed or ready(), self._deadline_s):
            self._fail(f"no progress within {self._deadline_s} s")
        if not ready():
            self._fail("closed by the other end")

    def _fail(self, why: str) -> NoReturn:
        self._closed = True
        self._changed.notify_all()
        raise ChannelBroken(f"memory channel {self._name}: {why}")
