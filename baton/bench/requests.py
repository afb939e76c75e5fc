"""The requests that `baton bench` sends: a load, made ready for one model. The same seed gives the same requests."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from baton.bench.lengths import Lengths
from baton.bench.traces import IDS, Arrival, Trace, read_trace
from baton.bench.workload import Prompts, Times, arrivals
from baton.client import Model, Prompt
from baton.errors import ConfigError, InvalidRequest, UnknownModel

REQUESTS, CONCURRENCY = 100, 8
CHECKED = 10_000  # requests of an endless load that are checked before the start
MOST_IN_FLIGHT, PROMPT_TOKENS = 1024, "128"  # defaults
ANY_VOCABULARY = 256  # default if the server reports none: ids that every model has
TRACE = "trace"


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """The options. Times are in seconds."""

    concurrency: int | None = None  # requests in flight of a closed loop
    rate: float | None = None  # per second; makes the loop open, like `arrivals`
    arrivals: str | None = None
    max_in_flight: int = MOST_IN_FLIGHT
    requests: int | None = None
    duration: float | None = None
    warmup: int = 0
    prompt_tokens: str = PROMPT_TOKENS
    max_tokens: str | None = None
    trace: Path | None = None
    scale: float = 1.0
    every: int = 1  # keeps each so many-th conversation of the trace
    speed: float = 1.0
    clip: bool = False
    deterministic_share: float = 0.0
    vocab_size: int | None = None
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True
    promise_ms: tuple[float, float] = (0.0, 0.0)  # TTFT and mean ITL to send; 0 means none
    model: str = ""  # empty for the first model that the server has
    api: str = "grpc"  # or http

    @property
    def is_open(self) -> bool:
        return self.rate is not None or self.arrivals is not None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"trace": None if self.trace is None else str(self.trace)}

    def check(self) -> None:
        replayed = self.arrivals == TRACE
        wrong = {
            "--concurrency: for a closed loop only; --max-in-flight limits an open one": self.is_open
            and self.concurrency,
            "--arrivals trace: needs --trace": replayed and self.trace is None,
            f"--arrivals {self.arrivals}: needs --rate": self.is_open and not replayed and self.rate is None,
            "--speed: needs --arrivals trace, without --rate": self.speed != 1
            and (not replayed or self.rate is not None),
            "--scale: needs --trace": self.scale != 1 and self.trace is None,
            "--every: needs --trace": self.every != 1 and self.trace is None,
            "--max-in-flight: for an open loop only; --concurrency limits a closed one": not self.is_open
            and self.max_in_flight != MOST_IN_FLIGHT,
            f"--vocab-size: must be at most {IDS}": (self.vocab_size or 0) > IDS,
        }
        numbers = {"duration": self.duration or 0, "deterministic-share": self.deterministic_share}
        numbers |= {"temperature": self.temperature, "promise-ms": sum(self.promise_ms)}
        wrong |= {f"--{name}: must be a number, got nan": math.isnan(value) for name, value in numbers.items()}
        for message, is_so in wrong.items():
            if is_so:
                raise ConfigError(message)


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request, to be sent `at_s` seconds after the start."""

    prompt: Prompt
    max_tokens: int
    at_s: float = 0.0
    deterministic: bool = False
    clipped: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """The distributions and files of a plan, parsed. The load is endless if `count` is None."""

    plan: BenchPlan
    lengths: Lengths
    trace: Trace | None
    times: Times | None

    @classmethod
    def read(cls, plan: BenchPlan) -> Load:
        plan.check()
        lengths = Lengths.parse(plan.prompt_tokens, plan.max_tokens)
        trace = None
        if plan.trace is not None:
            trace = read_trace(plan.trace, scale=plan.scale, limit=plan.requests, every=plan.every)
            _check_lengths(plan, trace, lengths)
        if plan.arrivals == TRACE and trace is not None:
            return cls(plan, lengths, _replayed(plan, trace), None)
        times = None if plan.rate is None else Times.parse(plan.arrivals or "poisson", plan.rate)
        return cls(plan, lengths, trace, times)

    @property
    def count(self) -> int | None:
        if self.plan.requests is not None or self.plan.duration is not None:
            return self.plan.requests
        return REQUESTS if self.trace is None else len(self.trace.arrivals)

    def _endless(self) -> Iterator[Arrival]:
        return arrivals(self.lengths, self.plan.seed, trace=self.trace, times=self.times)

    def arrivals(self) -> Iterator[Arrival]:
        found = itertools.islice(self._endless(), self.count)
        if self.plan.is_open and (until := self.plan.duration) is not None:
            return itertools.takewhile(lambda one: one.at_s < until, found)
        return found

    def requests(self, model: Model) -> Iterator[BenchRequest]:
        """Return all requests for `model`. Raises InvalidRequest immediately for lengths that do not fit the model."""
        checked = list(itertools.islice(self.arrivals(), CHECKED if self.count is None else None))
        _check(checked, model, clip=self.plan.clip)
        return self._prepared(self.arrivals(), model, self.plan.seed)

    def warmup(self, model: Model) -> Iterator[BenchRequest]:
        """Yield requests of the same lengths that leave no useful prefixes in a cache."""
        load = (replace(one, prompt=None, prompt_tokens=one.prompt_tokens or 1, blocks=()) for one in self._endless())
        for one in self._prepared(itertools.islice(load, self.plan.warmup), model, self.plan.seed + 1):
            yield replace(one, deterministic=False)

    def _prepared(self, found: Iterator[Arrival], model: Model, seed: int) -> Iterator[BenchRequest]:
        prompts = Prompts(self.plan.vocab_size or model.vocab_size or ANY_VOCABULARY, seed)
        draw = random.Random(f"{seed}/deterministic")
        for number, one in enumerate(found):
            fit = one.within(model.max_model_len) if model.max_model_len else one
            prompt = prompts.tokens(fit, number) if fit.prompt is None else fit.prompt
            is_deterministic = draw.random() < self.plan.deterministic_share
            yield BenchRequest(prompt, fit.max_tokens, fit.at_s, is_deterministic, fit is not one)


