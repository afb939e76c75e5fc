"""The schema of the cluster file. Attribute names are the YAML keys; every default is a working local value."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PositiveInt, field_validator, model_validator

from baton.config.listeners import KEPT_IN, encrypts, unsafe
from baton.config.pool import MOST_WORKERS, NONE_IF_COLOCATED, PoolConfig, PrefillConfig, ScalingConfig, joined
from baton.config.security import Section, SecurityConfig
from baton.config.tracing import TracingConfig
from baton.config.values import (
    HUB_NAME,
    Address,
    Host,
    Interface,
    Milliseconds,
    NodeLabels,
    Processes,
    Seconds,
    Size,
    is_loopback,
    parse_hub_name,
    parse_off,
)
from baton.core import Role
from baton.limits import MAX_RESUMABLE_S

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
Auto = Literal["auto"]
Weight = Annotated[float, Field(ge=0.001, le=1000)]
URLS = "redis://", "rediss://", "unix://"
AUTO_PASS = 2, 32  # rows and window, as `baton.engine.fixed.FixedShapes` has them


class ModelConfig(Section):
    """Which model every worker serves."""

    path: str = Field(
        default="models/demo",
        min_length=1,
        description="a checkpoint folder, hf:org/name[@revision], or oracle",
        json_schema_extra={"anyOf": [{"not": {"pattern": "^hf:"}}, {"pattern": f"^{HUB_NAME.pattern}$"}]},
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(default="auto", description="auto: as the checkpoint says")
    max_model_len: PositiveInt | Auto = Field(
        default="auto", description="tokens of a prompt and its answer; auto: as many as the model and kv_memory allow"
    )
    seed: int = Field(default=0, description="of the oracle's weights")

    @property
    def name(self) -> str:
        """What clients call the model: the last part of its path, or its `org/name`."""
        hub = parse_hub_name(self.path)
        return hub.repo if hub else PurePath(self.path).name

    @field_validator("path")
    @classmethod
    def _hub_name(cls, path: str) -> str:
        parse_hub_name(path)
        return path


class RedisConfig(Section):
    """The ledger: `embedded` starts a redis-server of its own."""

    url: str = Field(
        default="embedded",
        description="embedded, redis://host:port/db, rediss://... or unix://...; BATON__REDIS__URL hides a password",
        json_schema_extra={"pattern": f"^(embedded$|{'|'.join(URLS)})"},
    )

    @field_validator("url")
    @classmethod
    def _scheme(cls, url: str) -> str:
        if url != "embedded" and not url.startswith(URLS):
            raise ValueError("must be embedded, redis://..., rediss://... or unix://...")
        return url


class RayConfig(Section):
    """Who places the workers: `local` starts Ray here, `none` means plain processes, else the address of one."""

    address: str = Field(default="local", min_length=1, description="local, none, auto, or host:port of Ray's head")
    node_labels: NodeLabels = Field(
        default_factory=dict, description="of the Ray nodes that workers of both pools go to"
    )


class QueueConfig(Section):
    """How much may wait in the router, and for how long."""

    max_requests: PositiveInt = Field(default=256, description="more are refused, and told when to come again")
    max_tokens: PositiveInt = Field(default=1_000_000, description="of the prompts that wait, together")
    max_wait_s: Seconds = Field(default=10.0, description="longer, and a request is refused")


class RouterConfig(Section):
    """The router's listeners. Port 0: any free port."""

    replicas: Processes = Field(default=1, description="router processes, all at the same addresses")
    grpc: Address = Field(default="127.0.0.1:50051", description="the API")
    http: Address | None = Field(default=None, description="OpenAI's HTTP API; none: it is not served")
    http_body: Size = Field(default=2**20, description="the most that the body of an HTTP request may have")
    metrics: Address = Field(default="127.0.0.1:9100", description="for Prometheus")
    admin: Address = Field(default="127.0.0.1:0", description="for operators: baton status, scale, drain")
    advertise: Host | None = Field(default=None, description="the host by which listeners on all addresses are told")
    interface: Interface | None = Field(default=None, description="they are told by its address, without `advertise`")
    policy: Literal["predicted", "least_loaded", "round_robin", "prefix"] = Field(
        default="predicted",
        description="who takes a request; predicted: the earliest first token, with slo.itl_ms kept where that can be",
    )
    local_prefill: Literal["never", "auto"] = Field(
        default="auto",
        description="auto, with policy predicted: a decode worker computes the rest of a prompt itself where that is"
        " expected to be clearly sooner, in a step within slo.itl_ms; without any prefill worker they always do",
    )
    drain_s: Seconds = Field(default=9.0, description="told to stop, it lets what runs go on for so long")
    slow_reader_s: Seconds = Field(default=60.0, description="a client that reads nothing for so long is cut off")
    queue: QueueConfig = QueueConfig()
    tenants: dict[str, Weight] = Field(
        default_factory=dict,
        description="what a tenant (of a token; without tokens, by cache_scope) gets of a full cluster beside the"
        " others, which have 1 each",
    )


