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


def unix_time(monotonic_s: float, clock: Clock) -> float:
    """Convert monotonic seconds to Unix time. A pause between reads of both clocks would shift the result, so the
    shortest of three pairs of reads counts.
    """
    reads = [(clock.monotonic(), clock.wall(), clock.monotonic()) for _ in range(3)]
    before, wall, after = min(reads, key=lambda read: read[2] - read[0])
    return monotonic_s - (before + after) / 2 + wall
