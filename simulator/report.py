"""What came of a simulation, as a table for people and JSON for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from simulator.histogram import Quantiles


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
