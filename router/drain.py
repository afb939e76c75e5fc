"""How fast the queue drains, as measured while somebody waits: what comes and goes without a wait says nothing."""

from __future__ import annotations

import math

from baton.clock import Clock

_WINDOW_S = 5.0
_WINDOW_REQUESTS = 32  # where so many take longer than the time
_ENOUGH = 8.0  # requests, before that nothing is known


class Drain:
    """Exponentially weighted over the last seconds, or the last requests if those take longer.

    A gap of more than `longest_s` counts as that when it is over: nobody waits longer, and workers came back.
    """

    def __init__(self, clock: Clock, longest_s: float) -> None:
        self._clock = clock
        self._longest_s = longest_s
        self._requests = self._tokens = self._busy_s = 0.0
        self._since: float | None = None  # somebody has been waiting, and nobody was served

    @property
    def measured(self) -> bool:
        """Whether enough was served to say anything."""
        return self._requests >= _ENOUGH

    @property
    def requests_per_s(self) -> float:
        """0 until `measured`."""
        return self._requests / self._time() if self.measured else 0.0

    @property
    def tokens_per_s(self) -> float:
        """0 until `measured`."""
        return self._tokens / self._time() if self.measured else 0.0

    def watch(self, *, waiting: bool) -> None:
        """Somebody waits, or nobody. Say it whenever it may have changed."""
        if waiting and self._since is None:
            self._since = self._clock.monotonic()
        elif not waiting:
            self._busy_s += self._lap()
            self._since = None

    def served(self, tokens: int) -> None:
        """A request of `tokens` tokens was. Counts only while somebody waits."""
        if self._since is None:
            return
        gap = self._lap()
        keep = max(1 - 1 / _WINDOW_REQUESTS, math.exp(-gap / _WINDOW_S))
        self._requests = self._requests * keep + 1
        self._tokens = self._tokens * keep + tokens
        self._busy_s = self._busy_s * keep + gap

    def _lap(self) -> float:
        """Seconds since the last time."""
        if self._since is None:
            return 0.0
        now = self._clock.monotonic()
        gap, self._since = min(now - self._since, self._longest_s), now
        return gap

    def _time(self) -> float:
        waited = 0.0 if self._since is None else self._clock.monotonic() - self._since
        return max(self._busy_s + waited, 1e-6)
