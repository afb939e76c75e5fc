"""What came of a simulation, as a table for people and JSON for programs.

How long the steps of one worker took, for as long as somebody may ask: what a request's own gaps were.

Percentiles of any number of values in memory that does not grow: bins whose width is a share of what is in them.

What is counted while a simulation runs, in memory that does not grow with it, and the report made of it.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from itertools import dropwhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from baton.planner.sim.block_pool import CountedPool
    from baton.planner.sim.scenario import Pool, Scenario, Slo


class Gaps:
    """Steps by number, in pieces of equal length."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, int, float]] = deque()  # first step, the one behind the last, seconds of each

    def add(self, first: int, count: int, seconds: float) -> None:
        """These steps took so long each."""
        self._pieces.append((first, first + count, seconds))

    def forget(self, before: int) -> None:
        """Nobody will ask for steps before this one."""
        while self._pieces and self._pieces[0][1] <= before:
            self._pieces.popleft()

    def of(self, first: int, end: int) -> list[tuple[float, int]]:
        """Seconds and how many, of steps first..end-1."""
        seen = dropwhile(lambda piece: piece[1] <= first, self._pieces)
        pieces = ((seconds, min(stop, end) - max(begin, first)) for begin, stop, seconds in seen)
        return [(seconds, count) for seconds, count in pieces if count > 0]


def percentile(gaps: list[tuple[float, int]], percent: float) -> float:
    """The gap that `percent` of all do not exceed; 0: there are none."""
    left = percent / 100.0 * sum(count for _, count in gaps)
    for seconds, count in sorted(gaps):
        left -= count
        if left <= 1e-9:
            return seconds
    return max((seconds for seconds, _ in gaps), default=0.0)


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


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What a pool did. `busy`: the share of the time that its workers were in steps."""

    workers: int = 0
    devices: int = 0
    busy: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0  # computed
    cached_tokens: int = 0  # found in the prefix cache instead
    decode_tokens: int = 0
    batch: float = 0.0  # decode rows of a step that has any, on average over steps
    kv_used_peak: float = 0.0  # the largest share of a worker's blocks that was held at once
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Times are seconds of simulated time unless they say otherwise. `itl` counts gaps, `tpot` requests.

    `good`: completed within the SLO. `attainment`: that share of all that came; refused and failed ones miss it.
    """

    arrivals: int = 0
    completed: int = 0
    refused: int = 0  # at once, by a full queue, or since no worker could ever hold it
    expired: int = 0  # after a wait
    failed: int = 0  # by workers that were lost
    good: int = 0
    good_ttft: int = 0  # within that goal alone
    good_itl: int = 0  # as well; a request of one token is
    duration_s: float = 0.0  # from the first arrival to the last event
    ttft: Quantiles = field(default_factory=Quantiles)
    itl: Quantiles = field(default_factory=Quantiles)
    tpot: Quantiles = field(default_factory=Quantiles)
    e2e: Quantiles = field(default_factory=Quantiles)
    queue: Quantiles = field(default_factory=Quantiles)  # from the arrival to the first choice of a pair
    transfer: Quantiles = field(default_factory=Quantiles)  # of a handoff, as far as it was not hidden by computing
    prefill: PoolReport = field(default_factory=PoolReport)
    decode: PoolReport = field(default_factory=PoolReport)
    devices: int = 0
    output_tokens: int = 0
    moved_bytes: float = 0.0
    recoveries: dict[str, int] = field(default_factory=dict)  # by reason: why another attempt was needed
    local_prefills: int = 0  # prompts that a decode worker computed
    queue_peak: int = 0
    events: int = 0

    @property
    def goodput(self) -> float:
        """Good requests per second."""
        return self.good / self.duration_s if self.duration_s else 0.0

    @property
    def attainment(self) -> float:
        """The share of all arrivals that were good; 1: nothing came."""
        return self.good / self.arrivals if self.arrivals else 1.0

    @property
    def ttft_attainment(self) -> float:
        """The share of all arrivals that was within the goal for the first token."""
        return self.good_ttft / self.arrivals if self.arrivals else 1.0

    @property
    def itl_attainment(self) -> float:
        """The share of all arrivals that was within the goal for the others."""
        return self.good_itl / self.arrivals if self.arrivals else 1.0

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    def as_dict(self) -> dict[str, object]:
        """All of it, for JSON."""
        rates = {
            "goodput": self.goodput,
            "attainment": self.attainment,
            "ttft_attainment": self.ttft_attainment,
            "itl_attainment": self.itl_attainment,
            "throughput": self.throughput,
        }
        return asdict(self) | rates

    def as_json(self) -> str:
        """One line; equal reports give equal text."""
        return json.dumps(self.as_dict(), sort_keys=True)

    def table(self) -> str:
        """For a terminal."""
        rows = [f"{'ms':10}" + "".join(f"{name:>11}" for name in ("mean", "p50", "p90", "p95", "p99", "max"))]
        times = ("TTFT", self.ttft), ("ITL", self.itl), ("TPOT", self.tpot), ("E2E", self.e2e)
        for name, of in (*times, ("queue", self.queue), ("transfer", self.transfer)):
            values = (of.mean, of.p50, of.p90, of.p95, of.p99, of.max)
            rows.append(f"{name:10}" + "".join(f"{value * 1000:11.2f}" for value in values))
        return "\n".join([*self._counts(), "", *rows, "", *self._pools()])

    def _counts(self) -> list[str]:
        lost = f"{self.refused} refused, {self.expired} expired, {self.failed} failed"
        recovered = ", ".join(f"{count} {reason}" for reason, count in sorted(self.recoveries.items())) or "none"
        return [
            f"{self.arrivals} requests in {self.duration_s:.1f} s on {self.devices} devices: "
            f"{self.completed} completed, {lost}",
            f"within the SLO: {self.good} ({self.attainment:.1%}), {self.goodput:.2f}/s, "
            f"{self.throughput:.0f} tokens/s; recoveries: {recovered}; queue up to {self.queue_peak}",
        ]

    def _pools(self) -> list[str]:
        pools = ("prefill", self.prefill), ("decode", self.decode)
        return [
            f"{name}: {pool.workers} workers {pool.busy:.1%} busy, {pool.prompt_tokens} prompt tokens"
            f" ({pool.cached_tokens} cached), {pool.decode_tokens} decoded, batch {pool.batch:.1f}, "
            f"KV up to {pool.kv_used_peak:.1%}, {pool.preemptions} preempted"
            for name, pool in pools
            if pool.workers
        ]


