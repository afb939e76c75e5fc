"""Promises under load, in simulations of the production admission."""

import math
from random import Random
from typing import Any

import pytest

from baton.bench.traces import Arrival
from baton.planner.sim.cluster import Cluster
from baton.planner.sim.scenario import Linear, Network, Pool, Router, Scenario, Slo, line

WARMUP = 250
PROMPT, DECODE = Linear(line(0.004, 1e-4)), Linear(line(0.004, 1e-4), line(0.008, 0.0008, 1e-7))
NOISE = (0.7, 0.85, 0.95, 1.0, 1.0, 1.0, 1.05, 1.45)


def run(rate: float, slo: Slo, *, spread: tuple[float, ...] = (), promised: bool = True, seed: int = 1):
    """Run a light load without promises, then 600 arrivals at `rate`. Return the cluster and its report."""
    draw, at_s, load = Random(seed), 0.0, []
    for number in range(WARMUP + 600):
        at_s += draw.expovariate(8.0 if number < WARMUP else rate)
        load.append(Arrival(at_s, draw.randint(100, 800), draw.randint(20, 120)))
    shape: dict[str, Any] = {"spread": spread, "prefix_cache": False}
    router = Router(
        max_requests=10**6, max_wait_s=1e3, report_s=0.1, local_prefill=False,
        promises_from_s=load[WARMUP].at_s if promised else math.inf,
    )  # fmt: skip
    prefill, decode = Pool(1, PROMPT, **shape), Pool(1, DECODE, kv_blocks=4000, **shape)
    scenario = Scenario(decode, prefill, network=Network(token_bytes=1000.0), router=router, slo=slo, seed=seed)
    cluster = Cluster(scenario)
    return cluster, cluster.run(load)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("slo", [Slo(0.4, 1.0), Slo(2.0, 0.04)], ids=["ttft", "itl"])
def test_with_exact_costs_99_percent_are_kept_at_twice_the_capacity(slo):
    cluster, _ = run(26.0, slo)
    outcomes = cluster.router.promises.outcomes
    assert outcomes["kept"] > 200
    assert outcomes["refused"] > 100
    assert outcomes["broken_ttft"] + outcomes["broken_itl"] <= 0.01 * outcomes["kept"]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("rate", "seed"), [(13.0, 2), (26.0, 1), (26.0, 3)])
def test_with_noise_99_percent_are_kept(rate, seed):
    cluster, report = run(rate, Slo(0.6, 0.05), spread=NOISE, seed=seed)
    outcomes = cluster.router.promises.outcomes
    broken = outcomes["broken_ttft"] + outcomes["broken_itl"]
    assert broken <= 0.01 * (outcomes["kept"] + broken)
    if rate > 20.0:
        _, control = run(rate, Slo(0.6, 0.05), spread=NOISE, promised=False, seed=seed)
        assert report.goodput > 1.5 * control.goodput, "without promises, most requests are late"
