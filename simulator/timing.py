"""How long a step of one simulated worker takes now: what it costs by itself, by how much such steps differ, and what
other workers of its host do meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulator.scenario import Contention

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from simulator.scenario import Pool


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
