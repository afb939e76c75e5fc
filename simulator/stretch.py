"""Steps of a worker in which nothing changes: each has one token more of every row than the one before."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

_ALIKE = 0.01  # steps whose lengths differ by less count as equally long
_MOST_PIECES = 16


class Stretch:
    """`count` steps from `began` on, of `first_s` seconds and each `more_s` longer than the one before; or as long as
    `drawn` says.
    """

    __slots__ = ("_ends", "began", "count", "first_s", "more_s")

    def __init__(self, began: float, count: int, first_s: float, more_s: float, drawn: Sequence[float] = ()) -> None:
        self.began, self.count, self.first_s, self.more_s = began, count, first_s, more_s
        self._ends = list(accumulate(drawn))

    def seconds(self, steps: int) -> float:
        """That the first so many take."""
        if self._ends:
            return self._ends[steps - 1] if steps else 0.0
        return steps * self.first_s + self.more_s * (steps * (steps - 1) / 2)

    def end(self, steps: int) -> float:
        """When the first so many are done."""
        return self.began + self.seconds(steps)

    def done_by(self, now: float) -> int:
        """How many are done then, if it is not at its end."""
        if self._ends:
            return min(bisect_right(self._ends, now - self.began), self.count)
        steps = min(self._about(now - self.began), self.count)
        while steps > 0 and self.end(steps) > now:
            steps -= 1
        while steps < self.count and self.end(steps + 1) <= now:
            steps += 1
        return steps

    def next_end(self, now: float) -> int:
        """The number of the step that is under way then: jobs wait for its end."""
        if self._ends:
            return min(bisect_left(self._ends, now - self.began) + 1, self.count)
        done = self.done_by(now)
        return max(done if self.end(done) == now else min(done + 1, self.count), 1)

    def pieces(self, steps: int) -> list[tuple[int, float]]:
        """The first so many: numbers of steps, and seconds of each of these."""
        if self._ends:
            return [(1, end - before) for before, end in zip((0.0, *self._ends), self._ends[:steps], strict=False)]
        growth = self.more_s * (steps - 1)
        count = min(max(1, math.ceil(growth / (self.first_s * _ALIKE))), _MOST_PIECES, steps) if self.first_s else 1
        if count == 1:
            return [(steps, self.first_s + growth / 2)]
        ends = [steps * place // count for place in range(count + 1)]
        spans = pairwise(ends)
        return [(end - begin, (self.seconds(end) - self.seconds(begin)) / (end - begin)) for begin, end in spans]

    def _about(self, elapsed: float) -> int:
        """Close to how many steps take so long."""
        if self.first_s <= 0 and self.more_s <= 0:
            return self.count
        if elapsed <= 0:
            return 0
        a, b = self.more_s / 2, self.first_s - self.more_s / 2
        if a <= 0:
            return int(elapsed / self.first_s)
        return int(2 * elapsed / (b + math.sqrt(b * b + 4 * a * elapsed)))  # the root, without cancellation
