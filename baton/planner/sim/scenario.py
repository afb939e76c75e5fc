"""What is simulated: pools of workers, what their steps and their links cost, the router, and what goes wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from baton.errors import ConfigError
from baton.planner.sim.step_cost import Linear, StepCost
from router.placement.policy import POLICIES


@dataclass(frozen=True, slots=True)
class Slowed:
    """Steps take so many times as long, and differ by these factors, of mean 1 and equally likely."""

    factor: float = 1.0
    spread: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Contention:
    """What workers of one host cost each other: how much longer steps take while all others are busy, by what these do.

    `workers` of a host. `prompts`: of steps that compute prompts, beside whatever. `beside_prompts`, `beside_decode`:
    of steps that decode, beside such that compute prompts, and such that decode. Whoever does both is in between.
    """

    workers: int
    prompts: float = 1.0
    beside_prompts: Slowed = Slowed()
    beside_decode: Slowed = Slowed()


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal workers. `tensor_parallel` is what each has of devices; what that makes of a step is in `cost`."""

    workers: int
    cost: StepCost = field(default_factory=Linear)
    kv_blocks: int = 10_000  # of a worker
    block_size: int = 16  # tokens
    max_batched_tokens: int = 2048
    max_running: int = 64
    tensor_parallel: int = 1
    prefix_cache: bool = True
    spread: tuple[float, ...] = ()  # of step times: factors of mean 1, equally likely, of which each step draws one
    contention: Contention | None = None

    @property
    def devices(self) -> int:
        """All that the pool takes."""
        return self.workers * self.tensor_parallel


@dataclass(frozen=True, slots=True)
class Network:
    """How KV moves. Each worker has one way out and one way in, which what moves at the same time shares evenly.

    `bytes_per_s`: of each way. `latency_s`: of a handoff, once. `layers`: KV of all but the last one moves while the
    prompt is computed, if it is more than `coalesce_below` bytes.
    """

    bytes_per_s: float = 25e9 / 8
    latency_s: float = 0.0005
    token_bytes: float = 0.0  # of KV, all layers together
    layers: int = 32
    coalesce_below: int = 256 << 10


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds that a request takes beside steps and links: they are what a prediction is fitted to reality by."""

    admit_s: float = 0.0005  # from the client to the queue
    hop_s: float = 0.0002  # a message between router and worker
    commit_s: float = 0.0002  # from the last byte of KV to the commit
    tell_s: float = 0.0005  # from the end of a step to the client


@dataclass(frozen=True, slots=True)
class Router:
    """The router's settings, by the names of the cluster file. `report_s`: see
    `baton.planner.sim.router`. `slo_itl_s`: what it keeps where it can; None: what requests are judged by.
    """

    policy: str = "predicted"
    local_prefill: bool = True
    max_requests: int = 256  # that wait
    max_tokens: int = 1_000_000
    max_wait_s: float = 10.0
    attempts: int = 3
    report_s: float = 1.0
    slo_itl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet to be good. Of its gaps, the mean counts, or a percentile: 99 is its own p99 gap."""

    ttft_s: float = 1.0
    itl_s: float = 0.1
    itl_percentile: float | None = None


@dataclass(frozen=True, slots=True)
class Death:
    """A worker's process ends, and another begins in its place. Noticed after `noticed_s`."""

    at_s: float
    worker: str  # prefill-0, decode-3
    back_after_s: float = 5.0
    noticed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Slow:
    """Steps of a worker take `factor` times as long."""

    at_s: float
    until_s: float
    worker: str
    factor: float


@dataclass(frozen=True, slots=True)
class SlowLink:
    """A worker's ways carry `factor` of what they did; worker "": those of all."""

    at_s: float
    until_s: float
    worker: str
    factor: float


Fault = Death | Slow | SlowLink


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a simulation depends on, beside its arrivals. Raises ConfigError for what cannot be.

    Colocated workers are the decode pool: they compute prompts in chunks of `max_batched_tokens` beside what they
    decode, and there are no prefill workers.
    """

    decode: Pool
    prefill: Pool = field(default_factory=lambda: Pool(0))
    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    network: Network = field(default_factory=Network)
    overheads: Overheads = field(default_factory=Overheads)
    router: Router = field(default_factory=Router)
    slo: Slo = field(default_factory=Slo)
    faults: tuple[Fault, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        _require("mode", self.mode, self.mode in {"disaggregated", "colocated"}, "disaggregated or colocated")
        _require("router.policy", self.router.policy, self.router.policy in POLICIES, f"one of {', '.join(POLICIES)}")
        _require("router.report_s", self.router.report_s, self.router.report_s > 0, "above 0")
        least = int(self.mode == "disaggregated")
        _require("prefill.workers", self.prefill.workers, self.prefill.workers >= least, f"at least {least}")
        if not least:
            _require("prefill.workers", self.prefill.workers, not self.prefill.workers, "0 in colocated mode")
        _require("decode.workers", self.decode.workers, self.decode.workers >= 1, "at least 1")
        for role, pool in self._pools:
            sizes = {
                "kv_blocks": pool.kv_blocks,
                "block_size": pool.block_size,
                "max_batched_tokens": pool.max_batched_tokens,
                "max_running": pool.max_running,
                "tensor_parallel": pool.tensor_parallel,
            }
            for name, value in sizes.items():
                _require(f"{role}.{name}", value, value >= 1, "at least 1")
        if self.mode == "disaggregated":
            ours, theirs = self.decode.block_size, self.prefill.block_size
            _require("decode.block_size", ours, ours == theirs, f"prefill.block_size, which is {theirs}")
        workers = {f"{role}-{n}" for role, pool in self._pools for n in range(pool.workers)}
        for fault in self.faults:
            known = fault.worker in workers or (isinstance(fault, SlowLink) and not fault.worker)
            _require("faults.worker", fault.worker, known, "a worker of the scenario, such as decode-0")
            _require("faults.at_s", fault.at_s, math.isfinite(fault.at_s) and fault.at_s >= 0, "at least 0")

    @property
    def _pools(self) -> tuple[tuple[str, Pool], ...]:
        return (("prefill", self.prefill), ("decode", self.decode))

    @property
    def devices(self) -> int:
        """What all workers take."""
        return self.prefill.devices + self.decode.devices


def _require(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{name}: must be {allowed}, got {value!r}")
