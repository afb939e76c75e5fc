"""Channels over `torch.distributed`: a two-rank process group of their own, gloo between CPUs, NCCL between GPUs.

There is no world and no TCPStore: each side has a local `HashStore`, and the few keys of the rendezvous (with gloo
two, of about 170 bytes) travel over the Peer stream. Pools grow and shrink freely; nothing listens but the pair itself.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from baton.errors import ChannelBroken, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from kvtransfer.transport import ChannelName, KeyRelay, Side

_KEY_POLL_S = 0.001  # a HashStore cannot be watched, only listed; polled while a pair is built, never later
_NCCL_POLL_S = 0.00005


class GlooTransport:
    """TCP between CPUs, bound to one local address on both ends of the pair."""

    name = "gloo"
    device = torch.device("cpu")

    def __init__(self, bind_host: str) -> None:
        try:
            dist.ProcessGroupGloo.create_device(hostname=bind_host)
        except RuntimeError as error:
            raise ConfigError(f"transfer: gloo cannot bind to {bind_host!r}: {error}") from error
        self._bind_host = bind_host

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, deadline_s: float) -> GlooChannel:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub calls it Options
        options._timeout = timedelta(seconds=deadline_s)
        options._threads = 1  # point-to-point work runs in the device's loop; this one only idles
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._bind_host)]
        try:
            with _relayed_store(name, keys) as store:
                group = dist.ProcessGroupGloo(store, int(side), len(type(side)), options)
        except RuntimeError as error:
            raise ChannelBroken(f"gloo channel {name}: not built: {error}") from error
        return GlooChannel(group, name, side, deadline_s)


class GlooChannel:
    """One end. A peer's death is seen at once, a frozen peer by the deadline; either closes the pair for good."""

    def __init__(self, group: dist.ProcessGroupGloo, name: ChannelName, side: Side, deadline_s: float) -> None:
        self._group: dist.ProcessGroupGloo | None = group
        self._name = name
        self._peer = 1 - int(side)
        self._deadline = timedelta(seconds=deadline_s)

    def send(self, data: Tensor) -> None:
        self._finish(lambda group: group.send([data], self._peer, 0))  # type: ignore[attr-defined]  # not in the stub

    def recv(self, out: Tensor) -> None:
        self._finish(lambda group: group.recv([out], self._peer, 0))  # type: ignore[attr-defined]  # not in the stub

    def close(self) -> None:
        # abort() and shutdown() close nothing in gloo: the last reference does, sockets and threads with it.
        self._group = None

    def _finish(self, start: Callable[[dist.ProcessGroupGloo], dist.Work]) -> None:
        if self._group is None:
            raise ChannelBroken(f"gloo channel {self._name} is closed")
        try:
            start(self._group).wait(self._deadline)
        except RuntimeError as error:
            self.close()
            raise ChannelBroken(f"gloo channel {self._name}: {error}") from error


class NcclTransport:
    """Between GPUs. Written from NCCL's and torch's sources and not yet run: no two-GPU machine was at hand.

    NCCL kernels spin for ever on a dead peer, so every wait is a poll with a deadline of our own, communicators are
    non-blocking, and what fails is aborted. Two ranks on one GPU need NCCL 2.30 or later.
    """

    name = "nccl"

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" or not dist.is_nccl_available():
            raise ConfigError(f"transfer.transport: nccl needs KV on a GPU and torch with NCCL; KV is on {device}")
        # torch's default would end the whole process on the first failed communicator: abort that one only.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        self.device = device

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, deadline_s: float) -> NcclChannel:
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = timedelta(seconds=deadline_s)
        try:
            with torch.cuda.device(self.device), _relayed_store(name, keys) as store:
                group = dist.ProcessGroupNCCL(store, int(side), len(type(side)), options)
                # The communicator is made now, not at the first send: later nobody relays its keys.
                group.eager_connect_single_device(self.device)
                channel = NcclChannel(group, name, side, deadline_s)
                channel.warm(torch.zeros(1, dtype=torch.uint8, device=self.device))
        except RuntimeError as error:
            raise ChannelBroken(f"nccl channel {name}: not built: {error}") from error
        return channel


class NcclChannel:
    """One end, on the current CUDA stream of its thread."""

    def __init__(self, group: dist.ProcessGroupNCCL, name: ChannelName, side: Side, deadline_s: float) -> None:
        self._group: dist.ProcessGroupNCCL | None = group
        self._name = name
        self._side = side
        self._peer = 1 - int(side)
        self._deadline_s = deadline_s

    def warm(self, byte: Tensor) -> None:
        """One byte through, sender to receiver: the first operation of a pair is slow."""
        (self.recv if self._side else self.send)(byte)

    def send(self, data: Tensor) -> None:
        self._finish(lambda group: group.send([data], self._peer, 0))  # type: ignore[attr-defined]  # not in the stub

    def recv(self, out: Tensor) -> None:
        self._finish(lambda group: group.recv([out], self._peer, 0))  # type: ignore[attr-defined]  # not in the stub

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()  # returns when no kernel touches staging any more
            self._group = None

    def _finish(self, start: Callable[[dist.ProcessGroupNCCL], dist.Work]) -> None:
        if self._group is None:
            raise ChannelBroken(f"nccl channel {self._name} is closed")
        try:
            self._poll(start(self._group))
        except RuntimeError as error:
            self.close()
            raise ChannelBroken(f"nccl channel {self._name}: {error}") from error

    def _poll(self, work: dist.Work) -> None:
        deadline = time.monotonic() + self._deadline_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"no progress within {self._deadline_s} s")
            time.sleep(_NCCL_POLL_S)
        if not work.is_success():
            raise RuntimeError(str(work.exception()))


@contextmanager
def _relayed_store(name: ChannelName, keys: KeyRelay) -> Iterator[Store]:
    """A store whose keys of this side go to the peer, and the other way round, while the block runs."""
    store = HashStore()
    known: set[str] = set()

    def arrived(key: str, value: bytes) -> None:
        known.add(key)  # first, or it would be sent back
        store.set(key, value)  # type: ignore[arg-type]  # bytes are right, the stub says str

    def send_new_keys() -> None:
        for key in set(store.list_keys()) - known:
            known.add(key)
            keys.send(key, store.get(key))

    def relay() -> None:
        while not built.wait(_KEY_POLL_S):
            send_new_keys()

    keys.attach(arrived)
    built = threading.Event()
    thread = threading.Thread(target=relay, name=f"kv-keys-{name}", daemon=True)
    thread.start()
    try:
        yield PrefixStore(str(name), store)
    finally:
        built.set()
        thread.join()
        send_new_keys()
