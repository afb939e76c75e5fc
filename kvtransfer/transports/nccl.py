"""NCCL between GPUs. Written from NCCL's and torch's sources and not yet run: no two-GPU machine was at hand."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from functools import partial
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
    from kvtransfer.transports.group import Group

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
