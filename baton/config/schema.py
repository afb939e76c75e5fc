"""The schema of the cluster file. Attribute names are YAML keys; every default works locally.

First the security rules of listeners, then one class per section, then `ClusterConfig` with the checks between
sections. Class docstrings and descriptions become texts of `configs/schema.json`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PositiveInt,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from baton.config.values import (
    HUB_NAME,
    Address,
    Host,
    Interface,
    Milliseconds,
    NodeLabels,
    Processes,
    Rows,
    Seconds,
    Size,
    SizeOrAuto,
    Tokens,
    Workers,
    is_loopback,
    parse_hub_name,
    parse_off,
)
from baton.core import Role
from baton.limits import MAX_RESUMABLE_S

ENCRYPTED = "encryption of KV (security.tls, and transfer.transport: auto or grpc)"
PLAIN = "a listener that speaks TLS (this one has plain HTTP only)"
NEEDS: Mapping[str, tuple[str, ...]] = {
    "router.grpc": ("security.tls", "security.tokens"),
    "router.admin": ("security.tls", "security.tokens"),
    "router.http": ("security.tls", "security.tokens"),
    "router.metrics": (PLAIN,),
    "prefill.listen": ("security.tls",),  # the cluster's certificate is the credential
    "decode.listen": ("security.tls",),
    "prefill.metrics": (PLAIN,),
    "decode.metrics": (PLAIN,),
    "transfer.transport": (ENCRYPTED,),
}
KEPT_IN = ("grpc", "shm", "cuda_ipc", "memory")  # with these, KV is encrypted or does not leave its host


def parse_allowed(value: object) -> bool | tuple[str, ...]:
    """Parse `security.allow_insecure`: a bool for all listeners or none, or a list of them. Raises ValueError."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, (list, tuple)) or any(name not in NEEDS for name in value):
        raise ValueError(f"must be true, false, or a list of some of {', '.join(NEEDS)}")
    return tuple(value)


def encrypts(transport: str, allowed: bool | tuple[str, ...]) -> bool:
    """Return True if `transport` uses the encrypted one between machines, given certificates and no exception."""
    return transport == "auto" and allowed is not True and "transfer.transport" not in (allowed or ())


def unsafe(
    addresses: Mapping[str, str | None], given: Collection[str], allowed: bool | tuple[str, ...]
) -> Iterator[str]:
    """Yield a problem for each unsafe listener that other hosts reach. `given` are the needed keys that are set."""
    for listener, address in addresses.items():
        if not address or is_loopback(address) or allowed is True or listener in (allowed or ()):
            continue
        lacking = [need for need in NEEDS[listener] if need not in given]
        if lacking:
            remedy = f"set security.allow_insecure: true, or [{listener}], if you mean it"
            yield f"{listener} ({address}): listens beyond this machine without {' and '.join(lacking)}; {remedy}"


_ALLOWED = {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"enum": list(NEEDS)}}]}


class Section(BaseModel):
    """Base of all sections: frozen and closed; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class TlsConfig(Section):
    """PEM files of the certificate and the private key. All processes of a cluster present the same certificate."""

    cert: str = Field(min_length=1, description="the cluster's certificate, and those between it and the CA")
    key: str = Field(min_length=1, description="its private key, not encrypted")
    ca: str = Field(min_length=1, description="who signed it; whoever else it signs for may speak to the workers")
    name: str | None = Field(
        default=None,
        min_length=1,
        description="what the cluster's processes look for in each other's certificate; null: the host that is called",
    )

    def files(self) -> dict[str, str]:
        """Return the path of each part."""
        return {"cert": self.cert, "key": self.key, "ca": self.ca}


class SecurityConfig(Section):
    """Security of listeners. A listener outside the loopback needs TLS and tokens, or an explicit exception."""

    tls: TlsConfig | None = Field(
        default=None, description="these files, or a folder with cert.pem, key.pem and ca.pem (see `baton certs`)"
    )
    tokens: str | None = Field(default=None, min_length=1, description="a file of tokens, read again when it changes")
    allow_insecure: Annotated[bool | tuple[str, ...], BeforeValidator(parse_allowed), WithJsonSchema(_ALLOWED)] = Field(
        default=False, description="true, or the listeners that may be open to all, such as [router.metrics]"
    )

    @field_validator("tls", mode="before", json_schema_input_type=TlsConfig | str | None)
    @classmethod
    def _of_folder(cls, tls: object) -> object:
        return {part: f"{tls}/{part}.pem" for part in ("cert", "key", "ca")} if isinstance(tls, str) and tls else tls


MOST_WORKERS = 4096


class AutoscaleConfig(Section):
    """Limits of a pool's size for the autoscaler."""

    min: Processes = Field(default=1, description="workers that it keeps at least")
    max: Processes = Field(default=1, description="and at most")

    @model_validator(mode="after")
    def _ordered(self) -> AutoscaleConfig:
        if self.min > self.max:
            raise ValueError(f"min: must not be above max ({self.max}), got {self.min}")
        return self


