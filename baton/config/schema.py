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
    Auto,
    Host,
    Interface,
    Milliseconds,
    ModelName,
    NodeLabels,
    Origin,
    Processes,
    Rows,
    Seconds,
    Size,
    SizeOrAuto,
    Tokens,
    Workers,
    is_loopback,
    parse_hub_name,
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


def unsafe(
    addresses: Mapping[str, str | None], given: Collection[str], allowed: bool | tuple[str, ...]
) -> Iterator[str]:
    """Yield a problem for each unsafe listener that other hosts reach. `given` are the needed keys that are set."""
    for listener, address in addresses.items():
        if not address or is_loopback(address) or allowed is True or listener in (allowed or ()):
            continue
        lacking = [need for need in NEEDS[listener] if need not in given]
        if lacking:
            remedy = f"set security.allow_insecure: true, or [{listener}] to allow this"
            yield f"{listener} ({address}): listens beyond this machine without {' and '.join(lacking)}; {remedy}"


_ALLOWED = {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"enum": list(NEEDS)}}]}


class Section(BaseModel):
    """Base of all sections: frozen and closed; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class TlsConfig(Section):
    """PEM files of the certificate and the private key. All processes of a cluster present the same certificate."""

    cert: str = Field(min_length=1, description="the cluster's certificate, then the intermediate ones up to the CA")
    key: str = Field(min_length=1, description="the certificate's private key, not encrypted")
    ca: str = Field(min_length=1, description="the signing CA; any holder of its certificates may call the workers")
    name: str | None = Field(
        default=None, min_length=1, description="name expected in certificates; null means the host that is called"
    )

    def files(self) -> dict[str, str]:
        return {"cert": self.cert, "key": self.key, "ca": self.ca}


class SecurityConfig(Section):
    """Security of listeners. A listener outside the loopback needs TLS and tokens, or an explicit exception."""

    tls: TlsConfig | None = Field(
        default=None, description="these files, or a folder with cert.pem, key.pem and ca.pem (see `baton certs`)"
    )
    tokens: str | None = Field(default=None, min_length=1, description="the token file, read again when it changes")
    receipt_key: str | None = Field(
        default=None, min_length=1, description="file of the Ed25519 key (PEM) that signs receipts; null means none"
    )
    allow_insecure: Annotated[bool | tuple[str, ...], BeforeValidator(parse_allowed), WithJsonSchema(_ALLOWED)] = Field(
        default=False, description="true, or listeners that may lack TLS and tokens, such as [router.metrics]"
    )

    @field_validator("tls", mode="before", json_schema_input_type=TlsConfig | str | None)
    @classmethod
    def _of_folder(cls, tls: object) -> object:
        return {part: f"{tls}/{part}.pem" for part in ("cert", "key", "ca")} if isinstance(tls, str) and tls else tls


MOST_WORKERS = 4096


class AutoscaleConfig(Section):
    """Limits of a pool's size for the autoscaler."""

    min: Processes = Field(default=1, description="minimum number of workers")
    max: Processes = Field(default=1, description="maximum number of workers")

    @model_validator(mode="after")
    def _ordered(self) -> AutoscaleConfig:
        if self.min > self.max:
            raise ValueError(f"min: must not be above max ({self.max}), got {self.min}")
        return self


class ScalingConfig(Section):
    """Timing of size changes of pools, by the autoscaler or an operator, in seconds."""

    turn: bool = Field(default=True, description="a surplus worker of one pool joins the other by a role change")
    drain_s: Seconds = Field(default=60.0, description="time for a draining worker's requests before they move away")
    up_after_s: Seconds = Field(default=5.0, description="time of overload before a pool grows")
    down_after_s: Seconds = Field(default=120.0, description="time with spare workers before a pool shrinks")
    settle_s: Seconds = Field(default=10.0, description="pause between a completed change and the next decision")


