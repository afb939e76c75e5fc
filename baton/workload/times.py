"""When requests come, without regard to whether earlier ones have been answered (an open loop)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from baton.errors import ConfigError
from baton.workload.lengths import LEAST_CV, MOST_CV, variation

KINDS = f"poisson, constant, or gamma:CV with a coefficient of variation from {LEAST_CV:g} to {MOST_CV:g}"


@dataclass(frozen=True, slots=True)
class Times:
    """`rate` requests per second; the gaps between them have the coefficient of variation `cv` and, but for 0 (all
    gaps equal), a gamma distribution. 1 is a Poisson process, more is burstier.
    """

    rate: float
    cv: float = 1.0

    @classmethod
    def parse(cls, text: str, rate: float) -> Times:
        """Raises ConfigError naming what is allowed."""
        if not (0 < rate < math.inf):
            raise ConfigError(f"rate: must be requests per second, a number above 0, got {rate:g}")
        kind, _, value = text.partition(":")
        if value == "" and kind in {"poisson", "constant"}:
            return cls(rate, 1.0 if kind == "poisson" else 0.0)
        try:
            cv = variation(value) if kind == "gamma" else 0.0
        except ValueError:
            cv = 0.0
        if not cv:
            raise ConfigError(f"arrivals: must be {KINDS}, got {text!r}")
        return cls(rate, cv)

    def seconds(self, seed: int) -> Iterator[float]:
        """The times from the start, without end. The first request comes after a gap like all others."""
        draw, now = Random(f"{seed}/times"), 0.0
        while True:
            now += self._gap(draw)
            yield now

    def _gap(self, draw: Random) -> float:
        if self.cv == 0:
            return 1 / self.rate
        if self.cv == 1:
            return draw.expovariate(self.rate)
        return draw.gammavariate(self.cv**-2, self.cv**2 / self.rate)
