"""Benchmark of the simulator on one core: `python -m baton.planner.sim --requests 1000000 --workers 1000`.

The cluster can carry the load: a fifth of the workers prefill, arrivals are Poisson, prompts have 512 tokens and
answers 128 on average. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from collections.abc import Iterator
from random import Random

from baton.bench.traces import Arrival
from baton.logs import configure_logging
from baton.planner.sim.cluster import simulate
from baton.planner.sim.scenario import Linear, Network, Pool, Scenario, line

_COST = Linear(line(0.004, 2e-5, 1e-9), line(0.010, 2e-4, 2e-8))
_RATE = 8.0  # requests per second and worker


def scale_scenario(workers: int, *, colocated: bool = False, seed: int = 0) -> Scenario:
    """Return a scenario with network and step costs like those of a small model on GPUs."""
    network = Network(token_bytes=131072)
    if colocated:
        pool = Pool(workers, _COST, kv_blocks=8000, max_running=256, max_batched_tokens=512)
        return Scenario(pool, mode="colocated", network=network, seed=seed)
    prefill = Pool(max(1, workers // 5), _COST, kv_blocks=8000)
    decode = Pool(workers - prefill.workers, _COST, kv_blocks=8000, max_running=256)
    return Scenario(decode, prefill, network=network, seed=seed)


def scale_load(requests: int, rate: float, seed: int = 0) -> Iterator[Arrival]:
    """Yield arrivals at `rate` per second."""
    draw, at_s = Random(seed), 0.0
    for _ in range(requests):
        at_s += draw.expovariate(rate)
        yield Arrival(at_s, max(1, round(draw.gauss(512, 128))), 1 + int(draw.expovariate(1 / 127)))


def main() -> None:
    """Simulate the load and print its report."""
    parser = argparse.ArgumentParser(
        prog="python -m baton.planner.sim", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--rate", type=float, default=_RATE, help="requests per second and worker")
    parser.add_argument("--colocated", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.requests < 1:
        parser.error(f"--requests: must be at least 1, got {args.requests}")
    if not 0 < args.rate < math.inf:
        parser.error(f"--rate: must be requests per second and worker, a number above 0, got {args.rate:g}")
    if args.workers < (least := 1 if args.colocated else 2):
        parser.error(f"--workers: must be at least {least}, got {args.workers}")
    configure_logging("warning")
    scenario = scale_scenario(args.workers, colocated=args.colocated, seed=args.seed)
    wall, cpu = time.perf_counter(), time.process_time()
    report = simulate(scenario, scale_load(args.requests, args.rate * args.workers, args.seed))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    sys.stdout.write(report.table() + "\n")
    figures = {
        "requests": args.requests,
        "workers": args.workers,
        "events": report.events,
        "cpu_s": round(cpu, 2),
        "wall_s": round(wall, 2),
        "events_per_s": round(report.events / cpu),
        "us_per_request": round(cpu / args.requests * 1e6, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