class PoolTally:
    """Of the workers of one role; `itl` is that of all."""

    def __init__(self, itl: Histogram) -> None:
        self.itl = itl
        self.preemptions = self.cached_tokens = 0
        self.used_most = 0.0  # a share of a worker's blocks
        self._steps = self._decode_steps = self._prompts = self._decodes = 0
        self._busy_s = 0.0

    def decoded(self, steps: int, tokens: int, seconds: float) -> None:
        """Steps that only decoded."""
        self._steps += steps
        self._decode_steps += steps
        self._decodes += tokens
        self._busy_s += seconds

    def planned(self, prompts: int, decodes: int, seconds: float) -> None:
        """A step with so many tokens of prompts, and so many rows."""
        self._steps += 1
        self._decode_steps += decodes > 0
        self._prompts += prompts
        self._decodes += decodes
        self._busy_s += seconds

    def saw(self, pool: CountedPool) -> None:
        """A worker's blocks, at the end of its life."""
        self.used_most = max(self.used_most, pool.used_most / pool.total)

    def report(self, pool: Pool, duration_s: float) -> PoolReport:
        """What is in the report."""
        return PoolReport(
            workers=pool.workers,
            devices=pool.devices,
            busy=self._busy_s / (pool.workers * duration_s) if pool.workers and duration_s else 0.0,
            steps=self._steps,
            prompt_tokens=self._prompts,
            cached_tokens=self.cached_tokens,
            decode_tokens=self._decodes,
            batch=self._decodes / self._decode_steps if self._decode_steps else 0.0,
            kv_used_peak=self.used_most,
            preemptions=self.preemptions,
        )


class Tally:
    """Of the whole simulation."""

    def __init__(self, slo: Slo) -> None:
        self.ttft, self.itl, self.tpot, self.e2e = Histogram(), Histogram(), Histogram(), Histogram()
        self.queue, self.transfer = Histogram(), Histogram()
        self.prefill, self.decode = PoolTally(self.itl), PoolTally(self.itl)
        self.outcomes: Counter[str] = Counter()  # completed, refused, expired, failed
        self.recoveries: Counter[str] = Counter()
        self.arrivals = self.local_prefills = self.output_tokens = self.queue_peak = 0
        self.moved_bytes = 0.0
        self._slo = slo
        self._good = self._prompt = self._fluent = 0

    def completed(self, ttft_s: float, e2e_s: float, tokens: int, gaps: list[tuple[float, int]]) -> None:
        """A request is over, and its client has all. `gaps`: empty unless percentiles of them are asked for."""
        self.outcomes["completed"] += 1
        self.output_tokens += tokens
        self.ttft.add(ttft_s)
        self.e2e.add(e2e_s)
        itl_s = 0.0
        if tokens > 1:
            itl_s = (e2e_s - ttft_s) / (tokens - 1)
            self.tpot.add(itl_s)
        if self._slo.itl_percentile is not None:
            itl_s = percentile(gaps, self._slo.itl_percentile)
        prompt, fluent = ttft_s <= self._slo.ttft_s, itl_s <= self._slo.itl_s
        self._prompt += prompt
        self._fluent += fluent
        self._good += prompt and fluent

    def report(self, scenario: Scenario, duration_s: float, events: int) -> Report:
        """What came of it."""
        return Report(
            arrivals=self.arrivals,
            completed=self.outcomes["completed"],
            refused=self.outcomes["refused"],
            expired=self.outcomes["expired"],
            failed=self.outcomes["failed"],
            good=self._good,
            good_ttft=self._prompt,
            good_itl=self._fluent,
            duration_s=duration_s,
            ttft=self.ttft.quantiles(),
            itl=self.itl.quantiles(),
            tpot=self.tpot.quantiles(),
            e2e=self.e2e.quantiles(),
            queue=self.queue.quantiles(),
            transfer=self.transfer.quantiles(),
            prefill=self.prefill.report(scenario.prefill, duration_s),
            decode=self.decode.report(scenario.decode, duration_s),
            devices=scenario.devices,
            output_tokens=self.output_tokens,
            moved_bytes=self.moved_bytes,
            recoveries=dict(sorted(self.recoveries.items())),
            local_prefills=self.local_prefills,
            queue_peak=self.queue_peak,
            events=events,
        )
