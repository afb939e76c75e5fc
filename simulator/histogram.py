"""Percentiles of any number of values in memory that does not grow: bins whose width is a share of what is in them."""

from __future__ import annotations

import math
from dataclasses import dataclass

_BINS = 128  # for each doubling: values are known to 0.3 %
_LEAST_S = 1e-7  # what is less counts as that


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of values in seconds, weighed; all 0 where there are none."""

    count: float = 0.0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Histogram:
    """Weighed values, in seconds."""

    def __init__(self) -> None:
        self._bins: dict[int, float] = {}
        self._count = self._sum = self._max = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        """Count `value` so often."""
        place = int(math.log2(value / _LEAST_S) * _BINS) if value > _LEAST_S else 0
        self._bins[place] = self._bins.get(place, 0.0) + weight
        self._count += weight
        self._sum += value * weight
        self._max = max(self._max, value)

    def quantile(self, share: float) -> float:
        """The value that so large a share of all does not exceed."""
        left = share * self._count
        for place in sorted(self._bins):
            left -= self._bins[place]
            if left <= 1e-9 * self._count:
                middle: float = _LEAST_S * 2.0 ** ((place + 0.5) / _BINS)
                return min(middle, self._max)
        return self._max

    def quantiles(self) -> Quantiles:
        """All that a report shows."""
        if not self._count:
            return Quantiles()
        p50, p90, p95, p99 = map(self.quantile, (0.5, 0.9, 0.95, 0.99))
        return Quantiles(self._count, self._sum / self._count, p50, p90, p95, p99, self._max)
