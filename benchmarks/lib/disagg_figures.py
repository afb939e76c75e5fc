"""What was seen of a load, and what of it was good: for benchmarks/disaggregation.py."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds: to the first token, and between tokens: the mean of a request's gaps (its TPOT), or what so many of 100
    of its gaps keep to.
    """

    ttft_s: float
    itl_s: float
    percentile: int | None = None

    def times(self, speed: float) -> Slo:
        """Of a machine that takes so many times as long for everything."""
        return replace(self, ttft_s=self.ttft_s * speed, itl_s=self.itl_s * speed)


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that ended well: seconds to its first token, and between its tokens."""

    prompt_tokens: int
    ttft_s: float
    gaps_s: tuple[float, ...]

    def good(self, slo: Slo) -> bool:
        """Whether it kept to both."""
        return self.ttft_s <= slo.ttft_s and (not self.gaps_s or self.gap(slo.percentile) <= slo.itl_s)

    def gap(self, percentile: int | None) -> float:
        """Seconds: the mean of its gaps, or such a percentile of them. Raises StatisticsError without gaps."""
        return fmean(self.gaps_s) if percentile is None else quantile(self.gaps_s, percentile / 100)


@dataclass(frozen=True, slots=True)
class Phase:
    """One side under one rate: requests sent, those that ended well, seconds of arrivals, and what the generator took.

    `late_s`: how much later than planned requests were sent, the 99th percentile. `speed`: how many times the usual gap
    that of a request alone was, just before and after: SLOs are stretched by it. `wander`: how many times longer the
    longer of these two gaps was, the least in so many `tries`. `told_s`: the ITL that the router was told to keep.
    """

    side: str
    rate: float
    round: int
    seconds: float
    sent: int
    seen: tuple[Seen, ...]
    generator_cpu: float
    late_s: float
    speed: float = 1.0
    told_s: float = math.inf
    wander: float = 1.0
    tries: int = 1

    def goodput(self, slo: Slo) -> float:
        """Requests/s that kept to the SLO."""
        return self.good(slo) / self.seconds

    def good(self, slo: Slo) -> int:
        """Requests that kept to it."""
        here = slo.times(self.speed)
        return sum(one.good(here) for one in self.seen)

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


def attainment(phases: Sequence[Phase], slo: Slo) -> float:
    """The share of all requests of these phases that kept to it."""
    good = sum(phase.good(slo) for phase in phases)
    return good / max(sum(phase.sent for phase in phases), 1)


def goodput(phases: Sequence[Phase], slo: Slo, least: float = 0.9) -> float:
    """The highest rate, in requests/s, up to which so large a share of requests keeps to the SLO, all rounds of a rate
    together.
    """
    rates = sorted({phase.rate for phase in phases})
    return highest([(rate, attainment([one for one in phases if one.rate == rate], slo)) for rate in rates], least)


def highest(points: Sequence[tuple[float, float]], least: float = 0.9) -> float:
    """The highest rate up to which the share is so large, of (rate, share) by rates: on straight lines between those
    that were measured. 0: not at the lowest of them.
    """
    found, before = 0.0, math.nan
    for rate, share in points:
        if share < least:
            return found + (before - least) / (before - share) * (rate - found) if found else 0.0
        found, before = rate, share
    return found


def keep(path: Path, alone: Slo, phases: Sequence[Phase]) -> None:
    """What was seen, for other programs to compute with."""
    path.write_text(json.dumps({"alone": asdict(alone), "phases": [asdict(phase) for phase in phases]}))


def kept(path: Path) -> tuple[Slo, list[Phase]]:
    """Of such a file."""
    found = json.loads(path.read_text())
    phases = []
    for one in found["phases"]:
        seen = tuple(Seen(**{**answer, "gaps_s": tuple(answer["gaps_s"])}) for answer in one.pop("seen"))
        phases.append(Phase(**one, seen=seen))
    return Slo(**found["alone"]), phases