def _check_lengths(plan: BenchPlan, trace: Trace, lengths: Lengths) -> None:
    """Raise ConfigError for a length that no request of the trace takes. Pairs of a file have lengths of answers."""
    complete = all(one.max_tokens for one in trace.arrivals)
    if plan.prompt_tokens != PROMPT_TOKENS and (complete or not lengths.paired):
        raise ConfigError("--prompt-tokens: for random prompts only, all requests of --trace have their own")
    if plan.max_tokens is not None and complete:
        raise ConfigError(f"--max-tokens: all requests of {trace.path} have their own")


def _replayed(plan: BenchPlan, trace: Trace) -> Trace:
    if not trace.timed:
        raise ConfigError(f"--arrivals trace: {trace.path} has no timestamps")
    if plan.rate is not None and not trace.period_s:
        raise ConfigError(f"--rate: all requests of {trace.path} have the same timestamp, and no rate")
    if plan.duration is not None and plan.requests is None and not trace.period_s:
        raise ConfigError(f"--duration: all requests of {trace.path} have the same timestamp: needs --requests")
    speed = plan.speed if plan.rate is None else plan.rate * trace.period_s / len(trace.arrivals)
    return trace.faster(speed)


def served(models: Sequence[Model], name: str) -> Model:
    """Return the model called `name`, or the first one if `name` is empty. Raises UnknownModel."""
    for model in models:
        if name in {"", model.id, *model.aliases}:
            return model
    raise UnknownModel(f"no model {name!r} is served")


def _check(load: Sequence[Arrival], model: Model, *, clip: bool) -> None:
    """Raise InvalidRequest for requests that are too long. `clip` exempts those that can be cut: prompts not given."""
    long = [one for one in load if 0 < model.max_model_len < one.total_tokens]
    if clip:
        long = [one for one in long if one.prompt is not None]
    if long:
        most = max(long, key=lambda one: one.total_tokens)
        what = f"{most.prompt_tokens} and {most.max_tokens} new ones are more than the {model.max_model_len} tokens"
        more = f"{len(long)} of {len(load)} requests are too long; --clip cuts them, --scale divides those of a trace"
        if written := sum(one.prompt is not None for one in long):
            more += f"; prompts with text or token ids ({written} of these) are never cut"
        raise InvalidRequest.of("prompt_tokens", f"{what} of {model.id}: {more}")
