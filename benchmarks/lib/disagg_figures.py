"""What was seen of a load, and what of it was good: for benchmarks/disaggregation.py."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds: to the first token, and of the gap that 99 of 100 gaps of a request keep to."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that ended well: seconds to its first token, and between its tokens."""

    prompt_tokens: int
    ttft_s: float
    gaps_s: tuple[float, ...]

    def good(self, slo: Slo) -> bool:
        """Whether it kept to both."""
        return self.ttft_s <= slo.ttft_s and (not self.gaps_s or quantile(self.gaps_s, 0.99) <= slo.itl_s)


@dataclass(frozen=True, slots=True)
class Phase:
    """One side under one rate: requests sent, those that ended well, seconds of arrivals, and what the generator took.

    `late_s`: how much later than planned requests were sent, the 99th percentile.
    """

    side: str
    rate: float
    round: int
    seconds: float
    sent: int
    seen: tuple[Seen, ...]
    generator_cpu: float
    late_s: float

    def goodput(self, slo: Slo) -> float:
        """Requests/s that kept to the SLO."""
        return sum(one.good(slo) for one in self.seen) / self.seconds

    def attainment(self, slo: Slo) -> float:
        """The share of what was sent."""
        return sum(one.good(slo) for one in self.seen) / max(self.sent, 1)

    def ttft(self, share: float) -> float:
        """Seconds."""
        return quantile([one.ttft_s for one in self.seen], share)

    def itl(self, share: float) -> float:
        """Seconds, over all gaps of all requests."""
        return quantile([gap for one in self.seen for gap in one.gaps_s], share)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed; nan of none."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else math.nan


def phase_of(report: dict[str, Any], side: str, rate: float, number: int, seconds: float) -> Phase:
    """From the report of `baton bench --out`."""
    return Phase(
        side,
        rate,
        number,
        seconds,
        sent=len(report["samples"]),
        seen=tuple(seen_of(sample) for sample in report["samples"] if not sample["error"]),
        generator_cpu=report["generator"]["cpu_share"],
        late_s=report["generator"]["late_p99_s"],
    )


def seen_of(sample: dict[str, Any]) -> Seen:
    """Gaps are between messages: what their reader waits."""
    return Seen(sample["prompt_tokens"], sample["ttft_s"], tuple(sample["gaps_s"]))


def best_goodput(phases: Iterable[Phase], slo: Slo) -> float:
    """The most requests/s within the SLO at any rate: the mean of its rounds at that rate."""
    by_rate: dict[float, list[float]] = {}
    for phase in phases:
        by_rate.setdefault(phase.rate, []).append(phase.goodput(slo))
    return max((sum(found) / len(found) for found in by_rate.values()), default=math.nan)