class ScalingConfig(Section):
    """Timing of size changes of pools, by the autoscaler or an operator, in seconds."""

    turn: bool = Field(
        default=True,
        description="a worker that one pool has too many of is turned into one of the other, its model stays loaded",
    )
    drain_s: Seconds = Field(default=60.0, description="a worker may finish what it has for so long, the rest moves")
    up_after_s: Seconds = Field(default=5.0, description="a pool has too much to do for so long before it grows")
    down_after_s: Seconds = Field(default=120.0, description="a pool has so little to do for so long before it shrinks")
    settle_s: Seconds = Field(default=10.0, description="after a change is complete, nothing is decided for so long")


class PoolConfig(Section):
    """A pool of workers."""

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
        """Minimum and maximum number of workers for scaling."""
        return (self.autoscale.min, self.autoscale.max) if self.autoscale else (1, MOST_WORKERS)

    @property
    def gpus(self) -> int:
        """Ray's GPU request for one worker."""
        return self.tensor_parallel if self.device.startswith("cuda") else 0


class PrefillConfig(PoolConfig):
    """The pool of prefill workers. In mode colocated, these workers join the decode pool."""

    replicas: Workers = Field(default=1, description="workers at the start; 0 is allowed with mode colocated")


# The check of `ClusterConfig` as JSON Schema.
NONE_IF_COLOCATED: dict[str, JsonValue] = {
    "if": {"properties": {"mode": {"const": "colocated"}}, "required": ["mode"]},
    "else": {"properties": {"prefill": {"properties": {"replicas": {"minimum": 1}}}}},
}


def joined(prefill: PrefillConfig, decode: PoolConfig) -> dict[str, PoolConfig]:
    """Return the pools of colocated mode: no prefill, and all workers and limits in `decode`. Idempotent."""
    none = PrefillConfig.model_validate(decode.model_dump(exclude_unset=True) | {"replicas": 0, "autoscale": None})
    scale, fixed = decode.autoscale, prefill.replicas
    if scale is not None:
        least, most = (prefill.autoscale.min, prefill.autoscale.max) if prefill.autoscale else (fixed, fixed)
        scale = AutoscaleConfig(min=scale.min + least, max=min(scale.max + most, MOST_WORKERS))
    return {
        "prefill": none,
        "decode": decode.model_copy(update={"replicas": decode.replicas + fixed, "autoscale": scale}),
    }


class TracingConfig(Section):
    """Traces of request stages in all processes. A router keeps them, and exports them if `otlp` is set."""

    otlp: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/]+:\d+$",
        description="an OpenTelemetry collector's gRPC address, such as http://127.0.0.1:4317; none: no export",
    )
    sample: float = Field(
        default=1.0, ge=0, le=1, description="the share that is exported; a caller's `traceparent` says for its own"
    )
    keep: Annotated[int, Field(ge=0, le=10_000)] = Field(
        default=512, description="requests that ended last, whose spans each router keeps for `baton trace`"
    )


Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
Auto = Literal["auto"]
Weight = Annotated[float, Field(ge=0.001, le=1000)]
URLS = "redis://", "rediss://", "unix://"
AUTO_PASS = 2, 32  # rows and window, equal to `baton.engine.determinism.shapes.FixedShapes`


