"""Calibration of forecasts: the factor that the q-quantile of actual over forecast latency has had.

This is split conformal prediction with the relative error as its score: of n exchangeable scores, a new one is at most
the ceil((n + 1) q)-th smallest with probability q (Vovk, Gammerman, Shafer, Algorithmic Learning in a Random World,
2005, section 2.2). Scores are kept by class (Mondrian, section 4.5), because short forecasts err more. A service
drifts, so that scores are not exchangeable: after each outcome the level moves against the error, as in adaptive
conformal inference (Gibbs and Candes, NeurIPS 2021, equation 2).

If all requests carry promises, a factor that refuses them all gets no more outcomes. Therefore the level returns with
time, too, and a score of more than twice the median counts only for some minutes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque

QUANTILE = 0.995  # of each of two latencies, so that both are kept with at least 99 %
BINS = 10
_WINDOW = 512  # latest scores of a class
_ENOUGH = 200  # scores for a quantile of 0.995
_UNKNOWN = 3.0  # factor before the first score
_BEYOND = 1.1  # times the largest score, while the level is above all scores
_STEP = 0.005  # of the level per outcome
_LEAST = 1.02
_MOST = 4.0  # score: a longer latency has another cause than the error of a forecast
_OUTLIER = 2.0  # times the median
_FORGET_S = 300.0  # after which an outlier is forgotten, and the level has returned


class _Scores:
    """The latest scores, also in order."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, float]] = deque()  # time, score
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, score: float, now: float) -> None:
        self._latest.append((now, score))
        insort(self._sorted, score)
        if len(self._latest) > _WINDOW:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft()[1])]

    def forget(self, now: float) -> None:
        """Remove old outliers. A perfect score counts for the median, so that a single score can be one."""
        middle = len(self._sorted) // 2
        most = _OUTLIER * max(self._sorted[middle - 1] if middle else 1.0, 1.0)
        if self._sorted and self._sorted[-1] > most:
            self._latest = deque((at, one) for at, one in self._latest if one <= most or now - at < _FORGET_S)
            self._sorted = sorted(one for _, one in self._latest)

    def below(self, score: float) -> float:
        """Return the share of scores up to `score`; ties count half. 0.5 without scores."""
        places = bisect_left(self._sorted, score) + bisect_right(self._sorted, score)
        return places / (2.0 * len(self)) if self._sorted else 0.5

    def quantile(self, level: float) -> float:
        """Return the conformal quantile. Above all scores it is their maximum with a margin, wider if they are few."""
        place = math.ceil((len(self) + 1) * level)
        if place <= len(self):
            return self._sorted[place - 1]
        few = max(_ENOUGH - len(self), 0) / _ENOUGH
        return max(self._sorted[-1] if self._sorted else 1.0, 1.0) * (_BEYOND + (_UNKNOWN - _BEYOND) * few)


class Calibration:
    """The factor for forecasts of one latency, by class of forecast. `bins` counts outcomes by their quantile: of a
    calibrated forecast each tenth has as many.
    """

    def __init__(self) -> None:
        self.bins: Counter[int] = Counter(dict.fromkeys(range(BINS), 0))
        self._all, self._classes = _Scores(), dict[int, _Scores]()
        self._miss = 1.0 - QUANTILE  # the level of adaptive conformal inference
        self._now = -math.inf

    @property
    def measured(self) -> int:
        return len(self._all)

    def factor(self, key: int) -> float:
        """Return the factor that makes an upper limit of a forecast of this class. At least `_LEAST`: low load leaves
        forecasts of the worst case too long, and that must not shorten those under high load. Under high load all
        promises are near their limits, so that a small error of the costs would break many of them.
        """
        return max(self._scores(key).quantile(min(1.0 - self._miss, 1.0)), _LEAST)

    def observe(self, key: int, score: float) -> None:
        """Add an outcome: `score` is actual over forecast."""
        score = min(score, _MOST)
        missed = score > self.factor(key)
        self.bins[min(int(self._scores(key).below(score) * BINS), BINS - 1)] += 1
        self._miss += _STEP * ((1.0 - QUANTILE) - missed)
        self._miss = min(max(self._miss, 0.0), 1.0 - QUANTILE)
        self._all.add(score, self._now)
        self._classes.setdefault(key, _Scores()).add(score, self._now)

    def relax(self, now: float) -> None:
        """Let the time since the last call pass. At most once per second it does something."""
        if now - self._now < 1.0:
            return
        elapsed, self._now = now - max(self._now, 0.0), now
        self._miss = min(self._miss + (1.0 - QUANTILE) * elapsed / _FORGET_S, 1.0 - QUANTILE)
        for scores in (self._all, *self._classes.values()):
            scores.forget(now)

    def _scores(self, key: int) -> _Scores:
        own = self._classes.get(key)
        return own if own is not None and len(own) >= _ENOUGH else self._all


def length_class(seconds: float) -> int:
    """Return the class of a forecast: its power of two."""
    return math.frexp(seconds)[1]
