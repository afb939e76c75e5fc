"""Choice of a worker's transports: the one that the cluster file names, or all that this machine supports."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from baton.engine.kv_cache import KVCache
from baton.errors import ConfigError
from kvtransfer.handoff import TransferSettings
from kvtransfer.transports.base import Transport
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.nixl import NixlTransport
from kvtransfer.transports.shm import ShmTransport
from kvtransfer.transports.torch_dist import GlooTransport, NcclTransport

Makers = dict[str, Callable[[], Transport]]

log = structlog.get_logger()


def make_transports(
    settings: TransferSettings, kv: KVCache, *, grpc: GrpcTransport | None = None
) -> tuple[Transport, ...]:
    """Return the transports of `settings.transport` for `kv`, best first. `grpc` is the worker's own, if any.

    Raises ConfigError if a named transport is unavailable, and never replaces it. `auto` omits transports that this
    machine lacks, and with `settings.encrypted` those that the network could read. It omits nixl, which is slower than
    gloo over TCP (docs/measurements/transfer.md).
    """
    device = kv.device
    makers: Makers = {
        "shm": lambda: ShmTransport(kv),
        "nixl": lambda: NixlTransport(kv, settings),
        "gloo": lambda: GlooTransport(settings.bind_host),
        "cuda_ipc": lambda: CudaIpcTransport(kv),
        "nccl": lambda: NcclTransport(device, settings.interface),
        "grpc": lambda: _given(grpc),
    }
    if settings.transport == "auto" and settings.encrypted:
        local = "cuda_ipc" if device.type == "cuda" else "shm"
        return *_available([local], makers), _named("grpc", makers)
    if settings.transport == "auto" and device.type == "cuda":
        made = _available(["cuda_ipc", "nccl"], makers)
        if not made:
            raise ConfigError(f"transfer.transport: 'auto' needs cuda_ipc or nccl for KV on {device}")
        return made
    if settings.transport == "auto":
        return *_available(["shm"], makers), _named("gloo", makers)
    if not (named := _named(settings.transport, makers)).sends:
        text = "other processes cannot read the KV cache here; for ranks of a worker, use auto or a two-sided one"
        raise ConfigError(f"transfer.transport: {named.name!r} is not available: {text}")
    return (named,)


def _named(name: str, makers: Makers) -> Transport:
    if name not in makers:
        raise ConfigError(f"transfer.transport: {name!r} is not one of auto, {', '.join(makers)}")
    try:
        return makers[name]()
    except ConfigError as error:
        raise ConfigError(f"transfer.transport: {name!r} is not available: {error}") from error


def _available(names: list[str], makers: Makers) -> tuple[Transport, ...]:
    made: list[Transport] = []
    for name in names:
        try:
            made.append(makers[name]())
        except ConfigError as error:
            log.info("transport_left_out", transport=name, reason=str(error))
    return tuple(made)


def _given(grpc: GrpcTransport | None) -> GrpcTransport:
    if grpc is None:
        raise ConfigError("this worker has no address that serves it")
    return grpc
