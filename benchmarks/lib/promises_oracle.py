"""Simulated admission with promises, and the oracle that it is compared with.

The oracle is given the true times: it accepts a request exactly if a simulation of all accepted requests with it shows
that each of them keeps its limits. A simulation of the last ones alone has another noise, because each step draws one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from baton.bench.traces import Arrival
from baton.planner.sim.cluster import Cluster
from baton.planner.sim.scenario import Pool, Scenario

WARM_UP = 250  # requests without promises, which teach the costs


@dataclass(frozen=True, slots=True)
class Result:
    """One load: accepted and kept requests of all that were offered, and seconds of the load."""

    offered: int
    accepted: int
    kept: int
    seconds: float
    bins: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # outcomes by tenth of the forecast: TTFT, mean gap

    @property
    def goodput(self) -> float:
        return self.kept / self.seconds


def poisson(count: int, rate: float, lengths: Sequence[tuple[int, int]], seed: int, at_s: float = 0.0) -> list[Arrival]:
    """Return `count` arrivals from `at_s` on. `lengths` are pairs of prompt and answer tokens, drawn evenly."""
    draw, load = Random(seed), []
    for _ in range(count):
        at_s += draw.expovariate(rate)
        load.append(Arrival(at_s, *draw.choice(lengths)))
    return load


def capacity(scenario: Scenario, load: Sequence[Arrival]) -> float:
    """Return the requests per second of the cluster if all of `load` arrives at the start."""
    wide = replace(scenario.router, promises_from_s=math.inf)
    report = Cluster(replace(scenario, router=wide)).run([replace(one, at_s=0.0) for one in load])
    return report.completed / report.duration_s


def promised(scenario: Scenario, load: Sequence[Arrival], calm: float) -> Result:
    """Simulate `load` with promises, after a load of `calm` requests per second without promises."""
    lengths = [(one.prompt_tokens, one.max_tokens) for one in load]
    before = poisson(WARM_UP, calm, lengths, scenario.seed)
    begin = before[-1].at_s + 1.0
    after = [replace(one, at_s=one.at_s + begin) for one in load]
    cluster = Cluster(replace(scenario, router=replace(scenario.router, promises_from_s=begin)))
    cluster.run([*before, *after])
    promises = cluster.router.promises
    kept = promises.outcomes["kept"]
    tenths = tuple(tuple(found.values()) for found in promises.margins.bins.values())
    return Result(len(load), kept + promises.broken, kept, load[-1].at_s, (tenths[0], tenths[1]))


def control(scenario: Scenario, load: Sequence[Arrival]) -> Result:
    """Simulate `load` without promises: first come, first served."""
    report = Cluster(scenario).run(load)
    return Result(len(load), len(load), report.good, load[-1].at_s)


def oracle(scenario: Scenario, load: Sequence[Arrival]) -> Result:
    """Simulate the oracle's admission. The time grows with the square of the load."""
    accepted: list[Arrival] = []
    for one in load:
        if Cluster(scenario).run([*accepted, one]).good > len(accepted):
            accepted.append(one)
    return Result(len(load), len(accepted), len(accepted), load[-1].at_s)


def without_noise(scenario: Scenario) -> Scenario:
    """Return the scenario with the mean times of all steps, because an oracle cannot have a real cluster's noise."""
    return replace(scenario, decode=_mean(scenario.decode), prefill=_mean(scenario.prefill))


def _mean(pool: Pool) -> Pool:
    busy = pool.contention
    if busy is not None:
        none: dict[str, Any] = {"spread": ()}
        prompts, decode = (one.model_copy(update=none) for one in (busy.beside_prompts, busy.beside_decode))
        busy = replace(busy, beside_prompts=prompts, beside_decode=decode)
    return replace(pool, spread=(), contention=busy)
