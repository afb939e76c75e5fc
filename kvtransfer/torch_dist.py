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
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from baton.errors import ChannelBroken, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from kvtransfer.handoff import TransferSettings
    from kvtransfer.transport import ChannelName, KeyRelay, Side, Transport

    Group = dist.ProcessGroupGloo | dist.ProcessGroupNCCL

T = TypeVar("T")
_KEY_POLL_S = 0.0003  # a HashStore cannot be watched, only listed; polled while a pair is built, never later
_NCCL_POLL_S = 0.00005


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


class GroupChannel:
    """One end of a pair. A failure is told by its text alone: a kept exception would keep the group, and its sockets.

    `wait` blocks until a piece of work is done or the deadline is over; `end` gives back what a group holds on to.
    """

    def __init__(
        self, title: str, group: Group, side: Side, wait: Callable[[dist.Work], object], end: Callable[[Group], object]
    ) -> None:
        self._title = title
        self._group: Group | None = group
        self._peer = 1 - int(side)
        self._wait = wait
        self._end = end

    def send(self, data: Tensor) -> None:
        self._finish(lambda group: group.send([data], self._peer, 0))  # type: ignore[union-attr]  # not in the stub

    def recv(self, out: Tensor) -> None:
        self._finish(lambda group: group.recv([out], self._peer, 0))  # type: ignore[union-attr]  # not in the stub

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            self._end(group)

    def _finish(self, start: Callable[[Group], dist.Work]) -> None:
        def finish() -> None:
            if self._group is None:
                raise RuntimeError("closed")
            self._wait(start(self._group))

        try:
            _told(self._title, finish)
        except ChannelBroken:
            self.close()
            raise


class GlooTransport:
    """TCP between CPUs, bound to one local address on both ends of the pair.

    A peer's death is seen at once, a frozen peer by the deadline; either closes the pair for good.
    """

    name = "gloo"
    device = torch.device("cpu")

    def __init__(self, bind_host: str) -> None:
        self._bind_host = bind_host
        try:
            self._listener()
        except RuntimeError as error:
            raise ConfigError(f"transfer: gloo cannot bind to {bind_host!r}: {error}") from error

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, deadline_s: float) -> GroupChannel:
        """See `Transport`. abort() and shutdown() close nothing in gloo: the last reference to the group does."""
        title, deadline = f"gloo channel {name}", timedelta(seconds=deadline_s)
        group = _told(f"{title}: not built", lambda: self._group(name, side, keys, deadline))
        return GroupChannel(title, group, side, lambda work: work.wait(deadline), lambda _: None)

    def _group(self, name: ChannelName, side: Side, keys: KeyRelay, deadline: timedelta) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub calls it Options
        options._timeout = deadline
        options._threads = 1  # point-to-point work runs in the device's loop; this one only idles
        options._devices = [self._listener()]
        with _relayed_store(name, keys) as store:
            return dist.ProcessGroupGloo(store, int(side), len(type(side)), options)

    def _listener(self) -> dist.ProcessGroupGloo.Device:
        return dist.ProcessGroupGloo.create_device(hostname=self._bind_host)


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

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, deadline_s: float) -> GroupChannel:
        """See `Transport`. An end works on its thread's current CUDA stream; abort() returns when no kernel runs."""
        title = f"nccl channel {name}"
        return _told(f"{title}: not built", lambda: self._channel(title, name, side, keys, deadline_s))

    def _channel(self, title: str, name: ChannelName, side: Side, keys: KeyRelay, deadline_s: float) -> GroupChannel:
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = timedelta(seconds=deadline_s)
        with torch.cuda.device(self.device), _relayed_store(name, keys) as store:
            group = dist.ProcessGroupNCCL(store, int(side), len(type(side)), options)
            # The communicator is made now, not at the first send: later nobody relays its keys.
            group.eager_connect_single_device(self.device)
            channel = GroupChannel(title, group, side, partial(_poll, deadline_s=deadline_s), _abort)
            first = channel.recv if side else channel.send
            first(torch.zeros(1, dtype=torch.uint8, device=self.device))  # the first operation of a pair is slow
        return channel


def _told(what: str, call: Callable[[], T]) -> T:
    """What `call` returns. Raises ChannelBroken, with the text and nothing else, for what torch raises."""
    try:
        return call()
    except RuntimeError as error:
        failure = str(error)
    raise ChannelBroken(f"{what}: {failure}")


def _abort(group: Group) -> None:
    group.abort()


def _poll(work: dist.Work, deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no progress within {deadline_s} s")
        time.sleep(_NCCL_POLL_S)
    if not work.is_success():
        raise RuntimeError(str(work.exception()))


@contextmanager
def _relayed_store(name: ChannelName, keys: KeyRelay) -> Iterator[Store]:
    """A store whose keys of this side go to the peer, and the other way round, while the block runs."""
    store, known, built = HashStore(), set[str](), threading.Event()

    def send_new_keys() -> None:
        for key in set(store.list_keys()) - known:
            known.add(key)
            keys.send(key, store.get(key))

    def relay() -> None:
        while not built.is_set():
            send_new_keys()
            if (arrived := keys.receive(_KEY_POLL_S)) is not None:
                known.add(arrived[0])  # or it would be sent back
                store.set(*arrived)  # type: ignore[arg-type]  # bytes are right, the stub says str

    thread = threading.Thread(target=relay, name=f"kv-keys-{name}", daemon=True)
    thread.start()
    try:
        yield PrefixStore(str(name), store)
    finally:
        built.set()
        thread.join()
        send_new_keys()
