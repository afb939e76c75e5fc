"""Percentiles of any number of values in memory that does not grow: bins whose width is a share of what is in them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_BINS = 128  # for each doubling: values are known to 0.3 %
_LEAST_S = 1e-7  # what is less counts as that
_TOGETHER = 4096  # values that are put into bins at once: one by one takes several times as long


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
        self._bins: NDArray[np.float64] = np.zeros(0)
        self._count = self._sum = self._max = 0.0
        self._values: list[float] = []  # in no bin yet
        self._weights: list[float] = []

    def add(self, value: float, weight: float = 1.0) -> None:
        """Count `value` so often."""
        self._values.append(value)
        self._weights.append(weight)
        if len(self._values) == _TOGETHER:
            self._settle()

    def quantiles(self) -> Quantiles:
        """All that a report shows."""
        self._settle()
        if not self._count:
            return Quantiles()
        p50, p90, p95, p99 = map(self._quantile, (0.5, 0.9, 0.95, 0.99))
        return Quantiles(self._count, self._sum / self._count, p50, p90, p95, p99, self._max)

    def _quantile(self, share: float) -> float:
        """The value that so large a share of all does not exceed."""
        enough = np.cumsum(self._bins) >= (share - 1e-9) * self._count
        middle: float = _LEAST_S * 2.0 ** ((int(enough.argmax()) + 0.5) / _BINS)
        return min(middle, self._max)

    def _settle(self) -> None:
        if not self._values:
            return
        values, weights = np.array(self._values), np.array(self._weights)
        self._values.clear()
        self._weights.clear()
        places = (np.log2(np.maximum(values, _LEAST_S) / _LEAST_S) * _BINS).astype(np.intp)
        before, self._bins = self._bins, np.bincount(places, weights, len(self._bins)).astype(np.float64)
        self._bins[: len(before)] += before
        self._count += float(weights.sum())
        self._sum += float(np.add.reduce(values * weights))
        self._max = max(self._max, float(values.max()))
