"""Measured requests of a load, and their goodput, for benchmarks/disaggregation.py."""

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
    """Limits in seconds of TTFT and of ITL, which is the mean of a request's gaps (TPOT) or a percentile of them."""

    ttft_s: float
    itl_s: float
    percentile: int | None = None

    def times(self, speed: float) -> Slo:
        """Scale the limits to a machine that takes `speed` times as long."""
        return replace(self, ttft_s=self.ttft_s * speed, itl_s=self.itl_s * speed)


@dataclass(frozen=True, slots=True)
class Seen:
    """A successful request: seconds to its first token, and between its tokens."""

    prompt_tokens: int
    ttft_s: float
    gaps_s: tuple[float, ...]

    def good(self, slo: Slo) -> bool:
        """Return whether it met both limits."""
        return self.ttft_s <= slo.ttft_s and (not self.gaps_s or self.gap(slo.percentile) <= slo.itl_s)

    def gap(self, percentile: int | None) -> float:
        """Return seconds: the mean of its gaps, or a percentile of them. Raises StatisticsError without gaps."""
        return fmean(self.gaps_s) if percentile is None else quantile(self.gaps_s, percentile / 100)


@dataclass(frozen=True, slots=True)
class Phase:
    """One side at one rate: requests sent and seen, seconds of arrivals, and the generator's CPU share."""

    side: str
    rate: float
    round: int
    seconds: float
    sent: int
    seen: tuple[Seen, ...]
    generator_cpu: float
    late_s: float  # 99th percentile delay of sending
    speed: float = 1.0  # lone gap before and after, over the usual one; scales SLOs
    told_s: float = math.inf  # ITL goal of the router
    wander: float = 1.0  # ratio of the two lone gaps, the least of `tries`
    tries: int = 1

    def goodput(self, slo: Slo) -> float:
        """Return requests/s within the SLO."""
        return self.good(slo) / self.seconds

    def good(self, slo: Slo) -> int:
        """Return the number of requests within the SLO."""
        here = slo.times(self.speed)
        return sum(one.good(here) for one in self.seen)

    def ttft(self, share: float) -> float:
        """Return the quantile in seconds."""
        return quantile([one.ttft_s for one in self.seen], share)

    def itl(self, share: float) -> float:
        """Return the quantile in seconds, over all gaps of all requests."""
        return quantile([gap for one in self.seen for gap in one.gaps_s], share)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of all values do not exceed, or nan without values."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else math.nan


def phase_of(report: dict[str, Any], side: str, rate: float, number: int, seconds: float) -> Phase:
    """Return the phase in a report of `baton bench --out`."""
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
    """Return the request of a sample. Gaps are between messages, as for their reader."""
    return Seen(sample["prompt_tokens"], sample["ttft_s"], tuple(sample["gaps_s"]))


def attainment(phases: Sequence[Phase], slo: Slo) -> float:
    """Return the share of all requests of these phases within the SLO."""
    good = sum(phase.good(slo) for phase in phases)
    return good / max(sum(phase.sent for phase in phases), 1)


def goodput(phases: Sequence[Phase], slo: Slo, least: float = 0.9) -> float:
    """Return the highest rate in requests/s up to which at least `least` of all rounds' requests meet the SLO."""
    rates = sorted({phase.rate for phase in phases})
    return highest([(rate, attainment([one for one in phases if one.rate == rate], slo)) for rate in rates], least)


def highest(points: Sequence[tuple[float, float]], least: float = 0.9) -> float:
    """Return the interpolated rate up to which the share is at least `least`, of sorted (rate, share) points, or 0."""
    found, before = 0.0, math.nan
    for rate, share in points:
        if share < least:
            return found + (before - least) / (before - share) * (rate - found) if found else 0.0
        found, before = rate, share
    return found


def keep(path: Path, alone: Slo, phases: Sequence[Phase]) -> None:
    """Write the phases to a file for other programs."""
    path.write_text(json.dumps({"alone": asdict(alone), "phases": [asdict(phase) for phase in phases]}))


def kept(path: Path) -> tuple[Slo, list[Phase]]:
    """Read the phases that `keep` wrote."""
    found = json.loads(path.read_text())
    phases = []
    for one in found["phases"]:
        seen = tuple(Seen(**{**answer, "gaps_s": tuple(answer["gaps_s"])}) for answer in one.pop("seen"))
        phases.append(Phase(**one, seen=seen))
    return Slo(**found["alone"]), phases
