"""Step times of one simulated worker: its cost, the spread, and slowdown by other workers of its host.

A `Stretch` is a run of steps with a constant batch, in which each sequence grows by one token a step.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from random import Random

from baton.planner.sim.scenario import Contention, Pool

_EQUAL = 0.01  # steps with times that differ by less count as equal
_MOST_PIECES = 16


class Stretch:
    """`count` steps from `began`: the first takes `first_s`, each next `more_s` longer. `drawn` overrides both."""

    __slots__ = ("_ends", "began", "count", "first_s", "more_s")

    def __init__(self, began: float, count: int, first_s: float, more_s: float, drawn: Sequence[float] = ()) -> None:
        self.began, self.count, self.first_s, self.more_s = began, count, first_s, more_s
        self._ends = list(accumulate(drawn))

    def seconds(self, steps: int) -> float:
        if self._ends:
            return self._ends[steps - 1] if steps else 0.0
        return steps * self.first_s + self.more_s * (steps * (steps - 1) / 2)

    def end(self, steps: int) -> float:
        """Return the time at which the first `steps` steps are done."""
        return self.began + self.seconds(steps)

    def done_by(self, now: float) -> int:
        return bisect_right(range(1, self.count + 1), now, key=self.end)

    def next_end(self, now: float) -> int:
        """Return the number of the step under way at `now`; jobs wait for its end."""
        return min(bisect_left(range(1, self.count + 1), now, key=self.end) + 1, self.count)

    def pieces(self, steps: int) -> list[tuple[int, float]]:
        """Return the first `steps` steps as pairs: number of steps, and seconds of each."""
        if self._ends:
            return [(1, end - before) for before, end in zip((0.0, *self._ends), self._ends[:steps], strict=False)]
        growth = self.more_s * (steps - 1)
        count = min(max(1, math.ceil(growth / (self.first_s * _EQUAL))), _MOST_PIECES, steps) if self.first_s else 1
        if count == 1:
            return [(steps, self.first_s + growth / 2)]
        ends = [steps * place // count for place in range(count + 1)]
        spans = pairwise(ends)
        return [(end - begin, (self.seconds(end) - self.seconds(begin)) / (end - begin)) for begin, end in spans]


class Timing:
    """Step times of one worker. `host` has those of all workers that slow each other down while they are busy."""

    def __init__(self, pool: Pool, rng: Random, host: list[Timing] | None = None) -> None:
        self.factor = 1.0  # slowdown for any reason
        self.on_change: Callable[[], None] = lambda: None  # called when the neighbours change
        self.decoding: float | None = None  # share of the current step spent on decoding, or None without a step
        self._cost, self._spread, self._rng = pool.cost, pool.spread, rng
        self._host, self._contention = host, pool.contention or Contention(1)
        if host is not None:
            host.append(self)

    @property
    def noisy(self) -> bool:
        """Whether steps of equal cost may take different times."""
        return bool(self._spread) or self._host is not None

    def step(self, prompts: int, context: int, decodes: int, decode_context: int) -> float:
        """Return the seconds of a new step. Contexts are positions attended to by prompts and by decoding sequences."""
        seconds = self._cost.seconds(prompts, context, decodes, decode_context)
        if self._host is not None:
            rows_s = self._cost.seconds(0, 0, decodes, decode_context) if decodes else 0.0
            share = min(rows_s / seconds, 1.0) if seconds else 0.0
            self._do(share)
            seconds *= self._slower(share)
        return seconds * self.factor * self._drawn()

    def steps(self, rows: int, context: int, steps: int) -> tuple[float, float, list[float]]:
        """Return the times of new decode steps: first seconds, increment per step, and all seconds if noisy."""
        self._do(1.0)
        seconds, factor = self._cost.seconds, self.factor * self._slower(1.0)
        first, more = seconds(0, 0, rows, context) * factor, 0.0
        if steps > 1:
            more = (seconds(0, 0, rows, context + rows * (steps - 1)) * factor - first) / (steps - 1)
        drawn = [(first + more * step) * self._drawn() for step in range(steps)] if self.noisy else []
        return first, more, drawn

    def rest(self) -> None:
        self._do(None)

    def leave(self) -> None:
        self.rest()
        if self._host is not None:
            self._host.remove(self)

    def _do(self, decoding: float | None) -> None:
        if self._host is not None and decoding != self.decoding:
            self.decoding = decoding
            for other in self._host:
                if other is not self:
                    other.on_change()

    def _busy_neighbours(self) -> tuple[float, float]:
        """Return the shares of the host's other workers that decode and that compute prompts. Mixed steps are split."""
        busy = [one.decoding for one in self._host or () if one is not self and one.decoding is not None]
        others = max(self._contention.workers - 1, 1)
        return sum(busy) / others, (len(busy) - sum(busy)) / others

    def _slower(self, share: float) -> float:
        """Return the slowdown of a step that spends `share` of its time on decoding."""
        decoding, prompts = self._busy_neighbours()
        contention = self._contention
        decode = decoding * (contention.beside_decode.factor - 1) + prompts * (contention.beside_prompts.factor - 1)
        return 1 + share * decode + (1 - share) * (decoding + prompts) * (contention.prompts - 1)

    def _drawn(self) -> float:
        """Draw a factor. Its spread is that of the neighbours' work, in proportion to their shares."""
        spread = self._spread
        if self._host is not None:
            decoding, prompts = self._busy_neighbours()
            place = self._rng.random()
            if place < decoding:
                spread = self._contention.beside_decode.spread or spread
            elif place < decoding + prompts:
                spread = self._contention.beside_prompts.spread or spread
        return self._rng.choice(spread) if spread else 1.0
