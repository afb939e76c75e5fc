"""TCP between CPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from baton.errors import ConfigError
from kvtransfer.transport import local_ring
from kvtransfer.transports.end import told
from kvtransfer.transports.group import GroupEnd
from kvtransfer.transports.rendezvous import relayed_store

if TYPE_CHECKING:
    from kvtransfer.transport import ChannelName, KeyRelay, Ring, Side


class GlooTransport:
    """TCP between CPUs, bound to one local address on both ends of the pair.

    A peer's death is seen at once, a frozen peer by the deadline; either closes the pair for good. A message longer
    than the posted receive ends the process (SIGABRT), a shorter one is not noticed: the sizes are the Peer stream's.
    """

    name = "gloo"
    reach = ""
    device = torch.device("cpu")

    def __init__(self, bind_host: str) -> None:
        self._bind_host = bind_host
        try:
            self._listener()
        except RuntimeError as error:
            raise ConfigError(f"gloo cannot bind to {bind_host!r}: {error}") from error

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> GroupEnd:
        """See `Transport`. abort() and shutdown() close nothing in gloo: the last reference to the group does."""
        title, deadline = f"gloo channel {name}", timedelta(seconds=deadline_s)
        group = told(f"{title}: not built", lambda: self._group(name, side, keys, deadline))
        return GroupEnd(title, local_ring(ring, self.device), group, side, lambda work: work.wait(deadline))

    def _group(self, name: ChannelName, side: Side, keys: KeyRelay, deadline: timedelta) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub calls it Options
        options._timeout = deadline
        options._threads = 1  # point-to-point work runs in the device's loop; this one only idles
        options._devices = [self._listener()]
        with relayed_store(name, keys) as store:
            return dist.ProcessGroupGloo(store, int(side), len(type(side)), options)

    def _listener(self) -> dist.ProcessGroupGloo.Device:
        return dist.ProcessGroupGloo.create_device(hostname=self._bind_host)