class TransferConfig(Section):
    """How KV moves between workers."""

    transport: Literal["auto", "nccl", "gloo", "shm", "cuda_ipc", "grpc", "memory"] = Field(
        default="auto", description="auto: the fastest that both ends have, encrypted between machines if there is TLS"
    )
    frame_size: Size = Field(default=4 * 2**20, description="the most that one frame carries, on each channel")
    credits: Annotated[int, Field(ge=1, le=64)] = Field(
        default=4, description="frames in flight: a channel's staging takes frame_size times this, at each end"
    )
    coalesce_below: Size = Field(
        default=256 * 2**10, description="KV that is waited for before a frame leaves, while its prompt is computed"
    )
    frame_deadline_s: Seconds = Field(default=10.0, description="a frame that takes longer ends its channel")
    staging_memory: Size = Field(
        default=2**30,
        description="of a worker's channels at each end; when it is used up, the longest idle one is closed",
    )
    verify: Literal["frames", "kv"] = Field(
        default="frames", description="kv: beside the digest of each frame, one of the whole KV"
    )


class LedgerConfig(Section):
    """Leases of workers: a worker beats every `heartbeat_s`, and is dead after `lease_s` without progress."""

    lease_s: Seconds = Field(default=10.0, description="at least three heartbeats")
    heartbeat_s: Seconds = Field(default=1.0, description="between two of them")


class DeterminismConfig(Section):
    """A verify pass, in which tokens of deterministic requests are computed again: always this many, on all workers."""

    window: Annotated[int, Field(ge=2, le=1024)] | Auto = Field(default="auto", description="tokens of each row")
    rows: Annotated[int, Field(ge=1, le=256)] | Auto = Field(
        default="auto", description="how many of them; rows times window is a multiple of 32"
    )

    verify: Literal["auto", "always"] = Field(
        default="auto", description="auto: not where decode steps give the same bits; always: each output token"
    )

    @model_validator(mode="after")
    def _fits(self) -> DeterminismConfig:
        rows = AUTO_PASS[0] if self.rows == "auto" else self.rows
        window = AUTO_PASS[1] if self.window == "auto" else self.window
        if rows * window % 32:
            raise ValueError(f"rows times window must be a multiple of 32, got {rows} x {window}")
        return self


class ThinkingConfig(Section):
    """Of models that think. `while_decoding`: for requests that do not say. `prefill`: chunk by chunk (sequential), or
    all chunks as if nothing were thought about them, and again from behind the first that something was (fast), or so
    with as many chunks at once as seems worth it (auto); off: nothing is thought.
    """

    while_decoding: bool = Field(default=False, description="for requests that do not say")
    prefill: Annotated[
        Literal["auto", "fast", "sequential", "off"],
        BeforeValidator(parse_off, json_schema_input_type=Literal["auto", "fast", "sequential", "off", False]),
    ] = Field(default="auto", description="how thoughts about a prompt are computed; off: nothing is thought")


class SloConfig(Section):
    """What choosing a decode worker aims at (`itl_ms`), and what finished requests are counted by (both)."""

    ttft_ms: Milliseconds = Field(default=1000.0, description="to the first token")
    itl_ms: Milliseconds = Field(default=100.0, description="from each token to the next")


class RetryConfig(Section):
    """What becomes of a request when a worker is lost."""

    attempts: PositiveInt = Field(default=3, description="at one request, the first included, if workers are lost")


