"""Which transport a worker uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.errors import ConfigError
from kvtransfer.torch_dist import GlooTransport, NcclTransport

if TYPE_CHECKING:
    import torch

    from kvtransfer.handoff import TransferSettings
    from kvtransfer.transport import Transport


def make_transport(settings: TransferSettings, device: torch.device) -> Transport:
    """The transport that `settings.transport` names, for KV on `device`. Raises ConfigError, never takes another one.

    `memory` is not made here: both workers of a process must share one `MemoryTransport`.
    """
    wanted = settings.transport
    if wanted == "auto":
        wanted = "nccl" if device.type == "cuda" else "gloo"
    if wanted == "nccl":
        return NcclTransport(device)
    if wanted == "gloo":
        return GlooTransport(settings.bind_host)
    if wanted == "memory":
        raise ConfigError("transfer.transport: memory works only between workers of one process, which share an object")
    raise ConfigError(f"transfer.transport: {wanted!r} is not one of auto, gloo, nccl, memory")
