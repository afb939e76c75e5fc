"""Inputs of a simulation: step costs, worker pools, network, router settings and faults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

from pydantic import Field

from baton.config.schema import Section
from baton.errors import ConfigError
from router.placement.cost_model import UNKNOWN, Cost
from router.placement.policy import POLICIES


class StepCost(Protocol):
    """Seconds per step of a worker, all its ranks together. The cost must be affine in `decode_context` for equal
    `decode_rows`, because a stretch of steps is summed that way.
    """

    def seconds(self, prompt_tokens: int, prompt_context: int, decode_rows: int, decode_context: int) -> float:
        """Return a step's seconds. Contexts are positions attended to, which for prompts include their own tokens."""


@dataclass(frozen=True, slots=True)
class Linear:
    """One line for prompts, one for decoding. Mixed steps count the longer `step_s` once, or `joint_step_s`."""

    prompt: Cost = UNKNOWN
    decode: Cost = UNKNOWN
    joint_step_s: float | None = None

    def seconds(self, prompt_tokens: int, prompt_context: int, decode_rows: int, decode_context: int) -> float:
        p, d = self.prompt, self.decode
        if not prompt_tokens:
            return d.step_s + d.token_s * decode_rows + d.context_s * decode_context
        prompts = p.token_s * prompt_tokens + p.context_s * prompt_context
        if not decode_rows:
            return p.step_s + prompts
        step_s = max(p.step_s, d.step_s) if self.joint_step_s is None else self.joint_step_s
        return step_s + prompts + d.token_s * decode_rows + d.context_s * decode_context


@dataclass(frozen=True, slots=True)
class Piecewise:
    """A cost per range of batch sizes. `pieces`: (fewer sequences than this, cost), ascending; `beyond`: the rest."""

    pieces: tuple[tuple[int, StepCost], ...] = ()
    beyond: StepCost = field(default_factory=Linear)

    def seconds(self, prompt_tokens: int, prompt_context: int, decode_rows: int, decode_context: int) -> float:
        cost = next((cost for rows, cost in self.pieces if decode_rows < rows), self.beyond)
        return cost.seconds(prompt_tokens, prompt_context, decode_rows, decode_context)


def line(step_s: float = 0.0, token_s: float = 0.0, context_s: float = 0.0) -> Cost:
    """Return a cost of three numbers, in seconds. A queued token costs `token_s`."""
    return Cost(step_s, token_s, context_s, token_s)


class Slowed(Section):
    """Slowdown of decode steps while other workers of the host are busy: a factor, and the spread of step times."""

    factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    spread: tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...] = ()  # equally likely factors of mean 1


@dataclass(frozen=True, slots=True)
class Contention:
    """Slowdown of steps while all other workers of the host are busy. Mixed steps are interpolated."""

    workers: int  # of a host
    prompts: float = 1.0  # factor of steps that compute prompts
    beside_prompts: Slowed = field(default_factory=Slowed)  # of decode steps, while others compute prompts
    beside_decode: Slowed = field(default_factory=Slowed)  # of decode steps, while others decode


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal workers with `tensor_parallel` devices each. `cost` is the step cost of a whole worker."""

    workers: int
    cost: StepCost = field(default_factory=Linear)
    kv_blocks: int = 10_000  # per worker
    block_size: int = 16  # tokens
    max_batched_tokens: int = 2048
    max_running: int = 64
    tensor_parallel: int = 1
    prefix_cache: bool = True
    spread: tuple[float, ...] = ()  # equally likely factors of the step time, of mean 1; each step draws one
    contention: Contention | None = None

    @property
    def devices(self) -> int:
        return self.workers * self.tensor_parallel


@dataclass(frozen=True, slots=True)
class Network:
    """KV network: each worker has a way out and a way in, which concurrent transfers share evenly."""

    bytes_per_s: float = 25e9 / 8  # of each way
    latency_s: float = 0.0005  # once per handoff
    token_bytes: float = 0.0  # KV bytes, all layers together
    layers: int = 32
    coalesce_below: int = 256 << 10  # bytes; of more KV, all layers but the last move during the prompt


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds of a request outside of steps and transfers. Calibration fits them to measurements."""

    admit_s: float = 0.0005  # from the client to the queue
    hop_s: float = 0.0002  # a message between router and worker
    commit_s: float = 0.0002  # from the last byte of KV to the commit
    tell_s: float = 0.0005  # from the end of a step to the client


@dataclass(frozen=True, slots=True)
class Router:
    """Router settings, named as in the cluster file."""

    policy: str = "predicted"
    local_prefill: bool = True
    max_requests: int = 256  # waiting requests
    max_tokens: int = 1_000_000
    max_wait_s: float = 10.0
    attempts: int = 3
    report_s: float = 1.0  # see `baton.planner.sim.request`
    promises_from_s: float = math.inf  # arrivals from then on carry `Slo` as a promise
    slo_itl_s: float | None = None  # ITL goal of placements; None means that of `Slo`


@dataclass(frozen=True, slots=True)
class Slo:
    """Goals of a good request. ITL is its mean gap, or with `itl_percentile` that percentile of its own gaps."""

    ttft_s: float = 1.0
    itl_s: float = 0.1
    itl_percentile: float | None = None


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker's process, noticed after `noticed_s`. A new one starts after `back_after_s`."""

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
    """A worker's ways have `factor` of their bandwidth. An empty `worker` means all workers."""

    at_s: float
    until_s: float
    worker: str
    factor: float


Fault = Death | Slow | SlowLink


@dataclass(frozen=True, slots=True)
class Scenario:
    """All inputs of a simulation except arrivals. Raises ConfigError if they are inconsistent. Colocated workers are
    the decode pool, without prefill workers: they add prompts in chunks of `max_batched_tokens` to decode steps.
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
        return self.prefill.devices + self.decode.devices


def _require(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"{name}: must be {allowed}, got {value!r}")
