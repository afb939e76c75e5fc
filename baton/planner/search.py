"""Search for the cheapest pools that carry a load within a goal. Every layout in a plan was simulated.

least      lower bound of a pool's size, by arithmetic
phase      smallest prefill pool with an ample decode pool, and the reverse
pair       both pools in order of GPUs; a pair that misses the goal adds its successors with one more worker
colocated  smallest number of colocated workers, for several chunk sizes
own        layout of a cluster file, if it was tried: it wins with fewer GPUs
goodput    highest rate that the best layout of each kind carries, by bisection, per GPU
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from baton.bench.lengths import Lengths
from baton.bench.traces import Arrival, Trace, cached_share
from baton.bench.workload import Times, arrivals
from baton.errors import ConfigError
from baton.planner.profile import Profile
from baton.planner.sim.scenario import Fault, Overheads, Pool, Router, Scenario, Slo
from baton.planner.sim.stats import Report

SAMPLE = 2000  # requests from which the lengths are estimated
SPAN_S = 60.0  # least duration of a load, within its limit of requests


@dataclass(frozen=True, slots=True)
class Shape:
    """Worker counts and GPUs per worker. Without prefill workers it is colocated, in chunks of `chunk` tokens."""

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
        """Return the same proportions for `workers` workers. Separate pools need at least two."""
        share = self.prefill / (self.prefill + self.decode)
        prefill = min(max(1, round(workers * share)), workers - 1) if self.prefill else 0
        return replace(self, prefill=prefill, decode=max(1, workers - prefill))


@dataclass(frozen=True, slots=True)
class Site:
    """All inputs except pool sizes: worker costs and settings, router, goal and faults."""

    profile: Profile
    slo: Slo = field(default_factory=Slo)
    prefill: Pool = field(default_factory=lambda: Pool(0, max_batched_tokens=8192))
    decode: Pool = field(default_factory=lambda: Pool(0))
    router: Router = field(default_factory=Router)
    faults: tuple[Fault, ...] = ()
    seed: int = 0

    def room(self, tensor_parallel: int) -> int:
        """Return the KV tokens that a worker of that size holds, in whole blocks. No request may have more."""
        size = self.decode.block_size
        return max(1, self.profile.layout(tensor_parallel).kv_tokens // size) * size

    def scenario(self, shape: Shape) -> Scenario:
        """Return the scenario of a shape. Raises ConfigError if the profile lacks its tensor-parallel size."""
        decode = self.profile.pool(shape.decode, shape.decode_tp, self.decode)
        prefill = self.profile.pool(shape.prefill, shape.prefill_tp, self.prefill)
        if not shape.prefill:
            decode = replace(decode, max_batched_tokens=shape.chunk or self.decode.max_batched_tokens)
        return Scenario(
            decode,
            prefill if shape.prefill else Pool(0),
            "disaggregated" if shape.prefill else "colocated",
            self.profile.network(),
            Overheads(**self.profile.overheads.model_dump()),
            self.router,
            self.slo,
            self.faults,
            self.seed,
        )


@dataclass(frozen=True)
class Workload:
    """Requests of some lengths at any rate. A trace with times keeps its bursts and is played faster or slower."""

    lengths: Lengths
    times: str = "poisson"
    trace: Trace | None = None
    requests: int = 1000
    seed: int = 0

    def at(self, rate: float, least: int = 0) -> Iterator[Arrival]:
        return itertools.islice(self._endless(rate), self.count(rate, least))

    def count(self, rate: float, least: int = 0) -> int:
        """Return max(`requests`, `least`, requests within SPAN_S but at most ten times `requests`)."""
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
        """Requests per second of a trace with times, or None."""
        if self.trace is None or not self.trace.timed or not self.trace.period_s:
            return None
        return len(self.trace.arrivals) / self.trace.period_s

    @cached_property
    def shared(self) -> float:
        """Share of prompt tokens that a prefix cache can hold, or 0 without a trace."""
        return cached_share(self.trace.arrivals) if self.trace is not None else 0.0

    @cached_property
    def _sample(self) -> list[Arrival]:
        return list(itertools.islice(arrivals(self.lengths, self.seed, trace=self.trace), SAMPLE))

    def tokens(self, share: float) -> int:
        """Return the prompt and answer tokens that `share` of the sampled requests do not exceed."""
        totals = sorted(one.total_tokens for one in self._sample)
        return totals[max(0, math.ceil(share * len(totals)) - 1)]

    @cached_property
    def mean(self) -> Means:
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
    """Mean tokens per request and the positions they attend to, for the prompt and for decoding."""

    prompt: float
    prompt_context: float
    decoded: float
    decoded_context: float


def least_prefill(site: Site, workload: Workload, rate: float, tensor_parallel: int) -> int:
    """Return a lower bound: workers are never idle, and a prompt costs its tokens but no fixed step time."""
    line, mean = site.profile.layout(tensor_parallel).prompt, workload.mean
    busy = rate * (line.token_s * mean.prompt + line.context_s * mean.prompt_context) * (1 - workload.shared)
    return max(1, math.ceil(busy))


def least_decode(site: Site, workload: Workload, rate: float, tensor_parallel: int) -> int:
    """Return a lower bound: workers are never idle, in the cheapest batch within ITL goal and KV capacity."""
    mean = workload.mean
    if not mean.decoded:
        return 1
    cost, context = site.profile.layout(tensor_parallel).cost(), mean.decoded_context / mean.decoded
    room = site.room(tensor_parallel) / (context * (1 - workload.shared))  # cached prefixes are shared by sequences
    best = cost.seconds(0, 0, 1, round(context))
    for rows in range(2, min(site.decode.max_running, math.ceil(room)) + 1):
        step_s = cost.seconds(0, 0, rows, round(rows * context))
        if step_s <= site.slo.itl_s:  # a piecewise cost may meet the goal again for larger batches
            best = min(best, step_s / rows)
    return max(1, math.ceil(rate * mean.decoded * best * 0.9))  # some may miss the goal in larger batches


Run = Callable[[Scenario, Iterable[Arrival]], Report]
CHUNKS = (256, 512, 1024, 2048, 4096)
AMPLE = 3  # size of the other pool in a phase, as a multiple of its lower bound
PHASES = ("prefill phase", "decode phase")
OWN = "the file"  # reason for trying the layout of a cluster file


@dataclass(frozen=True, slots=True)
class Tried:
    """A simulated shape with its rate, its result and the reason `why` it was tried."""

    shape: Shape
    rate: float
    report: Report
    met: bool
    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The cheapest layout of each kind that meets the goal, or None if none does within the GPU limit."""

    rate: float
    disaggregated: Tried | None
    colocated: Tried | None
    goodput: dict[str, float]  # requests per second and GPU, by kind
    tried: tuple[Tried, ...]
    at_least: frozenset[str] = frozenset()  # kinds with more goodput than so few requests show

    @property
    def best(self) -> Tried | None:
        """The layout with fewer GPUs. A tie goes to the higher goodput."""
        found = [one for one in (self.disaggregated, self.colocated) if one is not None]
        return min(found, key=lambda one: (one.shape.gpus, -self.goodput[kind(one.shape)]), default=None)


