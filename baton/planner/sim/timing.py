"""How long a step of one simulated worker takes now: what it costs by itself, by how much such steps differ, and what
other workers of its host do meanwhile.

What steps took, as a worker reports it: see `baton.worker.engine_loop.Paces`.

Steps of a worker in which nothing changes: each has one token more of every row than the one before.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from baton.core import Pace
from baton.planner.sim.scenario import Contention

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from baton.planner.sim.scenario import Pool


class Paces:
    """All steps so far, by kind. They change: `told` is what a report has."""

    def __init__(self) -> None:
        self.prefill, self.decode = Pace(), Pace()
        self.joint, self.beside = Pace(), Pace()

    def decoded(self, steps: int, tokens: int, context: int, seconds: float) -> None:
        """Steps that only decoded."""
        _add(self.decode, steps, tokens, context, seconds)

    def planned(self, prompts: int, context: int, decodes: int, beside: int, seconds: float) -> None:
        """A step: of prompts so many tokens and positions, of rows as well."""
        if not prompts:
            _add(self.decode, 1, decodes, beside, seconds)
        elif not decodes:
            _add(self.prefill, 1, prompts, context, seconds)
        else:
            _add(self.joint, 1, prompts, context, seconds)
            _add(self.beside, 1, decodes, beside, 0.0)

    def told(self) -> Paces:
        """As they are now."""
        now = Paces()
        now.prefill, now.decode = replace(self.prefill), replace(self.decode)
        now.joint, now.beside = replace(self.joint), replace(self.beside)
        return now


def _add(pace: Pace, steps: int, tokens: int, context: int, seconds: float) -> None:
    pace.steps += steps
    pace.tokens += tokens
    pace.context += context
    pace.seconds += seconds


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


class Host:
    """Workers that slow each other down while they are busy."""

    def __init__(self) -> None:
        self.timings: list[Timing] = []

    def beside(self, timing: Timing) -> tuple[float, float]:
        """How many others decode, and how many compute prompts; who does both counts for each in part."""
        busy = [one.decoding for one in self.timings if one is not timing and one.decoding is not None]
        return sum(busy), len(busy) - sum(busy)

    def changed(self, timing: Timing) -> None:
        """The others have another neighbour from now on."""
        for one in self.timings:
            if one is not timing:
                one.on_change()


class Timing:
    """Of one worker. `factor`: that its steps take longer, whatever the reason. `on_change`: the others on its host do
    something else from now on. `decoding`: which share of its time the step under way decodes; None: there is none.
    """

    def __init__(self, pool: Pool, rng: Random, host: Host | None = None) -> None:
        self.factor = 1.0
        self.on_change: Callable[[], None] = _nothing
        self.decoding: float | None = None
        self._cost, self._spread, self._rng = pool.cost, pool.spread, rng
        self._host, self._contention = host, pool.contention or Contention(1)
        if host is not None:
            host.timings.append(self)

    @property
    def noisy(self) -> bool:
        """Whether steps that cost the same may take different times."""
        return bool(self._spread) or self._host is not None

    def step(self, prompts: int, context: int, decodes: int, beside: int) -> float:
        """Seconds of a step that begins, with so many tokens of prompts, which attend to `context` positions, and so
        many rows, which attend to `beside`.
        """
        seconds = self._cost.seconds(prompts, context, decodes, beside)
        if self._host is not None:
            rows_s = self._cost.seconds(0, 0, decodes, beside) if decodes else 0.0
            share = min(rows_s / seconds, 1.0) if seconds else 0.0
            self._do(share)
            seconds *= self._slower(share)
        return seconds * self.factor * self._drawn()

    def steps(self, rows: int, context: int, steps: int) -> tuple[float, float, list[float]]:
        """Of so many steps that begin, one after the other, which only decode: seconds of the first, by which each is
        longer than the one before, and seconds of each where they differ otherwise.
        """
        self._do(1.0)
        seconds, factor = self._cost.seconds, self.factor * self._slower(1.0)
        first, more = seconds(0, 0, rows, context) * factor, 0.0
        if steps > 1:
            more = (seconds(0, 0, rows, context + rows * (steps - 1)) * factor - first) / (steps - 1)
        drawn = [(first + more * step) * self._drawn() for step in range(steps)] if self.noisy else []
        return first, more, drawn

    def rest(self) -> None:
        """No step is under way."""
        self._do(None)

    def leave(self) -> None:
        """The worker is gone."""
        self.rest()
        if self._host is not None:
            self._host.timings.remove(self)

    def _do(self, decoding: float | None) -> None:
        if self._host is not None and decoding != self.decoding:
            self.decoding = decoding
            self._host.changed(self)

    def _beside(self) -> tuple[float, float]:
        """The shares of the host's other workers that decode, and that compute prompts."""
        if self._host is None:
            return 0.0, 0.0
        others = max(self._contention.workers - 1, 1)
        decoding, prompts = self._host.beside(self)
        return decoding / others, prompts / others

    def _slower(self, share: float) -> float:
        """A step that decodes for such a share of its time, by what the others do now."""
        decoding, prompts = self._beside()
        beside = self._contention
        decode = decoding * (beside.beside_decode.factor - 1) + prompts * (beside.beside_prompts.factor - 1)
        return 1 + share * decode + (1 - share) * (decoding + prompts) * (beside.prompts - 1)

    def _drawn(self) -> float:
        """By how much this step differs from others that cost the same: some meet what others do, some do not."""
        spread = self._spread
        if self._host is not None:
            decoding, prompts = self._beside()
            place = self._rng.random()
            if place < decoding:
                spread = self._contention.beside_decode.spread or spread
            elif place < decoding + prompts:
                spread = self._contention.beside_prompts.spread or spread
        return self._rng.choice(spread) if spread else 1.0


def _nothing() -> None:
    return
