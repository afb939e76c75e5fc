"""What the last minute was like, in a bucket for each second. A gap between tokens costs a list entry, until its second
is over, or is looked at: then all of them are counted at once.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable

import numpy as np

from baton.clock import Clock
from baton.rpc.v1 import admin_pb2

KEPT_S = 60
_LOWEST_S = 1e-4
_GROWTH = math.log(1.05)  # of the bounds between which durations are counted: a quantile is off by 2.5 % at most


class _Second:
    """One second. Durations are counted by the number of their bound."""

    __slots__ = ("at", "counts", "e2e", "gaps", "itl", "tokens", "ttft")

    def __init__(self, at: int) -> None:
        self.at = at
        self.tokens = 0
        self.ttft: dict[int, int] = {}
        self.gaps: list[float] = []  # not counted yet
        self.itl: dict[int, int] = {}
        self.e2e: dict[int, int] = {}
        self.counts: Counter[str] = Counter()  # whatever comes once for a request

    def settle(self) -> None:
        """Count the gaps."""
        if self.gaps:
            numbers = (np.log(np.maximum(self.gaps, _LOWEST_S) / _LOWEST_S) / _GROWTH).astype(int)
            for at, count in zip(*np.unique(numbers, return_counts=True), strict=True):
                self.itl[int(at)] = self.itl.get(int(at), 0) + int(count)
            self.gaps.clear()


class Recent:
    """Counts what it is told, and forgets it after a minute. All durations in seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock.monotonic()
        self._seconds: deque[_Second] = deque(maxlen=KEPT_S + 1)
        self._seconds.append(_Second(int(self._since)))

    def tokens(self, count: int, gap_s: float) -> None:
        """So many came `gap_s` after the ones before: as many gaps of equal length."""
        second = self._seconds[-1]
        second.tokens += count
        second.gaps += (gap_s,) if count == 1 else (gap_s / count,) * count

    def first_tokens(self, count: int, ttft_s: float, prompt_tokens: int) -> None:
        """The first ones of an answer came `ttft_s` after its request."""
        second, at = self.second(), _number(ttft_s)
        second.tokens += count
        second.ttft[at] = second.ttft.get(at, 0) + 1
        second.counts["prompt_tokens"] += prompt_tokens

    def finished(self, e2e_s: float) -> None:
        """A request got all of its answer."""
        second, at = self.second(), _number(e2e_s)
        second.e2e[at] = second.e2e.get(at, 0) + 1

    def count(self, what: str) -> None:
        """One more request that: ended | failed | refused | recovered | judged (by the SLO) | kept (to it)."""
        self.second().counts[what] += 1

    def second(self) -> _Second:
        """The one that runs. To be called each second: `tokens`, which is called for each of them, has no look."""
        at, last = int(self._clock.monotonic()), self._seconds[-1]
        if last.at == at:
            return last
        last.settle()
        self._seconds.append(_Second(at))
        return self._seconds[-1]

    def window(self, seconds: int = KEPT_S) -> admin_pb2.Window:
        """The last `seconds`; the one that is running is part of it."""
        now = self._clock.monotonic()
        self._seconds[-1].settle()
        found = [second for second in self._seconds if second.at > int(now) - seconds]
        spans = min(seconds - 1 + now % 1, max(now - self._since, 1.0))
        counts: Counter[str] = Counter()
        for second in found:
            counts.update(second.counts)
        return admin_pb2.Window(
            seconds=spans,
            ttft=_quantiles(second.ttft for second in found),
            itl=_quantiles(second.itl for second in found),
            e2e=_quantiles(second.e2e for second in found),
            requests_per_s=counts["ended"] / spans,
            tokens_per_s=sum(second.tokens for second in found) / spans,
            prompt_tokens_per_s=counts["prompt_tokens"] / spans,
            failed=counts["failed"],
            refused=counts["refused"],
            recoveries=counts["recovered"],
            slo_share=counts["kept"] / counts["judged"] if counts["judged"] else -1.0,
        )


def _number(seconds: float) -> int:
    return int(math.log(max(seconds, _LOWEST_S) / _LOWEST_S) / _GROWTH)


def _quantiles(parts: Iterable[dict[int, int]]) -> admin_pb2.Quantiles:
    merged: Counter[int] = Counter()
    for part in parts:
        merged.update(part)
    ordered, total = sorted(merged.items()), merged.total()
    if not total:
        return admin_pb2.Quantiles()
    p50, p90, p99 = (_quantile(ordered, share * total) for share in (0.5, 0.9, 0.99))
    return admin_pb2.Quantiles(count=total, p50=p50, p90=p90, p99=p99)


def _quantile(ordered: Iterable[tuple[int, int]], rank: float) -> float:
    """The middle of where the value of that rank lies."""
    passed = at = 0
    for at, count in ordered:  # noqa: B007
        passed += count
        if passed >= rank:
            break
    return _LOWEST_S * math.exp(_GROWTH * (at + 0.5))
