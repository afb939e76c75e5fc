"""What is counted while a simulation runs, in memory that does not grow with it, and the report made of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from simulator.gaps import percentile
from simulator.histogram import Histogram
from simulator.report import PoolReport, Report

if TYPE_CHECKING:
    from simulator.blocks import CountedPool
    from simulator.scenario import Pool, Scenario, Slo


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
