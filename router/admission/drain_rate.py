"""The service rate of the queue."""

from __future__ import annotations

import math

from baton.clock import Clock

_WINDOW_S = 5.0
_WINDOW_REQUESTS = 32  # a longer window if this many requests take longer
_ENOUGH = 8.0  # requests before the rate counts as measured


class DrainRate:
    """The service rate, exponentially weighted over the last 5 s, or the last 32 requests if those take longer. Only
    samples taken while the queue is non-empty count. A gap counts as `longest_s` at most: no request waits longer.
    """

    def __init__(self, clock: Clock, longest_s: float) -> None:
        self._clock = clock
        self._longest_s = longest_s
        self._requests = self._tokens = self._busy_s = 0.0
        self._since: float | None = None  # the last sample while the queue is non-empty, else None

    @property
    def measured(self) -> bool:
        """Whether enough requests were served for an estimate."""
        return self._requests >= _ENOUGH

    @property
    def requests_per_s(self) -> float:
        """Requests served per second, or 0 until `measured`."""
        return self._requests / self._time() if self.measured else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens served per second, or 0 until `measured`."""
        return self._tokens / self._time() if self.measured else 0.0

    def watch(self, *, waiting: bool) -> None:
        """Record whether the queue is non-empty. Call it after every possible change."""
        if waiting and self._since is None:
            self._since = self._clock.monotonic()
        elif not waiting:
            self._busy_s += self._lap()
            self._since = None

    def served(self, tokens: int) -> None:
        """Record that a request of `tokens` tokens was served. Ignored while the queue is empty."""
        if self._since is None:
            return
        gap = self._lap()
        keep = max(1 - 1 / _WINDOW_REQUESTS, math.exp(-gap / _WINDOW_S))
        self._requests = self._requests * keep + 1
        self._tokens = self._tokens * keep + tokens
        self._busy_s = self._busy_s * keep + gap

    def _lap(self) -> float:
        """Return the seconds since the last sample."""
        if self._since is None:
            return 0.0
        now = self._clock.monotonic()
        gap, self._since = min(now - self._since, self._longest_s), now
        return gap

    def _time(self) -> float:
        waited = 0.0 if self._since is None else self._clock.monotonic() - self._since
        return max(self._busy_s + waited, 1e-6)
