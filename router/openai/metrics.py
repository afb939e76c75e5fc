"""Metrics of a standalone gateway. In a router process the router counts instead."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from types import TracebackType

from baton import errors
from baton.clock import Clock
from baton.errors import BatonError, Cancelled
from baton.metrics import Metrics
from baton.rpc.v1 import common_pb2
from baton.stages import Stage, Timings, timings_of

_REFUSALS = (
    errors.InvalidRequest,
    errors.UnknownModel,
    errors.Unauthenticated,
    errors.PermissionDenied,
    errors.Unsupported,
    errors.Overloaded,
    errors.NoWorker,
)


class Visit(AbstractContextManager["Visit"]):
    """Measurement of one request from its arrival. An error that leaves the context ends it; it ends only once. Times
    are measured here, except for the stages that only the router can measure.
    """

    def __init__(self, clock: Clock, metrics: Metrics | None) -> None:
        self._metrics, self._clock = metrics, clock
        self._arrived = self._clock.monotonic()
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self.parts = common_pb2.Timings()  # of the longest call

    def tokens(self, choice: int, count: int) -> None:
        """Count tokens that just arrived."""
        now = self._clock.monotonic()
        self._first = now if self._first is None else self._first
        if self._metrics is not None and count:
            if choice in self._last:
                self._metrics.gap(now - self._last[choice], count)
            else:
                self._metrics.first(count)
        self._last[choice] = now

    def completed(self, timings: common_pb2.Timings) -> None:
        """Record the router's timings of a call; the longest call counts."""
        if timings.e2e_s >= self.parts.e2e_s:
            self.parts = timings

    def finished(self) -> None:
        """Record that the answer was written."""
        if self._metrics is not None:
            self._metrics.ended("finished", self._timings(), staged=False)
            self._metrics = None

    def failed(self, error: BatonError) -> None:
        """Record that the request ended with `error`."""
        if self._metrics is None:
            return
        refused = isinstance(error, _REFUSALS) and self._first is None
        self._metrics.ended("refused" if refused else "cancelled" if isinstance(error, Cancelled) else "failed")
        if refused:
            self._metrics.refused(error)
        self._metrics = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, BatonError):
            self.failed(error)
        elif isinstance(error, asyncio.CancelledError):
            self.failed(Cancelled("the client disconnected"))

    def _timings(self) -> Timings:
        queue, prefill = self.parts.queue_s, self.parts.prefill_s
        rest = max(0.0, self._clock.monotonic() - self._arrived - queue - prefill)
        ttft = 0.0 if self._first is None else self._first - self._arrived
        return timings_of({Stage.QUEUE: queue, Stage.PREFILL: prefill, Stage.DECODE: rest}, ttft)