class ModelConfig(Section):
    """The model that every worker serves."""

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
        """Model name for clients: the last part of its path, or its `org/name`."""
        hub = parse_hub_name(self.path)
        return hub.repo if hub else PurePath(self.path).name

    @field_validator("path")
    @classmethod
    def _hub_name(cls, path: str) -> str:
        parse_hub_name(path)
        return path


class RedisConfig(Section):
    """The ledger. `embedded` starts a private redis-server."""

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
    """Worker placement: `local` starts Ray here, `none` means plain processes, else the address of a Ray cluster."""

    address: str = Field(default="local", min_length=1, description="local, none, auto, or host:port of Ray's head")
    node_labels: NodeLabels = Field(
        default_factory=dict, description="of the Ray nodes that workers of both pools go to"
    )


class QueueConfig(Section):
    """Limits of the router's queue."""

    max_requests: PositiveInt = Field(default=256, description="more are refused, and told when to come again")
    max_tokens: PositiveInt = Field(default=1_000_000, description="of the prompts that wait, together")
    max_wait_s: Seconds = Field(default=10.0, description="longer, and a request is refused")


class RouterConfig(Section):
    """The router. Listeners with port 0 use any free port."""

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
    """Transfer of KV between workers."""

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
    """Worker leases. A worker sends a heartbeat every `heartbeat_s`, and is dead after `lease_s` without progress."""

    lease_s: Seconds = Field(default=10.0, description="at least three heartbeats")
    heartbeat_s: Seconds = Field(default=1.0, description="between two of them")


class DeterminismConfig(Section):
    """Verify passes, which recompute tokens of deterministic requests. All workers use the same fixed shape."""

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
    """Models that think. `while_decoding` is the default of requests. `prefill` sequential computes chunk by chunk.
    fast computes all chunks as if none had a thought, and again after the first one that has. auto does so with as many
    chunks as is efficient; off disables thoughts.
    """

    while_decoding: bool = Field(default=False, description="for requests that do not say")
    prefill: Annotated[
        Literal["auto", "fast", "sequential", "off"],
        BeforeValidator(parse_off, json_schema_input_type=Literal["auto", "fast", "sequential", "off", False]),
    ] = Field(default="auto", description="how thoughts about a prompt are computed; off: nothing is thought")


class SloConfig(Section):
    """Latency targets. `itl_ms` guides the choice of a decode worker; finished requests are counted against both."""

    ttft_ms: Milliseconds = Field(default=1000.0, description="to the first token")
    itl_ms: Milliseconds = Field(default=100.0, description="from each token to the next")


class RetryConfig(Section):
    """Retries of a request after a worker was lost."""

    attempts: PositiveInt = Field(default=3, description="at one request, the first included, if workers are lost")


class LogConfig(Section):
    """Logs on stderr, and files in the state folder."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="and all above it")
    format: Literal["auto", "json", "console"] = Field(default="auto", description="auto: console on a terminal")


class ClusterConfig(Section):
    """A cluster."""

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
        """Return the config with all workers and limits in the decode pool if the mode is colocated, else unchanged."""
        return self.model_copy(update=joined(self.prefill, self.decode) if self.mode == "colocated" else {})

    @property
    def bounds(self) -> dict[Role, tuple[int, int]]:
        """Minimum and maximum number of workers of each existing pool."""
        pools = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return {role: pool.bounds for role, pool in pools.items() if pool.replicas}

    @property
    def kv_is_encrypted(self) -> bool:
        """True if `transfer.transport: auto` protects KV from other hosts by encryption."""
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
        if self.transfer.transport not in KEPT_IN and not self.kv_is_encrypted:  # transfers listen where the workers do
            where = [f"{pool.interface}:0" if pool.interface else pool.listen for pool in pools.values()]
            addresses["transfer.transport"] = next((one for one in where if not is_loopback(one)), None)
        keys = {"security.tls": security.tls, "security.tokens": security.tokens}
        given = [key for key, value in keys.items() if value is not None]
        problems = list(unsafe(addresses, given, security.allow_insecure))
        if problems:
            raise ValueError("\n".join(problems))
        return self
