"""A layout of pools that a planner tries, the load that it must carry, and what the load costs at the very least."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from baton.bench.lengths import Lengths
from baton.bench.traces import Arrival, Trace, summary
from baton.bench.workload import Times, arrivals
from baton.errors import ConfigError
from simulator.profile import Profile
from simulator.scenario import Fault, Pool, Router, Scenario, Slo

SAMPLE = 2000  # requests by which lengths are known
SPAN_S = 60.0  # so long a load lasts at least, if it may have so many requests


@dataclass(frozen=True, slots=True)
class Shape:
    """Pools: how many workers, of how many GPUs each. Colocated if none prefills, in chunks of `chunk` tokens."""

    decode: int
    prefill: int = 0
    decode_tp: int = 1
    prefill_tp: int = 1
    chunk: int = 0

    @property
    def gpus(self) -> int:
        return self.prefill * self.prefill_tp + self.decode * self.decode_tp

    def __str__(self) -> str:
        if not self.prefill:
            return f"{self.decode} colocated (tp {self.decode_tp}, chunks of {self.chunk})"
        return f"{self.prefill} prefill (tp {self.prefill_tp}) + {self.decode} decode (tp {self.decode_tp})"

    def of(self, workers: int) -> Shape:
        """The same shares of so many workers, of which separate pools need two."""
        share = self.prefill / (self.prefill + self.decode)
        prefill = min(max(1, round(workers * share)), workers - 1) if self.prefill else 0
        return replace(self, prefill=prefill, decode=max(1, workers - prefill))


@dataclass(frozen=True, slots=True)
class Site:
    """All but the sizes of pools: what workers are like, the router, the goal, what goes wrong."""

    profile: Profile
    slo: Slo = field(default_factory=Slo)
    prefill: Pool = field(default_factory=lambda: Pool(0, max_batched_tokens=8192))
    decode: Pool = field(default_factory=lambda: Pool(0))
    router: Router = field(default_factory=Router)
    faults: tuple[Fault, ...] = ()
    seed: int = 0

    def room(self, tensor_parallel: int) -> int:
        """Tokens of KV that a worker of that size has blocks for: no request may have more."""
        size = self.decode.block_size
        return max(1, self.profile.layout(tensor_parallel).kv_tokens // size) * size

    def scenario(self, shape: Shape) -> Scenario:
        """Raises ConfigError for a tensor-parallel size that the profile does not have."""
        decode = self.profile.pool(shape.decode, shape.decode_tp, self.decode)
        prefill = self.profile.pool(shape.prefill, shape.prefill_tp, self.prefill)
        if not shape.prefill:
            decode = replace(decode, max_batched_tokens=shape.chunk or self.decode.max_batched_tokens)
        return Scenario(
            decode,
            prefill if shape.prefill else Pool(0),
            "disaggregated" if shape.prefill else "colocated",
            self.profile.network(),
            self.profile.beside(),
            self.router,
            self.slo,
            self.faults,
            self.seed,
        )


@dataclass(frozen=True)
class Workload:
    """Requests of some lengths at any rate. Those of a trace with times keep its bursts, faster or slower."""

    lengths: Lengths
    times: str = "poisson"
    trace: Trace | None = None
    requests: int = 1000
    seed: int = 0

    def at(self, rate: float, least: int = 0) -> Iterator[Arrival]:
        """`rate` requests per second: `requests` or `least` of them, more if they would not last for SPAN_S, but never
        more than ten times as many.
        """
        return itertools.islice(self._endless(rate), self.count(rate, least))

    def count(self, rate: float, least: int = 0) -> int:
        """How many requests `at` gives."""
        return max(self.requests, least, math.ceil(min(10 * self.requests, rate * SPAN_S)))

    def _endless(self, rate: float) -> Iterator[Arrival]:
        own = self.own_rate
        if own is None:
            times = Times.parse(self.times, rate)
            return arrivals(self.lengths, self.seed, trace=self.trace, times=times)
        if not 0 < rate < math.inf:
            raise ConfigError(f"--rate: must be requests per second, a number above 0, got {rate:g}")
        found = arrivals(self.lengths, self.seed, trace=self.trace)
        return (replace(one, at_s=one.at_s * own / rate) for one in found)

    @property
    def own_rate(self) -> float | None:
        """Of a trace with times, in requests per second."""
        if self.trace is None or not self.trace.timed or not self.trace.period_s:
            return None
        return len(self.trace.arrivals) / self.trace.period_s

    @cached_property
    def shared(self) -> float:
        """The share of prompt tokens that a prefix cache can hold. What is not known to be shared is not."""
        return summary(self.trace.arrivals).shared if self.trace is not None else 0.0

    @cached_property
    def _sample(self) -> list[Arrival]:
        return list(itertools.islice(arrivals(self.lengths, self.seed, trace=self.trace), SAMPLE))

    def tokens(self, share: float) -> int:
        """A request has at most so many with its answer, for that share of its first ones."""
        totals = sorted(one.total_tokens for one in self._sample)
        return totals[max(0, math.ceil(share * len(totals)) - 1)]

    @cached_property
    def mean(self) -> Means:
        """Of the lengths of its first requests."""
        some = self._sample
        prompts = [one.prompt_tokens for one in some]
        return Means(
            sum(prompts) / len(some),
            sum(tokens * (tokens + 1) / 2 for tokens in prompts) / len(some),
            sum(one.max_tokens - 1 for one in some) / len(some),
            sum((one.max_tokens - 1) * (one.prompt_tokens + one.max_tokens / 2) for one in some) / len(some),
        )


@dataclass(frozen=True, slots=True)
class Means:
    """Of one request: tokens of its prompt, positions they attend to, and the same of what is decoded."""

    prompt: float
    prompt_context: float
    decoded: float
    decoded_context: float


def least_prefill(site: Site, workload: Workload, rate: float, tensor_parallel: int) -> int:
    """Workers that are never idle: no prompt costs less than its tokens in a batch of any size."""
    line, mean = site.profile.layout(tensor_parallel).prompt, workload.mean
    busy = rate * (line.token_s * mean.prompt + line.context_s * mean.prompt_context) * (1 - workload.shared)
    return max(1, math.ceil(busy))


def least_decode(site: Site, workload: Workload, rate: float, tensor_parallel: int) -> int:
    """Workers that are never idle, in batches of the size that costs least, within the ITL goal and the room for KV."""
    mean = workload.mean
    if not mean.decoded:
        return 1
    cost, context = site.profile.layout(tensor_parallel).cost(), mean.decoded_context / mean.decoded
    room = site.room(tensor_parallel) / (context * (1 - workload.shared))  # rows share what caches find
    best = cost.seconds(0, 0, 1, round(context))
    for rows in range(2, min(site.decode.max_running, math.ceil(room)) + 1):
        step_s = cost.seconds(0, 0, rows, round(rows * context))
        if step_s <= site.slo.itl_s:  # of a cost in pieces, larger batches may be within it again
            best = min(best, step_s / rows)
    return max(1, math.ceil(rate * mean.decoded * best * 0.9))  # some may miss the goal, and decode in larger batches