class PoolConfig(Section):
    """A pool of workers."""

    replicas: Processes = Field(default=1, description="workers at the start")
    tensor_parallel: Processes = Field(default=1, description="processes that share a worker's model; one GPU each")
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = Field(
        default="auto",
        description="cpu; cuda, with GPUs of its own for each worker; cuda:N, with GPUs of a host from N on, which the"
        " other pool may share; auto means cuda on a host with GPUs, else cpu",
    )
    threads: Processes | Auto = Field(
        default="auto", description="threads per process of a worker; auto means all cores divided by tensor_parallel"
    )
    attention_splits: Literal["auto", "load", "load_bf16"] = Field(
        default="auto",
        description="splits of a decode sequence's context on a CPU; load splits more at low load, as GPU servers do,"
        " so the last bits of a result depend on load; load_bf16 also rounds the partial results to bfloat16",
    )
    kv_memory: SizeOrAuto = Field(default="auto", description="KV cache of a worker, shared by all its processes")
    block_size: Tokens | Auto = Field(
        default="auto",
        description="tokens per KV block; auto means 256 for prefill workers on GPUs (for FlashAttention), else 16",
    )
    max_batched_tokens: Tokens = Field(
        default=2048, description="maximum tokens of a step: one per decoding request, then chunks of prompts"
    )
    max_running: Rows = Field(default=64, description="maximum requests that a worker computes at the same time")
    prefix_cache: bool = Field(default=True, description="reuse computed KV for prompts with the same prefix")
    listen: Address = Field(default="127.0.0.1:0", description="address of each worker; port 0 means any free port")
    metrics: Address | None = Field(
        default="127.0.0.1:0", description="Prometheus address of a worker; port 0 means any, null disables it"
    )
    advertise: Host | None = Field(default=None, description="host that a worker registers, with the listener's port")
    interface: Interface | None = Field(
        default=None, description="network interface for KV transfers, and of the registered address without advertise"
    )
    node_labels: NodeLabels = Field(default_factory=dict, description="like ray.node_labels, for this pool only")
    autoscale: AutoscaleConfig | None = Field(default=None, description="null means that only operators set the size")

    @model_validator(mode="after")
    def _within(self) -> PoolConfig:
        scale = self.autoscale
        if scale is not None and not scale.min <= self.replicas <= scale.max:
            limits = f"autoscale.min ({scale.min}) to autoscale.max ({scale.max})"
            raise ValueError(f"replicas: must be from {limits}, got {self.replicas}")
        return self

    @property
    def bounds(self) -> tuple[int, int]:
        return (self.autoscale.min, self.autoscale.max) if self.autoscale else (1, MOST_WORKERS)

    @property
    def gpus(self) -> int:
        return self.tensor_parallel if self.device.startswith("cuda") else 0


class PrefillConfig(PoolConfig):
    """The pool of prefill workers. In mode colocated, these workers join the decode pool."""

    replicas: Workers = Field(default=1, description="workers at the start; 0 is allowed with mode colocated")


class DecodeConfig(PoolConfig):
    """The pool of decode workers."""

    speculation: Annotated[str, Field(pattern=r"^(off|auto|ngram|mtp|draft:.+)$")] = Field(
        default="off",
        description="proposals of next tokens, which one step checks together, on a CPU: ngram continues earlier places"
        " of a request's own text, mtp asks the layer for multi-token prediction of a DeepSeek V3 checkpoint,"
        " draft:PATH asks a small model with the same tokenizer, auto means ngram where steps with proposals round like"
        " those without; streams stay the same",
    )


# The check of `ClusterConfig` as JSON Schema.
NONE_IF_COLOCATED: dict[str, JsonValue] = {
    "if": {"properties": {"mode": {"const": "colocated"}}, "required": ["mode"]},
    "else": {"properties": {"prefill": {"properties": {"replicas": {"minimum": 1}}}}},
}


