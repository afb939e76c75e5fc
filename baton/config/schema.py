"""The schema of the cluster file. Attribute names are the YAML keys; every default is a working local value."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from baton.config.values import Address, Size, SizeOrAuto, is_loopback, parse_hub_name

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
Auto = Literal["auto"]
Weight = Annotated[float, Field(ge=0.001, le=1000)]


class Section(BaseModel):
    """Frozen, and closed: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelConfig(Section):
    """Which model every worker serves."""

    path: str = Field(
        default="models/demo", min_length=1, description="a checkpoint folder, hf:org/name[@revision], or oracle"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: PositiveInt | Auto = "auto"
    seed: int = 0

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

    url: str = "embedded"

    @field_validator("url")
    @classmethod
    def _scheme(cls, url: str) -> str:
        if url != "embedded" and not url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must be embedded, redis://..., rediss://... or unix://...")
        return url


class RayConfig(Section):
    """Who places the workers: `local` starts Ray here, `none` means plain processes."""

    address: str = Field(default="local", min_length=1)


class QueueConfig(Section):
    """How much may wait in the router, and for how long."""

    max_requests: PositiveInt = 256
    max_tokens: PositiveInt = Field(default=1_000_000, description="of the prompts that wait, together")
    max_wait_s: PositiveFloat = 10.0


class RouterConfig(Section):
    """The router's listeners. Port 0: any free port."""

    replicas: PositiveInt = 1
    grpc: Address = "127.0.0.1:50051"
    http: Address | None = Field(default=None, description="OpenAI's HTTP API; none: it is not served")
    http_body: Size = Field(default=2**20, description="the most that the body of an HTTP request may have")
    metrics: Address = "127.0.0.1:9100"
    admin: Address = "127.0.0.1:0"
    advertise: str | None = None
    interface: str | None = None
    policy: Literal["least_loaded", "round_robin", "predicted", "prefix"] = "least_loaded"
    slow_reader_s: PositiveFloat = 60.0
    queue: QueueConfig = QueueConfig()
    tenants: dict[str, Weight] = Field(
        default_factory=dict,
        description="what a tenant, by its cache_scope, gets of a full cluster beside the others, which have 1 each",
    )


class AutoscaleConfig(Section):
    """Bounds of a pool."""

    min: PositiveInt = 1
    max: PositiveInt = 1


class PoolConfig(Section):
    """One pool of workers."""

    replicas: PositiveInt = 1
    tensor_parallel: PositiveInt = Field(
        default=1,
        description="processes that compute one worker's model together, each a share of its heads; only on CPUs yet",
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    threads: PositiveInt | Auto = Field(
        default="auto", description="of each process of a worker; auto: all cores, divided by tensor_parallel"
    )
    kv_memory: SizeOrAuto = Field(default="auto", description="of a worker, however many processes share it")
    block_size: PositiveInt = 16
    max_batched_tokens: PositiveInt = 2048
    max_running: PositiveInt = 64
    prefix_cache: bool = Field(
        default=True, description="keep computed KV while there is room, and use it for prompts with equal beginnings"
    )
    listen: Address = "127.0.0.1:0"
    advertise: str | None = None
    interface: str | None = None
    autoscale: AutoscaleConfig | None = None


class TransferConfig(Section):
    """How KV moves between workers."""

    transport: Literal["auto", "nccl", "gloo", "shm", "cuda_ipc", "grpc", "memory"] = "auto"
    frame_size: Size = Field(default=4 * 2**20, description="the most that one frame carries, on each channel")
    credits: Annotated[int, Field(ge=1, le=64)] = Field(
        default=4, description="frames in flight: a channel's staging takes frame_size times this, at each end"
    )
    coalesce_below: Size = Field(
        default=256 * 2**10, description="KV that is waited for before a frame leaves, while its prompt is computed"
    )
    frame_deadline_s: PositiveFloat = 10.0
    staging_memory: Size = Field(
        default=2**30,
        description="of a worker's channels at each end; when it is used up, the longest idle one is closed",
    )
    verify: Literal["frames", "kv"] = Field(
        default="frames", description="kv: beside the digest of each frame, one of the whole KV"
    )


class LedgerConfig(Section):
    """Leases of workers: a worker beats every `heartbeat_s`, and is dead after `lease_s` without progress."""

    lease_s: PositiveFloat = 10.0
    heartbeat_s: PositiveFloat = 1.0


class DeterminismConfig(Section):
    """Shape of the verify window."""

    window: PositiveInt | Auto = "auto"
    rows: PositiveInt | Auto = "auto"


class ThinkingConfig(Section):
    """Thinking states."""

    while_decoding: bool = False


class SloConfig(Section):
    """What admission and the planner aim at."""

    ttft_ms: PositiveFloat = 1000.0
    itl_ms: PositiveFloat = 100.0


class SecurityConfig(Section):
    """Listeners off the loopback need TLS and tokens, or `allow_insecure`."""

    tls: str | None = None
    tokens: str | None = None
    allow_insecure: bool = False


class RetryConfig(Section):
    """What becomes of a request when a worker is lost."""

    attempts: PositiveInt = Field(default=3, description="at one request, the first included, if workers are lost")


class LogConfig(Section):
    """Logs go to stderr, and to files in the state folder."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


class ClusterConfig(Section):
    """One cluster."""

    name: Name = "local"
    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    model: ModelConfig = ModelConfig()
    redis: RedisConfig = RedisConfig()
    ray: RayConfig = RayConfig()
    router: RouterConfig = RouterConfig()
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()
    transfer: TransferConfig = TransferConfig()
    ledger: LedgerConfig = LedgerConfig()
    determinism: DeterminismConfig = DeterminismConfig()
    thinking: ThinkingConfig = ThinkingConfig()
    slo: SloConfig = SloConfig()
    security: SecurityConfig = SecurityConfig()
    retry: RetryConfig = RetryConfig()
    log: LogConfig = LogConfig()
    resumable_s: PositiveFloat | None = None
    history: str | None = Field(
        default=None,
        min_length=1,
        description="a folder where each process notes what becomes of requests and blocks, for tools/check_history.py",
    )

    @model_validator(mode="after")
    def _pools_fit(self) -> ClusterConfig:
        if self.ledger.heartbeat_s * 3 > self.ledger.lease_s:
            raise ValueError("ledger.lease_s: must be at least three times ledger.heartbeat_s")
        return self

    @model_validator(mode="after")
    def _listeners_are_safe(self) -> ClusterConfig:
        listeners = {
            "router.grpc": self.router.grpc,
            "router.metrics": self.router.metrics,
            "router.admin": self.router.admin,
            "router.http": self.router.http,
            "prefill.listen": self.prefill.listen,
            "decode.listen": self.decode.listen,
        }
        open_ones = [f"{key} ({value})" for key, value in listeners.items() if value and not is_loopback(value)]
        if open_ones and not self.security.allow_insecure:
            text = (
                "listens beyond this machine without TLS and tokens; say security.allow_insecure: true if you mean it"
            )
            raise ValueError(f"{', '.join(open_ones)}: {text}")
        return self