def kind(shape: Shape) -> str:
    """Return the name of a shape's kind in reports."""
    return "disaggregated" if shape.prefill else "colocated"


@dataclass
class Planner:
    """Simulates each shape at each rate once."""

    run: Run
    site: Site
    workload: Workload
    attainment: float = 0.9  # least share of good requests
    gpus: int = 16
    near: float = 0.05  # largest relative error of a goodput, which is never too high
    on_tried: Callable[[Tried], None] = lambda tried: None
    tried: dict[tuple[Shape, float, str], Tried] = field(default_factory=dict)

    def plan(self, rate: float, chunks: Iterable[int] = CHUNKS) -> Answer:
        """Find the cheapest layouts for `rate` requests per second. Raises ConfigError."""
        apart = self._or_own(self._disaggregated(rate), "disaggregated", rate)
        together = self._or_own(self._colocated(rate, chunks), "colocated", rate)
        found = [one.shape for one in (apart, together) if one is not None]
        goodput = {kind(shape): self.goodput(shape, rate) / shape.gpus for shape in found}
        at_least = frozenset(kind(shape) for shape in found if self.too_short(shape, goodput[kind(shape)] * shape.gpus))
        return Answer(rate, apart, together, goodput, tuple(self.tried.values()), at_least)

    def _or_own(self, found: Tried | None, what: str, rate: float) -> Tried | None:
        """Return the cluster file's own layout if it met the goal with fewer GPUs than `found`."""
        own = [one for one in self.tried.values() if one.why == OWN and one.met and one.rate == rate]
        fits = [one for one in own if kind(one.shape) == what and one.shape.gpus <= self.gpus]
        return min([found, *fits] if found is not None else fits, key=lambda one: one.shape.gpus, default=None)

    def attempt(self, shape: Shape, rate: float, why: str) -> Tried:
        """Simulate a shape at a rate, or return the earlier result. Phases are simulated without local prefills."""
        key = shape, rate, why if why in PHASES else ""
        if key not in self.tried:
            scenario = self.site.scenario(shape)
            if why in PHASES:
                scenario = replace(scenario, router=replace(scenario.router, local_prefill=False))
            report = self.run(scenario, self.workload.at(rate, _least_requests(shape)))
            self.tried[key] = Tried(shape, rate, report, report.attainment >= self.attainment, why)
            self.on_tried(self.tried[key])
        return self.tried[key]

    def goodput(self, shape: Shape, from_rate: float = 1.0) -> float:
        """Return the highest rate (requests/s) that meets the goal or is `too_short`, or 0 below `from_rate` / 1000."""
        low, high = 0.0, from_rate
        while self.attempt(shape, high, "goodput").met:
            if self.too_short(shape, high):
                return high
            low, high = high, high * 2
        while high - low > self.near * high and high > from_rate / 1000:
            middle = (low + high) / 2
            low, high = (middle, high) if self.attempt(shape, middle, "goodput").met else (low, middle)
        return low

    def too_short(self, shape: Shape, rate: float) -> bool:
        """Return whether all requests arrive within the TTFT goal, which makes the load a burst instead of a rate."""
        return self.workload.count(rate, _least_requests(shape)) < rate * self.site.slo.ttft_s

    def _disaggregated(self, rate: float) -> Tried | None:
        queue: list[tuple[int, int, Shape]] = []
        known: set[Shape] = set()

        def push(shape: Shape) -> None:
            if shape not in known and shape.gpus <= self.gpus:
                known.add(shape)
                heapq.heappush(queue, (shape.gpus, len(known), shape))

        prefill = {tp: self._prefill_least(rate, tp) for tp in self.site.profile.sizes}
        decode = {tp: self._decode_least(rate, tp) for tp in self.site.profile.sizes}
        for prefill_tp, workers in prefill.items():
            for decode_tp, more in decode.items():
                if workers is not None and more is not None:
                    push(Shape(more, workers, decode_tp, prefill_tp))
        while queue:
            shape = heapq.heappop(queue)[2]
            if (tried := self.attempt(shape, rate, "pair")).met:
                return self._smaller(tried)
            push(replace(shape, prefill=shape.prefill + 1))
            push(replace(shape, decode=shape.decode + 1))
        return None

    def _smaller(self, found: Tried) -> Tried:
        """Remove workers while the goal is met: local prefills may allow smaller pools than the phases need."""
        shape = found.shape
        fewer = [replace(shape, prefill=shape.prefill - 1), replace(shape, decode=shape.decode - 1)]
        for one in sorted((one for one in fewer if one.prefill and one.decode), key=lambda one: one.gpus):
            if (tried := self.attempt(one, found.rate, "pair")).met:
                return self._smaller(tried)
        return found

    def _prefill_least(self, rate: float, tp: int) -> int | None:
        """Return the least prefill workers that meet the TTFT goal with an ample decode pool."""
        decode, decode_tp = self._ample(least_decode, rate)

        def met(workers: int) -> bool:
            tried = self.attempt(Shape(decode, workers, decode_tp, tp), rate, "prefill phase")
            return tried.report.ttft_attainment >= self.attainment

        return _least(met, least_prefill(self.site, self.workload, rate, tp), (self.gpus - 1) // tp)

    def _decode_least(self, rate: float, tp: int) -> int | None:
        """Return the least decode workers that meet the ITL goal with an ample prefill pool."""
        prefill, prefill_tp = self._ample(least_prefill, rate)

        def met(workers: int) -> bool:
            tried = self.attempt(Shape(workers, prefill, tp, prefill_tp), rate, "decode phase")
            return tried.report.itl_attainment >= self.attainment

        return _least(met, least_decode(self.site, self.workload, rate, tp), (self.gpus - 1) // tp)

    def _ample(self, least: Callable[[Site, Workload, float, int], int], rate: float) -> tuple[int, int]:
        """Return an ample pool (workers, tensor parallel) of the cheapest size that holds `attainment` of requests."""
        tokens, sizes = self.workload.tokens(self.attainment), self.site.profile.sizes
        large = [size for size in sizes if self.site.room(size) >= tokens]
        workers = {size: least(self.site, self.workload, rate, size) for size in large or sizes}
        tp = min(workers, key=lambda size: workers[size] * size)
        return workers[tp] * AMPLE, tp

    def _colocated(self, rate: float, chunks: Iterable[int]) -> Tried | None:
        """Return the layout with the fewest GPUs over all chunk sizes. A tie goes to the highest attainment."""
        best: Tried | None = None
        for tp in self.site.profile.sizes:
            least = max(f(self.site, self.workload, rate, tp) for f in (least_prefill, least_decode))
            for chunk in chunks:
                found = self._colocated_least(rate, Shape(least, decode_tp=tp, chunk=chunk), best)
                if found is not None and (best is None or _order(found) < _order(best)):
                    best = found
        return best

    def _colocated_least(self, rate: float, least: Shape, best: Tried | None) -> Tried | None:
        """Search upwards from `least` workers. First check whether as few GPUs suffice."""

        def tried(workers: int) -> Tried:
            return self.attempt(replace(least, decode=workers), rate, "colocated")

        most = (best.shape.gpus if best else self.gpus) // least.decode_tp
        if best is not None and (most < least.decode or not tried(most).met):
            return None
        if best is not None and (most == least.decode or not tried(most - 1).met):
            return tried(most)
        workers = _least(lambda count: tried(count).met, least.decode, most)
        return tried(workers) if workers is not None else None


def _least_requests(shape: Shape) -> int:
    return 3 * (shape.prefill + shape.decode)


def _order(tried: Tried) -> tuple[int, float]:
    return tried.shape.gpus, -tried.report.attainment


def _least(met: Callable[[int], bool], least: int, most: int) -> int | None:
    """Return the smallest number from `least` to `most` that meets a monotone condition, or None."""
    high = next((count for count in _doubling(least, most) if met(count)), None)
    if high is None:
        return None
    low = max([least - 1, *(count for count in _doubling(least, most) if count < high)])
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if met(middle) else (middle, high)
    return high


def _doubling(least: int, most: int) -> Iterator[int]:
    """Yield `least`, then numbers at doubling distances, then `most`."""
    count, step = least, 1
    while count < most:
        yield count
        count, step = count + step, step * 2
    if least <= most:
        yield most
