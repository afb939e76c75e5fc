"""Channel ends that corrupt or hold data, and methods that stop before they run."""

import threading
from collections.abc import Callable
from typing import Any

from baton.errors import ChannelBroken
from kvtransfer import wire
from tests.support.time_factor import scaled


class Wrapped:
    """A transport with wrapped ends, another name or another reach."""

    def __init__(self, inner, wrap=lambda end: end, name: str = "", reach: str | None = None) -> None:
        self.name = name or inner.name
        self.reach = inner.reach if reach is None else reach
        self.one_sided, self.sends = inner.one_sided, inner.sends
        self._inner = inner
        self._wrap = wrap

    def open(self, *args):
        return self._wrap(self._inner.open(*args))


def wrapped(wrap) -> Callable[[Any], list[Wrapped]]:
    """Return a function that wraps the ends of a transport."""
    return lambda inner: [Wrapped(inner, wrap)]


class WrappedEnd:
    """An end with some methods replaced."""

    def __init__(self, inner, **instead: Callable[..., None]) -> None:
        self.inner = inner
        vars(self).update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class FlippingEnd(WrappedEnd):
    """A receiver's end that flips one byte of frame `at`, after the wire and before the digest."""

    def __init__(self, inner, at: int) -> None:
        super().__init__(inner)
        self._at = at

    def finish(self, number: int) -> None:
        self.inner.finish(number)
        if number == self._at:
            self.inner.slot(number)[0] ^= 1


class Gate:
    """Holds a sender's ends before each frame of a handoff until the test releases it."""

    def __init__(self) -> None:
        self.channels = 0
        self._stopped, self._open = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, inner) -> WrappedEnd:
        def start(number: int, nbytes: int) -> None:
            if number >= wire.FRAMES:
                self._hold()
            inner.start(number, nbytes)

        self.channels += 1
        return WrappedEnd(inner, start=start)

    def wait_stopped(self) -> None:
        assert self._stopped.acquire(timeout=scaled(10))

    def let(self, frames: int) -> None:
        self._open.release(frames)

    def _hold(self) -> None:
        self._stopped.release()
        if not self._open.acquire(timeout=scaled(20)):
            raise ChannelBroken("the gate stayed shut")


class Stopped:
    """Makes the next call of a method wait, before it does anything, until `go_on`."""

    def __init__(self, owner, name: str) -> None:
        self._entered, self._leave = threading.Event(), threading.Event()
        call = getattr(owner, name)

        def stopping(*args):
            setattr(owner, name, call)
            self._entered.set()
            assert self._leave.wait(scaled(10))
            return call(*args)

        setattr(owner, name, stopping)

    def wait(self) -> None:
        assert self._entered.wait(scaled(10))

    def go_on(self) -> None:
        self._leave.set()