def joined(prefill: PrefillConfig, decode: DecodeConfig) -> dict[str, PoolConfig]:
    """Return the pools of colocated mode: no prefill, and all workers and limits in `decode`. Idempotent."""
    shared = decode.model_dump(exclude_unset=True, exclude={"speculation"})
    none = PrefillConfig.model_validate(shared | {"replicas": 0, "autoscale": None})
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
        description="an OpenTelemetry collector's gRPC address, such as http://127.0.0.1:4317; null exports nothing",
    )
    sample: float = Field(default=1.0, ge=0, le=1, description="share of exported requests without a `traceparent`")
    keep: int = Field(default=512, ge=0, le=10_000, description="ended requests that a router keeps for `baton trace`")


Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
Weight = Annotated[float, Field(ge=0.001, le=1000)]
URLS = "redis://", "rediss://", "unix://"
AUTO_PASS = 2, 32  # rows and window, equal to `baton.engine.determinism.shapes.FixedShapes`


class ModelConfig(Section):
    """The model that every worker serves."""

    path: str = Field(
        default="models/demo",
        min_length=1,
        description="a checkpoint folder, a GGUF file, hf:org/name[@revision][:kind], or oracle",
        json_schema_extra={"anyOf": [{"not": {"pattern": "^hf:"}}, {"pattern": f"^{HUB_NAME.pattern}$"}]},
    )
    backend: Literal["auto", "native", "transformers"] = Field(
        default="auto",
        description="code that computes the layers; auto means Baton's own, or transformers for other architectures",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="auto means the checkpoint's, unless float32 is faster"
    )
    quantize: Literal["none", "int8", "int4"] = Field(
        default="none", description="round the weights of linear layers to 8 or 4 bits while loading"
    )
    kv_dtype: Literal["auto", "int8"] = Field(
        default="auto", description="KV, in the cache and in handoffs; auto means the model's dtype; int8 on CPUs only"
    )
    max_model_len: PositiveInt | Auto = Field(
        default="auto", description="maximum length of prompt and answer; auto means the limit by model and kv_memory"
    )
    seed: int = Field(default=0, description="seed of the oracle's weights")
    served_name: ModelName | Annotated[tuple[ModelName, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="name or names for clients, the first one is shown; by default the folder's name or org/name",
    )
    generation_defaults: Literal["model", "none"] = Field(
        default="model", description="defaults of sampling: those of generation_config.json, or none of them"
    )

    @property
    def name(self) -> str:
        """Model name that clients are shown."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All model names that clients may use: those set, or the last part of its path without the suffix of a GGUF
        file, or its `org/name`.
        """
        if self.served_name is not None:
            return (self.served_name,) if isinstance(self.served_name, str) else self.served_name
        hub = parse_hub_name(self.path)
        return (hub.repo if hub else PurePath(self.path).name.removesuffix(".gguf"),)

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
    node_labels: NodeLabels = Field(default_factory=dict, description="labels of Ray nodes for workers of both pools")


class QueueConfig(Section):
    """Limits of the router's queue."""

    max_requests: PositiveInt = Field(default=256, description="queued requests; more are rejected with a retry delay")
    max_tokens: PositiveInt = Field(default=1_000_000, description="maximum prompt tokens of all queued requests")
    max_wait_s: Seconds = Field(default=10.0, description="maximum wait; a request that would wait longer is rejected")


class RouterConfig(Section):
    """The router. Listeners with port 0 use any free port."""

    replicas: Processes = Field(default=1, description="number of router processes, all at the same addresses")
    grpc: Address = Field(default="127.0.0.1:50051", description="address of the gRPC API")
    http: Address | None = Field(default=None, description="address of OpenAI's HTTP API; null disables it")
    http_body: Size = Field(default=2**20, description="maximum size of an HTTP request's body")
    http_names: tuple[Host, ...] = Field(
        default=(),
        description="host names, such as that of a proxy, that a loopback listener without tokens also accepts",
    )
    http_origins: tuple[Origin, ...] = Field(
        default=(), description="sites whose pages may use the HTTP API (CORS); * means all, only with tokens"
    )
    http_unknown: Literal["refuse", "ignore"] = Field(
        default="refuse",
        description="fields of HTTP requests that are unknown or not supported; ignored ones have no effect",
    )
    tool_parser: Literal[
        "auto",
        "none",
        "deepseek",
        "glm",
        "granite",
        "harmony",
        "hermes",
        "json",
        "kimi",
        "llama",
        "mistral",
        "pythonic",
        "qwen3_coder",
    ] = Field(default="auto", description="form of tool calls in answers; auto means that of the chat template")
    reasoning_parser: Literal["auto", "none", "granite", "harmony", "magistral", "seed", "think"] = Field(
        default="auto", description="form of reasoning in answers; auto means that of the chat template or its tokens"
    )
    metrics: Address = Field(default="127.0.0.1:9100", description="address for Prometheus")
    admin: Address = Field(default="127.0.0.1:0", description="address for operators: baton status, scale, drain")
    advertise: Host | None = Field(default=None, description="host that is reported for listeners on all addresses")
    interface: Interface | None = Field(default=None, description="interface of that address if `advertise` is not set")
    policy: Literal["predicted", "least_loaded", "round_robin", "prefix"] = Field(
        default="predicted", description="choice of workers; predicted means the earliest first token within slo.itl_ms"
    )
    local_prefill: Literal["never", "auto"] = Field(
        default="auto",
        description="auto, with policy predicted, lets a decode worker prefill the rest of a prompt if that is clearly"
        " faster by prediction, in steps within slo.itl_ms; without prefill workers, decode workers always do",
    )
    drain_s: Seconds = Field(default=9.0, description="time for running requests to finish after a stop signal")
    slow_reader_s: Seconds = Field(default=60.0, description="time without a read before a client is disconnected")
    queue: QueueConfig = QueueConfig()
    tenants: dict[str, Weight] = Field(
        default_factory=dict,
        description="a tenant's weight in a full cluster; tenants not listed have weight 1. The tenant is that of the"
        " token, or without tokens the request's cache_scope",
    )


class TransferConfig(Section):
    """Transfer of KV between workers."""

    transport: Literal["auto", "nccl", "gloo", "shm", "cuda_ipc", "nixl", "grpc", "memory"] = Field(
        default="auto", description="auto means the fastest that both ends have, encrypted between machines with TLS"
    )
    frame_size: Size = Field(default=4 * 2**20, description="maximum size of one frame, on each channel")
    credits: int = Field(
        default=4, ge=1, le=64, description="frames in flight on a channel, with staging for each at both ends"
    )
    coalesce_below: Size = Field(default=256 * 2**10, description="minimum KV in a frame while its prompt is computed")
    frame_deadline_s: Seconds = Field(default=10.0, description="time limit of a frame, after which its channel closes")
    staging_memory: Size = Field(
        default=2**30, description="staging of all channels of a worker, at each end; if full, an idle one is closed"
    )
    verify: Literal["auto", "frames", "kv"] = Field(
        default="auto",
        description="digests: auto, of frames on networks; frames, also within a host; kv, also of the whole KV",
    )


class LedgerConfig(Section):
    """Worker leases. A worker sends a heartbeat every `heartbeat_s`, and is dead after `lease_s` without progress."""

    lease_s: Seconds = Field(default=10.0, description="validity of a lease; at least three heartbeats")
    heartbeat_s: Seconds = Field(default=1.0, description="time between two heartbeats")


class DeterminismConfig(Section):
    """Verify passes, which recompute tokens of deterministic requests. All workers use the same fixed shape."""

    window: Annotated[int, Field(ge=2, le=1024)] | Auto = Field(default="auto", description="tokens per row")
    rows: Annotated[int, Field(ge=1, le=256)] | Auto = Field(
        default="auto", description="rows of a verify pass; rows times window is a multiple of 32"
    )
    verify: Literal["auto", "always"] = Field(
        default="auto", description="auto skips passes where steps are exact already; always verifies each token"
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

    while_decoding: bool = Field(default=False, description="default for requests that leave it out")
    prefill: Annotated[
        Literal["auto", "fast", "sequential", "off"],
        BeforeValidator(  # YAML makes False of a bare `off`
            lambda value: "off" if value is False else value,
            json_schema_input_type=Literal["auto", "fast", "sequential", "off", False],
        ),
    ] = Field(default="auto", description="computation of thoughts about a prompt; off disables them")


class SloConfig(Section):
    """Latency targets. `itl_ms` guides the choice of a decode worker; finished requests are counted against both."""

    ttft_ms: Milliseconds = Field(default=1000.0, description="target for the time to first token")
    itl_ms: Milliseconds = Field(default=100.0, description="target for the time between two tokens")


class RetryConfig(Section):
    """Retries of a request after a worker was lost."""

    attempts: PositiveInt = Field(default=3, description="attempts per request if workers are lost, the first included")


class LogConfig(Section):
    """Logs on stderr, and files in the state folder."""

    level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="lowest level logged")
    format: Literal["auto", "json", "console"] = Field(default="auto", description="auto is console on terminals only")


class ClusterConfig(Section):
    """All settings of a cluster."""

    model_config = ConfigDict(json_schema_extra=NONE_IF_COLOCATED)

    name: Name = Field(default="local", description="name in the state folder's path and in the Redis keys")
    mode: Literal["disaggregated", "colocated"] = Field(
        default="disaggregated",
        description="colocated puts the workers of both pools into `decode`; each computes prompts in chunks, together"
        " with its decode steps",
    )
    model: ModelConfig = ModelConfig()
    redis: RedisConfig = RedisConfig()
    ray: RayConfig = RayConfig()
    router: RouterConfig = RouterConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
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
        default=0.0, ge=0, le=MAX_RESUMABLE_S, description="default time that a stream outlives its router, in seconds"
    )
    history: str | None = Field(
        default=None, min_length=1, description="folder for histories of requests and blocks (tools/check_history.py)"
    )

    @model_validator(mode="after")
    def _pools_fit(self) -> ClusterConfig:
        if self.ledger.heartbeat_s * 3 > self.ledger.lease_s:
            least = f"three times ledger.heartbeat_s ({self.ledger.heartbeat_s:g})"
            raise ValueError(f"ledger.lease_s: must be at least {least}, got {self.ledger.lease_s:g}")
        pools = {"ray": self.ray.node_labels, "prefill": self.prefill.node_labels, "decode": self.decode.node_labels}
        if self.ray.address in {"local", "none"} and (labelled := [name for name, found in pools.items() if found]):
            text = f"is only allowed if ray.address is that of a Ray cluster, got {self.ray.address}"
            raise ValueError(f"{labelled[0]}.node_labels: {text}")
        if not (self.prefill.replicas or self.mode == "colocated"):
            raise ValueError("prefill.replicas: must be greater than 0 unless mode is colocated, got 0")
        if self.mode == "colocated" and (both := self.prefill.replicas + self.decode.replicas) > MOST_WORKERS:
            raise ValueError(f"decode.replicas: must be at most {MOST_WORKERS} in both pools, got {both}")
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
        allowed = self.security.allow_insecure
        is_exception = allowed is True or "transfer.transport" in (allowed or ())
        return self.transfer.transport == "auto" and not is_exception and self.security.tls is not None

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
        if "*" in router.http_origins and security.tokens is None:
            raise ValueError('router.http_origins: "*" is only allowed with security.tokens')
        keys = {"security.tls": security.tls, "security.tokens": security.tokens}
        given = [key for key, value in keys.items() if value is not None]
        problems = list(unsafe(addresses, given, security.allow_insecure))
        if problems:
            raise ValueError("\n".join(problems))
        return self
