"""Choice of a worker's transports: the one that the cluster file names, or all that this machine supports."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from baton.core import LeftOut
from baton.engine.kv_cache import KVCache
from baton.errors import ConfigError
from kvtransfer.handoff import TransferSettings
from kvtransfer.transports.base import Choice, Transport
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.nixl import NixlTransport
from kvtransfer.transports.shm import ShmTransport
from kvtransfer.transports.torch_dist import GlooTransport, NcclTransport

Makers = dict[str, Callable[[], Transport]]

log = structlog.get_logger()


def make_transports(settings: TransferSettings, kv: KVCache, *, grpc: GrpcTransport | None = None) -> Choice:
    """Return the transports of `settings.transport` for `kv`. `grpc` is the worker's own, if any.

    Raises ConfigError if a named transport is unavailable, and never replaces it. `auto` leaves out transports that
    this machine lacks, and with `settings.encrypted` those that the network could read. It does not consider nixl,
    which is slower than gloo over TCP (docs/measurements/transfer.md).
    """
    device = kv.device
    makers: Makers = {
        "shm": lambda: ShmTransport(kv),
        "nixl": lambda: NixlTransport(settings),
        "gloo": lambda: GlooTransport(settings.bind_host),
        "cuda_ipc": lambda: CudaIpcTransport(kv),
        "nccl": lambda: NcclTransport(device, settings.interface),
        "grpc": lambda: _given(grpc),
    }
    if settings.transport != "auto":
        if not (named := _named(settings.transport, makers)).sends:
            text = "other processes cannot read the KV cache here; for ranks of a worker, use auto or a two-sided one"
            raise ConfigError(f"transfer.transport: {named.name!r} is not available: {text}")
        return Choice((named,))
    within, across = ("cuda_ipc", "nccl") if device.type == "cuda" else ("shm", "gloo")
    if settings.encrypted:
        open_ = LeftOut(across, "unencrypted")
        return _available([within], makers, [_named("grpc", makers)], [open_])
    if across == "gloo":
        return _available([within], makers, [_named(across, makers)])
    made = _available([within, across], makers)
    if not made.transports:
        raise ConfigError(f"transfer.transport: 'auto' needs cuda_ipc or nccl for KV on {device}")
    return made


def _named(name: str, makers: Makers) -> Transport:
    if name not in makers:
        raise ConfigError(f"transfer.transport: {name!r} is not one of auto, {', '.join(makers)}")
    try:
        return makers[name]()
    except ConfigError as error:
        raise ConfigError(f"transfer.transport: {name!r} is not available: {error}") from error


def _available(
    names: list[str], makers: Makers, more: Sequence[Transport] = (), left_out: Sequence[LeftOut] = ()
) -> Choice:
    """Return those of `names` that work here, before `more`."""
    made, lacking = list[Transport](), list[LeftOut]()
    for name in names:
        try:
            made.append(makers[name]())
        except ConfigError as error:
            log.info("transport_left_out", transport=name, reason=str(error))
            lacking.append(LeftOut(name, "unavailable", str(error)))
    return Choice((*made, *more), (*lacking, *left_out))


def _given(grpc: GrpcTransport | None) -> GrpcTransport:
    if grpc is None:
        raise ConfigError("this worker has no address that serves it")
    return grpc
