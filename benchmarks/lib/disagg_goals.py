"""Goals for answers, from tight to loose, and the goodput of each side under each goal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.lib.disagg_figures import Slo, goodput
from benchmarks.lib.disagg_run import SPLIT

if TYPE_CHECKING:
    from benchmarks.lib.disagg_figures import Phase

PATIENCE = 5.0  # TTFT limit, as a multiple of that of a lone long prompt
GOALS = (1.25, 1.4, 1.5, 1.6, 1.7, 1.8, 2.0, 2.2, 2.5, 3.0, 4.0, 6.0, 10.0, 30.0)  # multiples of the usual gap
AIM = 1.6  # multiple of the usual gap: the ITL goal of routers, and the main goal


def slo_of(alone: Slo, itl: float, percentile: int | None, patience: float = PATIENCE) -> Slo:
    """Return an SLO in multiples of the usual gap and TTFT."""
    return Slo(alone.ttft_s * patience, alone.itl_s * itl, percentile)


@dataclass(frozen=True, slots=True)
class Goal:
    """An SLO, and the goodput of the split side, each colocated side and other engines under it."""

    times: float
    slo: Slo
    lowest: float  # lowest measured requests/s
    split: float
    colocated: dict[str, float]
    peers: dict[str, float]

    @property
    def best(self) -> str:
        """The colocated side with the highest goodput."""
        return max(self.colocated, key=lambda side: self.colocated[side])

    @property
    def ratio(self) -> float:
        """Goodput of splitting over the best colocated side, or nan. A lower bound if only splitting meets the goal."""
        theirs = self.colocated[self.best]
        return self.split / (theirs or self.lowest) if theirs or self.split else math.nan

    @property
    def told(self) -> str:
        """The ratio as text."""
        if math.isnan(self.ratio):
            return "-"
        return f"{self.ratio:.2f}" if self.colocated[self.best] else f"over {self.ratio:.2f}"


def sides_of(phases: list[Phase]) -> list[str]:
    """Return the split side first, then colocated ones by chunk, and other engines last."""
    return sorted({phase.side for phase in phases}, key=lambda side: (side != SPLIT, side[0], len(side), side))


def goals(phases: list[Phase], alone: Slo, percentile: int | None, patience: float = PATIENCE) -> list[Goal]:
    """Return all goals, from the tightest ITL to the loosest."""
    found = []
    lowest = min(phase.rate for phase in phases)
    by_side = {side: [phase for phase in phases if phase.side == side] for side in sides_of(phases)}
    for times in GOALS:
        slo = slo_of(alone, times, percentile, patience)
        reached = {side: goodput(own, slo) for side, own in by_side.items()}
        split, peers = reached.pop(SPLIT), {side: rate for side, rate in reached.items() if side.startswith("vllm")}
        mixed = {side: rate for side, rate in reached.items() if side not in peers}
        found.append(Goal(times, slo, lowest, split, mixed, peers))
    return found


def tightest(found: list[Goal]) -> Goal:
    """Return the tightest goal, from the main one on, that both sides meet at some rate, or the loosest goal."""
    kept = (goal for goal in found if goal.times >= AIM and goal.split and goal.colocated[goal.best])
    return next(kept, found[-1])


def aimed(found: list[Goal]) -> Goal:
    """Return the goal of the routers."""
    return next(goal for goal in found if goal.times == AIM)


def ratios(phases: list[Phase], other: str, rate: float) -> dict[str, float]:
    """Return latency ratios, colocated over split, at one rate (medians over the rounds). Above 1, splitting wins."""
    found: dict[str, list[float]] = {"itl_p99_ratio": [], "ttft_p50_ratio": []}
    for number in sorted({phase.round for phase in phases}):
        (split,), (mixed,) = (
            [phase for phase in phases if (phase.round, phase.side, phase.rate) == (number, side, rate)]
            for side in (SPLIT, other)
        )
        found["itl_p99_ratio"].append(mixed.itl(0.99) / split.itl(0.99))
        found["ttft_p50_ratio"].append(mixed.ttft(0.5) / split.ttft(0.5))
    return {key: median(values) for key, values in found.items()}
