"""Ends of a channel that spoil or stop what goes through them, around ends that work."""

import threading

import torch

from baton.errors import ChannelBroken
from kvtransfer import probe


class Wrapped:
    """A transport whose ends are wrapped, or which has another name or reach."""

    def __init__(self, inner, wrap=lambda end: end, name: str = "", reach: str | None = None) -> None:
        self.name, self.device = name or inner.name, inner.device
        self.reach = inner.reach if reach is None else reach
        self._inner = inner
        self._wrap = wrap

    def open(self, *args):
        return self._wrap(self._inner.open(*args))


class WrappedEnd:
    """Does what the end in it does."""

    def __init__(self, inner) -> None:
        self.inner = inner
        self.express = inner.express

    def slot(self, number: int) -> torch.Tensor:
        return self.inner.slot(number)

    def start(self, number: int, nbytes: int) -> None:
        self.inner.start(number, nbytes)

    def finish(self, number: int) -> None:
        self.inner.finish(number)

    def close(self) -> None:
        self.inner.close()


class FlippingEnd(WrappedEnd):
    """A receiver's end. Flips one byte of frame `at` of the channel: between the wire and the digest."""

    def __init__(self, inner, at: int) -> None:
        super().__init__(inner)
        self._at = at
        self._nbytes = 0

    def start(self, number: int, nbytes: int) -> None:
        if number == self._at:
            self._nbytes = nbytes
        self.inner.start(number, nbytes)

    def finish(self, number: int) -> None:
        self.inner.finish(number)
        if number == self._at:
            self.inner.slot(number)[self._nbytes // 2] ^= 1


class GatedEnd(WrappedEnd):
    """A sender's end that stops before each frame of a handoff until the test lets it through."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.arrived = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def start(self, number: int, nbytes: int) -> None:
        if number >= probe.FRAMES:
            self.arrived.release()
            if not self.gate.acquire(timeout=20):
                raise ChannelBroken("the gate stayed shut")
        self.inner.start(number, nbytes)
