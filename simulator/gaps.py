"""How long the steps of one worker took, for as long as somebody may ask: what a request's own gaps were."""

from __future__ import annotations

from collections import deque
from itertools import dropwhile


class Gaps:
    """Steps by number, in pieces of equal length."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, int, float]] = deque()  # first step, the one behind the last, seconds of each

    def add(self, first: int, count: int, seconds: float) -> None:
        """These steps took so long each."""
        self._pieces.append((first, first + count, seconds))

    def forget(self, before: int) -> None:
        """Nobody will ask for steps before this one."""
        while self._pieces and self._pieces[0][1] <= before:
            self._pieces.popleft()

    def of(self, first: int, end: int) -> list[tuple[float, int]]:
        """Seconds and how many, of steps first..end-1."""
        seen = dropwhile(lambda piece: piece[1] <= first, self._pieces)
        pieces = ((seconds, min(stop, end) - max(begin, first)) for begin, stop, seconds in seen)
        return [(seconds, count) for seconds, count in pieces if count > 0]


def percentile(gaps: list[tuple[float, int]], percent: float) -> float:
    """The gap that `percent` of all do not exceed; 0: there are none."""
    left = percent / 100.0 * sum(count for _, count in gaps)
    for seconds, count in sorted(gaps):
        left -= count
        if left <= 1e-9:
            return seconds
    return max((seconds for seconds, _ in gaps), default=0.0)
