"""The settings of one worker process: plain values, taken from the cluster file by `from_config`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from baton.config import ClusterConfig, PoolConfig
from baton.config.schema import TlsConfig
from baton.core import Role
from baton.engine.determinism.shapes import FixedShapes
from baton.network import kv_host, reachable_host
from kvtransfer.handoff import TransferSettings


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One worker's settings. Sizes in bytes, times in seconds; `redis_url` holds a password and is never logged."""

    cluster: str
    worker_id: str
    role: Role
    redis_url: str
    model_name: str
    model_path: str
    backend: Literal["auto", "native", "transformers"]
    dtype: str
    quantize: Literal["none", "int8", "int4"]
    kv_dtype: Literal["auto", "int8"]
    device: str
    tensor_parallel: int
    threads: int | None
    attention_splits: Literal["auto", "load", "load_bf16"]
    kv_memory: int | Literal["auto"]
    max_model_len: int | Literal["auto"]
    block_size: int | Literal["auto"]
    max_batched_tokens: int
    max_running: int
    prefix_cache: bool
    seed: int
    listen: str
    metrics: str | None
    advertise: str | None  # None until `located`
    interface: str | None
    lease_s: float
    heartbeat_s: float
    transfer: TransferSettings
    shapes: FixedShapes = field(default_factory=FixedShapes)
    auto_rows: bool = False  # rows of verify passes come from measurements
    speculation: str = "off"  # of a decode worker: auto, ngram, mtp, or draft: and a path
    thinking_prefill: Literal["auto", "fast", "sequential", "off"] = "auto"
    history: str | None = None  # a folder
    tls: TlsConfig | None = None

    @property
    def ledger_prefix(self) -> str:
        return f"baton:{self.cluster}"


def of_both_roles(config: ClusterConfig, worker_id: str, begins: Role) -> dict[Role, WorkerSettings]:
    """Return the settings for both roles, because a role change may be ordered. `begins` is the first role."""
    return {role: from_config(config, role, worker_id, begins) for role in Role}


def from_config(config: ClusterConfig, role: Role, worker_id: str, begins: Role | None = None) -> WorkerSettings:
    """Return a worker's settings. `redis.url` must name a running Redis. `begins` is the role of its pool, or None."""
    pool, place, transfer, model = _pool(config, role), _pool(config, begins or role), config.transfer, config.model
    return WorkerSettings(
        cluster=config.name,
        worker_id=worker_id,
        role=role,
        redis_url=config.redis.url,
        model_name=model.name,
        model_path=model.path,
        backend=model.backend,
        dtype=model.dtype,
        quantize=model.quantize,
        kv_dtype=model.kv_dtype,
        device=pool.device,
        tensor_parallel=pool.tensor_parallel,
        threads=None if pool.threads == "auto" else pool.threads,
        attention_splits=pool.attention_splits,
        kv_memory=pool.kv_memory,
        max_model_len=model.max_model_len,
        block_size=pool.block_size,
        max_batched_tokens=pool.max_batched_tokens,
        max_running=pool.max_running,
        prefix_cache=pool.prefix_cache,
        seed=model.seed,
        listen=place.listen,
        metrics=place.metrics,
        advertise=place.advertise,
        interface=place.interface,
        lease_s=config.ledger.lease_s,
        heartbeat_s=config.ledger.heartbeat_s,
        shapes=shapes_of(config, pool.max_running),
        auto_rows=config.determinism.rows == "auto",
        speculation=config.decode.speculation if role is Role.DECODE else "off",
        thinking_prefill=config.thinking.prefill,
        history=config.history,
        tls=config.security.tls,
        transfer=TransferSettings(
            transport=transfer.transport,
            encrypted=config.kv_is_encrypted,
            frame_size=transfer.frame_size,
            credits=transfer.credits,
            coalesce_below=transfer.coalesce_below,
            frame_deadline_s=transfer.frame_deadline_s,
            staging_memory=transfer.staging_memory,
            verify_frames=transfer.verify == "frames",
            verify_kv=transfer.verify == "kv",
            interface=place.interface,
        ),
    )


def located(settings: WorkerSettings) -> WorkerSettings:
    """Return settings with the addresses on this host: the advertised one, and the one for KV. Raises ConfigError."""
    listen, interface, key = settings.listen, settings.interface, f"{settings.role.value}.interface"
    advertised = reachable_host(listen, settings.advertise, interface, settings.redis_url, key)
    bind_host = kv_host(listen, advertised, interface, key)
    return replace(settings, advertise=advertised, transfer=replace(settings.transfer, bind_host=bind_host))


VERIFIED = FixedShapes(2, 64)  # a full pass of 128 tokens costs less per token; docs/design/determinism.md


def shapes_of(config: ClusterConfig, max_running: int) -> FixedShapes:
    """Return the shapes of deterministic requests, the same on all workers of the cluster; `auto` is the default. All
    decode steps of a pool may be exact where its workers support it, unless everything is to be verified.
    """
    given = config.determinism
    auto = FixedShapes() if given.verify == "auto" else VERIFIED
    rows = auto.rows if given.rows == "auto" else given.rows
    window = auto.tokens if given.window == "auto" else given.window
    return FixedShapes(rows, window, exact_rows=max_running if given.verify == "auto" else 0)


def _pool(config: ClusterConfig, role: Role) -> PoolConfig:
    return config.prefill if role is Role.PREFILL else config.decode
