"""Counters of a running simulation and the report made of them, as a table and as JSON.

`Histogram` has percentiles in constant memory, by bins of constant relative width. `Gaps` keeps the step times of one
worker as long as they can be part of a request's own gaps.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from itertools import dropwhile

import numpy as np
from numpy.typing import NDArray

from baton.planner.sim.block_pool import CountedPool
from baton.planner.sim.scenario import Pool, Scenario, Slo


class Gaps:
    """Step times by step number, in runs of equal length."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, int, float]] = deque()  # first step, end, seconds of each

    def add(self, first: int, count: int, seconds: float) -> None:
        self._pieces.append((first, first + count, seconds))

    def forget(self, before: int) -> None:
        while self._pieces and self._pieces[0][1] <= before:
            self._pieces.popleft()

    def of(self, first: int, end: int) -> list[tuple[float, int]]:
        """Return (seconds, count) pairs of steps first..end-1."""
        seen = dropwhile(lambda piece: piece[1] <= first, self._pieces)
        pieces = ((seconds, min(stop, end) - max(begin, first)) for begin, stop, seconds in seen)
        return [(seconds, count) for seconds, count in pieces if count > 0]


def percentile(gaps: list[tuple[float, int]], percent: float) -> float:
    """Return the gap that `percent` percent of all do not exceed, or 0 without gaps."""
    left = percent / 100.0 * sum(count for _, count in gaps)
    for seconds, count in sorted(gaps):
        left -= count
        if left <= 1e-9:
            return seconds
    return max((seconds for seconds, _ in gaps), default=0.0)


_BINS = 128  # per doubling: values are exact to 0.3 %
_LEAST_S = 1e-7  # lower limit of values
_TOGETHER = 4096  # values per batch; adding them one by one takes several times as long


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Statistics of weighted values in seconds. All are 0 without values."""

    count: float = 0.0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0


class Histogram:
    """Weighted values in seconds."""

    def __init__(self) -> None:
        self._bins: NDArray[np.float64] = np.zeros(0)
        self._count = self._sum = self._max = 0.0
        self._values: list[float] = []  # not in bins yet
        self._weights: list[float] = []

    def add(self, value: float, weight: float = 1.0) -> None:
        self._values.append(value)
        self._weights.append(weight)
        if len(self._values) == _TOGETHER:
            self._settle()

    def quantiles(self) -> Quantiles:
        self._settle()
        if not self._count:
            return Quantiles()
        p50, p90, p95, p99 = map(self._quantile, (0.5, 0.9, 0.95, 0.99))
        return Quantiles(self._count, self._sum / self._count, p50, p90, p95, p99, self._max)

    def _quantile(self, share: float) -> float:
        """Return the value that `share` of all do not exceed."""
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
    """Results of a pool. `busy`: share of the time that its workers spent in steps."""

    workers: int = 0
    devices: int = 0
    busy: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0  # computed
    cached_tokens: int = 0  # from the prefix cache
    decode_tokens: int = 0
    batch: float = 0.0  # mean batch size of decode steps
    kv_used_peak: float = 0.0  # largest share of a worker's blocks in use
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Results in simulated seconds. `itl` counts gaps, `tpot` requests."""

    arrivals: int = 0
    completed: int = 0
    refused: int = 0  # immediately: the queue was full, or the request fits no worker
    expired: int = 0  # after a wait
    failed: int = 0  # because workers were lost
    good: int = 0  # completed within the SLO
    good_ttft: int = 0  # within the TTFT goal
    good_itl: int = 0  # within the ITL goal; requests of one token always are
    duration_s: float = 0.0  # from the first arrival to the last event
    ttft: Quantiles = field(default_factory=Quantiles)
    itl: Quantiles = field(default_factory=Quantiles)
    tpot: Quantiles = field(default_factory=Quantiles)
    e2e: Quantiles = field(default_factory=Quantiles)
    queue: Quantiles = field(default_factory=Quantiles)  # from the arrival to the first placement
    transfer: Quantiles = field(default_factory=Quantiles)  # part of a handoff that computation does not hide
    prefill: PoolReport = field(default_factory=PoolReport)
    decode: PoolReport = field(default_factory=PoolReport)
    devices: int = 0
    output_tokens: int = 0
    moved_bytes: float = 0.0
    recoveries: dict[str, int] = field(default_factory=dict)  # attempts repeated, by reason
    local_prefills: int = 0  # prompts computed by decode workers
    queue_peak: int = 0
    events: int = 0

    @property
    def goodput(self) -> float:
        return self.good / self.duration_s if self.duration_s else 0.0

    @property
    def attainment(self) -> float:
        """Share of all arrivals that were good, or 1 without arrivals."""
        return self.good / self.arrivals if self.arrivals else 1.0

    @property
    def ttft_attainment(self) -> float:
        return self.good_ttft / self.arrivals if self.arrivals else 1.0

    @property
    def itl_attainment(self) -> float:
        return self.good_itl / self.arrivals if self.arrivals else 1.0

    @property
    def throughput(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {
            "goodput": self.goodput,
            "attainment": self.attainment,
            "ttft_attainment": self.ttft_attainment,
            "itl_attainment": self.itl_attainment,
            "throughput": self.throughput,
        }

    def as_json(self) -> str:
        """Return one line of JSON. Equal reports give equal text."""
        return json.dumps(self.as_dict(), sort_keys=True)

    def table(self) -> str:
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
    """Counters of the workers of one role. `itl` is shared by all."""

    def __init__(self, itl: Histogram) -> None:
        self.itl = itl
        self.preemptions = self.cached_tokens = 0
        self.used_most = 0.0  # share of a worker's blocks
        self._steps = self._decode_steps = self._prompts = self._decodes = 0
        self._busy_s = 0.0

    def count(self, steps: int, prompts: int, decodes: int, seconds: float) -> None:
        """Count steps that computed `prompts` prompt tokens and `decodes` decoded tokens in `seconds`, all together."""
        self._steps += steps
        self._decode_steps += steps if decodes else 0
        self._prompts += prompts
        self._decodes += decodes
        self._busy_s += seconds

    def record_peak(self, pool: CountedPool) -> None:
        """Record the peak use of a worker's blocks, at the end of its life."""
        self.used_most = max(self.used_most, pool.used_most / pool.total)

    def report(self, pool: Pool, duration_s: float) -> PoolReport:
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
    """Counters of the whole simulation."""

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
        """Count a completed request. `gaps` is empty unless percentiles of them are needed."""
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
