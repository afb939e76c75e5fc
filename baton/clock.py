"""Time as an argument, so that tests and the simulator can hold it still.

`Clock` is what code asks for; `SystemClock` is real, `FakeClock` moves only when told.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds (for durations and deadlines) and of wall seconds (for humans and epochs)."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The machine's clocks. `monotonic` is comparable between processes of one host (CLOCK_MONOTONIC)."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class FakeClock:
    """Stands still until `advance` is called; both clocks move together."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move time forward. Raises ValueError for a negative step: monotonic time does not go back."""
        if seconds < 0:
            raise ValueError(f"time does not go back ({seconds} s)")
        self._now += seconds
