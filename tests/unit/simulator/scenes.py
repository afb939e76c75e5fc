"""Small scenarios, and synthetic loads."""

from collections.abc import Iterator
from random import Random
from typing import Any

from baton.bench.traces import Arrival
from baton.planner.sim.scenario import Linear, Network, Overheads, Pool, Router, Scenario, line

PROMPTS = line(0.004, 2e-5, 1e-9)
DECODING = line(0.010, 2e-4, 2e-8)
COST = Linear(PROMPTS, DECODING)
NO_OVERHEADS = Overheads(0.0, 0.0, 0.0, 0.0)
AT_ONCE = Network(bytes_per_s=1e18, latency_s=0.0)
PATIENT = Router(max_requests=10**6, max_tokens=10**9, max_wait_s=1e6, local_prefill=False)


def poisson(requests: int, rate: float, prompt: int = 256, answer: int = 64, seed: int = 1) -> Iterator[Arrival]:
    draw, at_s = Random(seed), 0.0
    for _ in range(requests):
        at_s += draw.expovariate(rate)
        yield Arrival(at_s, draw.randint(prompt // 2, prompt * 3 // 2), draw.randint(answer // 2, answer * 3 // 2))


def scene(prefill: int = 2, decode: int = 2, **facts) -> Scenario:
    """Return a cluster with enough of everything. `pool`: changed settings of both pools."""
    pool = {"cost": COST, "kv_blocks": 4000} | facts.pop("pool", {})
    defaults: dict[str, Any] = {"network": Network(token_bytes=100_000), "router": PATIENT}
    return Scenario(Pool(decode, **pool), Pool(prefill, **pool), **(defaults | facts))


def colocated(workers: int = 2, chunk: int = 256, **facts) -> Scenario:
    pool = {"cost": COST, "kv_blocks": 4000, "max_batched_tokens": chunk} | facts.pop("pool", {})
    return Scenario(Pool(workers, **pool), mode="colocated", **({"router": PATIENT} | facts))
