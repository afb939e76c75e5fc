"""Clocks as arguments, so that tests (`baton.testing.FakeClock`) and the simulator control time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds (for durations and deadlines) and of wall seconds (for display and epochs)."""

    def monotonic(self) -> float: ...
    def wall(self) -> float: ...


class SystemClock:
    """The machine's clocks. `monotonic` is comparable between processes of one host (CLOCK_MONOTONIC)."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
