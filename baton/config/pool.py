"""Of the cluster file: a pool of workers, its bounds, and how pools change."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from baton.config.security import Section
from baton.config.values import (
    Address,
    Host,
    Interface,
    NodeLabels,
    Processes,
    Rows,
    Seconds,
    SizeOrAuto,
    Tokens,
    Workers,
)

MOST_WORKERS = 4096


class AutoscaleConfig(Section):
    """Bounds of a pool, within which the autoscaler moves."""

    min: Processes = Field(default=1, description="workers that it keeps at least")
    max: Processes = Field(default=1, description="and at most")

    @model_validator(mode="after")
    def _ordered(self) -> AutoscaleConfig:
        if self.min > self.max:
            raise ValueError(f"min: must not be above max ({self.max}), got {self.min}")
        return self


class ScalingConfig(Section):
    """How pools change, by the autoscaler or an operator. Times in seconds."""

    turn: bool = Field(
        default=True,
        description="a worker that one pool has too many of is turned into one of the other, its model stays loaded",
    )
    drain_s: Seconds = Field(default=60.0, description="a worker may finish what it has for so long, the rest moves")
    up_after_s: Seconds = Field(default=5.0, description="a pool has too much to do for so long before it grows")
    down_after_s: Seconds = Field(default=120.0, description="a pool has so little to do for so long before it shrinks")
    settle_s: Seconds = Field(default=10.0, description="after a change is complete, nothing is decided for so long")


class PoolConfig(Section):
    """One pool of workers."""

    replicas: Processes = Field(default=1, description="workers at the start")
    tensor_parallel: Processes = Field(
        default=1,
        description="processes that compute one worker's model together, each a share of its heads; only on CPUs yet",
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = Field(
        default="auto",
        description="cpu, cuda (under Ray: a GPU for each worker), cuda:N; auto: the first GPU, or the CPU",
    )
    threads: Processes | Literal["auto"] = Field(
        default="auto", description="of each process of a worker; auto: all cores, divided by tensor_parallel"
    )
    attention_splits: Literal["auto", "load", "load_bf16"] = Field(
        default="auto",
        description="of a decode row's context on a CPU; load: the fewer rows, the more splits, as GPU servers do it,"
        " so that the last bits of a result depend on load; load_bf16: and what splits leave is rounded to bfloat16",
    )
    kv_memory: SizeOrAuto = Field(default="auto", description="of a worker, however many processes share it")
    block_size: Tokens = Field(default=16, description="tokens of one block of KV")
    max_batched_tokens: Tokens = Field(
        default=2048,
        description="that one step computes, of all its requests: first one for each that decodes, then prompts, a"
        " long one in chunks",
    )
    max_running: Rows = Field(default=64, description="requests that a worker computes at once")
    prefix_cache: bool = Field(
        default=True, description="keep computed KV while there is room, and use it for prompts with equal beginnings"
    )
    listen: Address = Field(default="127.0.0.1:0", description="of each worker; port 0: any free port")
    metrics: Address | None = Field(
        default="127.0.0.1:0", description="of each worker, for Prometheus; port 0: any free port; none: not served"
    )
    advertise: Host | None = Field(
        default=None, description="the host that others are told; its port is the listener's"
    )
    interface: Interface | None = Field(
        default=None,
        description="the network interface that KV takes; its address is told too where `advertise` is not given",
    )
    node_labels: NodeLabels = Field(default_factory=dict, description="as ray.node_labels, for this pool alone")
    autoscale: AutoscaleConfig | None = Field(
        default=None, description="none: as many as replicas says, or the operator"
    )

    @model_validator(mode="after")
    def _within(self) -> PoolConfig:
        scale = self.autoscale
        if scale is not None and not scale.min <= self.replicas <= scale.max:
            raise ValueError(f"replicas: must be from autoscale.min ({scale.min}) to autoscale.max ({scale.max})")
        return self

    @property
    def bounds(self) -> tuple[int, int]:
        """The fewest and the most workers that it may be scaled to."""
        return (self.autoscale.min, self.autoscale.max) if self.autoscale else (1, MOST_WORKERS)

    @property
    def gpus(self) -> int:
        """GPUs of one worker, as Ray is asked for them."""
        return self.tensor_parallel if self.device.startswith("cuda") else 0


class PrefillConfig(PoolConfig):
    """The pool of prefill workers; with mode colocated, so many workers more."""

    replicas: Workers = Field(default=1, description="workers at the start; 0 is allowed with mode colocated")


# As `ClusterConfig` checks it, in the words of JSON Schema.
NONE_IF_COLOCATED: dict[str, JsonValue] = {
    "if": {"properties": {"mode": {"const": "colocated"}}, "required": ["mode"]},
    "else": {"properties": {"prefill": {"properties": {"replicas": {"minimum": 1}}}}},
}


def joined(prefill: PrefillConfig, decode: PoolConfig) -> dict[str, PoolConfig]:
    """A pool of none, and one of as many workers as both have, all as `decode` says; and so its bounds, if it has any.

    What comes out goes in again unchanged.
    """
    none = PrefillConfig.model_validate(decode.model_dump(exclude_unset=True) | {"replicas": 0, "autoscale": None})
    scale, fixed = decode.autoscale, prefill.replicas
    if scale is not None:
        least, most = (prefill.autoscale.min, prefill.autoscale.max) if prefill.autoscale else (fixed, fixed)
        scale = AutoscaleConfig(min=scale.min + least, max=min(scale.max + most, MOST_WORKERS))
    return {
        "prefill": none,
        "decode": decode.model_copy(update={"replicas": decode.replicas + fixed, "autoscale": scale}),
    }
