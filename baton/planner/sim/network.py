"""KV transfers: each worker has a way out and a way in, and concurrent flows share a way evenly.

A flow gets the lesser of its two shares. Bandwidth that the other end leaves unused is lost: a lower bound of fair
queueing that looks only at the flow's own ends. A flow that waits for more KV takes no share.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.planner.sim.event_loop import Event, Kernel


class Way:
    """One direction of one worker's network."""

    __slots__ = ("bytes_per_s", "flows")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.flows: dict[Flow, None] = {}  # flows in transfer

    def set_rate(self, bytes_per_s: float) -> None:
        if bytes_per_s != self.bytes_per_s:
            self.bytes_per_s = bytes_per_s
            for flow in list(self.flows):
                flow.adapt()


class Flow:
    """The KV transfer of one handoff. `done` is called when everything has arrived after `close`."""

    __slots__ = ("_closed", "_due", "_event", "_kernel", "_left", "_rate", "_since", "_wakes", "_ways", "done", "moved")

    def __init__(self, kernel: Kernel, source: Way, target: Way, done: Callable[[], object]) -> None:
        self.done = done
        self.moved = 0.0  # bytes transferred and queued
        self._kernel, self._ways = kernel, (source, target)
        self._left = self._rate = self._since = 0.0
        self._due = self._wakes = 0.0  # end of the queued transfer, and the timer that checks it, which is never later
        self._event: Event | None = None
        self._closed = False

    def add(self, nbytes: float) -> None:
        if self._closed or nbytes <= 0:
            return
        self.moved += nbytes
        active, self._left = self._active, self._left + nbytes
        if active:
            self.adapt()
            return
        self._since = self._kernel.now
        for way in self._ways:
            way.flows[self] = None
        self._adapt_all()

    def close(self) -> None:
        self._closed = True
        if not self._active:
            self._finish()

    def cancel(self) -> None:
        """Stop the transfer. `done` is not called."""
        self._closed, self.done = True, _nothing
        if self._active:
            self._stop()

    def adapt(self) -> None:
        now, (source, target) = self._kernel.now, self._ways
        self._left -= self._rate * (now - self._since)
        self._since = now
        ours, theirs = source.bytes_per_s / len(source.flows), target.bytes_per_s / len(target.flows)
        self._rate = rate = ours if ours < theirs else theirs
        self._due = due = now + self._left / rate if self._left > 0.0 else now
        if self._event is None or due < self._wakes:
            self._wake()

    def _wake(self) -> None:
        if self._event is not None:
            self._event.cancel()
        self._wakes = self._due
        self._event = self._kernel.timer(self._due, self._woken)

    @property
    def _active(self) -> bool:
        return self in self._ways[0].flows

    def _stop(self) -> None:
        if self._event is not None:
            self._event.cancel()
        self._event, self._rate = None, 0.0
        for way in self._ways:
            del way.flows[self]
        self._adapt_all()

    def _adapt_all(self) -> None:
        """Adapt all flows that share a way with this one, and this one while it transfers."""
        source, target = self._ways
        for flow in source.flows:
            flow.adapt()
        for flow in target.flows:
            if flow._ways[0] is not source:
                flow.adapt()

    def _woken(self) -> None:
        self._event = None
        if self._due > self._kernel.now:  # the flow became slower or longer
            self._wake()
            return
        self._left = 0.0
        self._stop()
        if self._closed:
            self._finish()

    def _finish(self) -> None:
        done, self.done = self.done, _nothing  # `done` refers to the owner of this flow
        done()


def _nothing() -> None:
    pass
