"""NCCL between GPUs. Written from NCCL's and torch's sources and not yet run: no two-GPU machine was at hand.

One end of a two-rank `torch.distributed` process group, gloo or NCCL: each frame is a send or a receive under way.

There is no world and no TCPStore: each side has a local `HashStore`, and the few keys of the rendezvous (with gloo
two, of about 170 bytes) travel over the Peer stream. Pools grow and shrink freely; nothing listens but the pair itself.

TCP between CPUs.
"""

from __future__ import annotations

import os
import time
from collections import deque
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from baton.errors import ConfigError
from kvtransfer.transports.base import RingEnd, Side, local_ring, told
from kvtransfer.transports.rendezvous import relayed_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvtransfer.transports.base import ChannelName, KeyRelay, Ring

    Group = dist.ProcessGroupGloo | dist.ProcessGroupNCCL


class GroupEnd(RingEnd):
    """Has a ring of its own; operations of a pair match by order.

    `wait` blocks until a piece of work is done or the deadline is over; `end` gives back what a group holds on to.
    """

    def __init__(
        self,
        title: str,
        staging: Tensor,
        group: Group,
        side: Side,
        wait: Callable[[dist.Work], object],
        end: Callable[[Group], object] = lambda group: None,
    ) -> None:
        super().__init__(title, staging)
        self._group: Group | None = group
        self._post = group.recv if side is Side.RECEIVER else group.send  # type: ignore[union-attr]  # not in the stub
        self._peer = 1 - int(side)
        self._wait = wait
        self._end = end
        self._slots = len(staging)
        self._under_way: deque[tuple[int, dist.Work]] = deque()

    def _start(self, number: int, nbytes: int) -> None:
        # What used this slot before was taken by the other end, or has failed: that is not waited for, it is heard.
        while self._under_way and (
            self._under_way[0][0] <= number - self._slots or self._under_way[0][1].is_completed()
        ):
            self._wait(self._under_way.popleft()[1])
        self._under_way.append((number, self._post([self.slot(number)[:nbytes]], self._peer, 0)))

    def _finish(self, number: int) -> None:
        while self._under_way and self._under_way[0][0] <= number:
            self._wait(self._under_way[0][1])
            self._under_way.popleft()

    def _release(self) -> None:
        group, self._group = self._group, None
        del self._post
        if group is not None:
            self._end(group)
        self._under_way.clear()


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


_POLL_S = 0.00005


class NcclTransport:
    """Between GPUs, and not yet run (see above).

    NCCL kernels spin for ever on a dead peer, so every wait is a poll with a deadline of our own, communicators are
    non-blocking, and what fails is aborted. Two ranks on one GPU need NCCL 2.30 or later.
    """

    name = "nccl"
    reach = ""

    def __init__(self, device: torch.device, interface: str | None = None) -> None:
        if device.type != "cuda" or not dist.is_nccl_available():
            raise ConfigError(f"nccl needs KV on a GPU and torch with NCCL; KV is on {device}")
        # torch's default would end the whole process on the first failed communicator: abort that one only.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        if interface:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # with =, not all that begin so
        self.device = device

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> GroupEnd:
        """See `Transport`. An end works on its thread's current CUDA stream; abort() returns when no kernel runs."""
        title = f"nccl channel {name}"
        return told(f"{title}: not built", lambda: self._end(title, name, side, keys, ring, deadline_s))

    def _end(
        self, title: str, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float
    ) -> GroupEnd:
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = timedelta(seconds=deadline_s)
        staging = local_ring(ring, self.device)
        with torch.cuda.device(self.device), relayed_store(name, keys) as store:
            group = dist.ProcessGroupNCCL(store, int(side), len(type(side)), options)
            # The communicator is made now, not at the first send: later nobody relays its keys.
            group.eager_connect_single_device(self.device)
            end = GroupEnd(title, staging, group, side, partial(_poll, deadline_s=deadline_s), _abort)
            end.start(0, 1)  # the first operation of a pair is slow
            end.finish(0)
        return end


def _abort(group: Group) -> None:
    group.abort()


def _poll(work: dist.Work, deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no progress within {deadline_s} s")
        time.sleep(_POLL_S)
    if not work.is_success():
        raise RuntimeError(str(work.exception()))