class LogConfig(Section):
    """Logs go to stderr, and to files in the state folder."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="and all above it")
    format: Literal["auto", "json", "console"] = Field(default="auto", description="auto: console on a terminal")


class ClusterConfig(Section):
    """One cluster."""

    model_config = ConfigDict(json_schema_extra=NONE_IF_COLOCATED)

    name: Name = Field(default="local", description="of its state folder and its keys in Redis")
    mode: Literal["disaggregated", "colocated"] = Field(
        default="disaggregated",
        description="colocated: as many workers as both pools have, all of them as `decode` says, each computes prompts"
        " in chunks beside what it decodes",
    )
    model: ModelConfig = ModelConfig()
    redis: RedisConfig = RedisConfig()
    ray: RayConfig = RayConfig()
    router: RouterConfig = RouterConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: PoolConfig = PoolConfig()
    transfer: TransferConfig = TransferConfig()
    ledger: LedgerConfig = LedgerConfig()
    scaling: ScalingConfig = ScalingConfig()
    determinism: DeterminismConfig = DeterminismConfig()
    thinking: ThinkingConfig = ThinkingConfig()
    slo: SloConfig = SloConfig()
    security: SecurityConfig = SecurityConfig()
    retry: RetryConfig = RetryConfig()
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()
    resumable_s: float = Field(
        default=0.0, ge=0, le=MAX_RESUMABLE_S, description="a stream that does not say outlives its router for so long"
    )
    history: str | None = Field(
        default=None,
        min_length=1,
        description="a folder where each process notes what becomes of requests and blocks, for tools/check_history.py",
    )

    @model_validator(mode="after")
    def _pools_fit(self) -> ClusterConfig:
        if self.ledger.heartbeat_s * 3 > self.ledger.lease_s:
            raise ValueError("ledger.lease_s: must be at least three times ledger.heartbeat_s")
        if not (self.prefill.replicas or self.mode == "colocated"):
            raise ValueError("prefill.replicas: must be greater than 0 but with mode: colocated, got 0")
        if self.mode == "colocated" and (both := self.prefill.replicas + self.decode.replicas) > MOST_WORKERS:
            raise ValueError(f"decode.replicas: must be at most {MOST_WORKERS} with those of prefill, got {both}")
        ring, most = self.transfer.frame_size * self.transfer.credits, self.transfer.staging_memory
        if ring > most:
            text = f"must hold transfer.frame_size times transfer.credits, which is {ring} bytes, got {most}"
            raise ValueError(f"transfer.staging_memory: {text}")
        return self

    def by_mode(self) -> ClusterConfig:
        """With mode colocated: all workers, and what the autoscaler may add, are of the decode pool. Else the same."""
        return self.model_copy(update=joined(self.prefill, self.decode) if self.mode == "colocated" else {})

    @property
    def bounds(self) -> dict[Role, tuple[int, int]]:
        """The fewest and the most workers of each pool that there is."""
        pools = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return {role: pool.bounds for role, pool in pools.items() if pool.replicas}

    @property
    def kv_is_encrypted(self) -> bool:
        """Whether `transfer.transport: auto` means that no other machine can read KV."""
        return encrypts(self.transfer.transport, self.security.allow_insecure) and self.security.tls is not None

    @model_validator(mode="after")
    def _listeners_are_safe(self) -> ClusterConfig:
        router, security = self.router, self.security
        pools: dict[str, PoolConfig] = {} if self.mode == "colocated" else {"prefill": self.prefill}
        pools["decode"] = self.decode
        addresses = {
            "router.grpc": router.grpc,
            "router.admin": router.admin,
            "router.http": router.http,
            "router.metrics": router.metrics,
            **{f"{name}.listen": pool.listen for name, pool in pools.items()},
            **{f"{name}.metrics": pool.metrics for name, pool in pools.items()},
        }
        if self.transfer.transport not in KEPT_IN and not self.kv_is_encrypted:  # it listens where the workers do
            where = [f"{pool.interface}:0" if pool.interface else pool.listen for pool in pools.values()]
            addresses["transfer.transport"] = next((one for one in where if not is_loopback(one)), None)
        keys = {"security.tls": security.tls, "security.tokens": security.tokens}
        given = [key for key, value in keys.items() if value is not None]
        problems = list(unsafe(addresses, given, security.allow_insecure))
        if problems:
            raise ValueError("\n".join(problems))
        return self
