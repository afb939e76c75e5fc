"""Transports over a two-rank `torch.distributed` process group: gloo (TCP between CPUs) and NCCL (between GPUs).

Each frame is a pending send or receive. There is no world and no TCPStore: each end has a local `HashStore`. The few
keys of the rendezvous (two of about 170 bytes with gloo) travel over the Peer stream. Pools grow and shrink freely, and
only the pair itself listens. NCCL is written from the sources of NCCL and torch and has not run yet, because no machine
with two GPUs was available.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from baton.errors import ConfigError
from kvtransfer.transports.base import ChannelName, KeyRelay, Ring, RingEnd, Side, local_ring, translate_errors

Group: TypeAlias = "dist.ProcessGroupGloo | dist.ProcessGroupNCCL"  # torch may be built without NCCL


_KEY_POLL_S = 0.0003  # a HashStore cannot be watched, only listed; polled only while a pair is built


@contextmanager
def relayed_store(name: ChannelName, keys: KeyRelay) -> Iterator[Store]:
    """Yield a store that exchanges its keys with the peer's store while the block runs."""
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
                store.set(*arrived)  # type: ignore[arg-type]  # bytes are right, the stub has str

    thread = threading.Thread(target=relay, name=f"kv-keys-{name}", daemon=True)
    thread.start()
    try:
        yield PrefixStore(str(name), store)
    finally:
        built.set()
        thread.join()
        send_new_keys()


class GroupEnd(RingEnd):
    """An end with its own ring; operations of a pair match by order. `wait` blocks until an operation is done or the
    deadline is over. `end` releases the resources of a group.
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
        # The slot's previous frame was taken by the peer or has failed, so this does not block; it raises the failure.
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
    """TCP between CPUs, bound to one local address on both ends. A peer's death is detected immediately, a frozen peer
    at the deadline; either closes the pair permanently. A message longer than the posted receive kills the process
    (SIGABRT), a shorter one is not detected: sizes come from the Peer stream.
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
        """See `Transport`. gloo closes a group with its last reference; abort() and shutdown() close nothing."""
        title, deadline = f"gloo channel {name}", timedelta(seconds=deadline_s)
        group = translate_errors(f"{title}: not built", lambda: self._group(name, side, keys, deadline))
        return GroupEnd(title, local_ring(ring, self.device), group, side, lambda work: work.wait(deadline))

    def _group(self, name: ChannelName, side: Side, keys: KeyRelay, deadline: timedelta) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub calls it Options
        options._timeout = deadline
        options._threads = 1  # point-to-point work runs in the device's loop; this thread only idles
        options._devices = [self._listener()]
        with relayed_store(name, keys) as store:
            return dist.ProcessGroupGloo(store, int(side), len(type(side)), options)

    def _listener(self) -> dist.ProcessGroupGloo.Device:
        return dist.ProcessGroupGloo.create_device(hostname=self._bind_host)


_POLL_S = 0.00005


class NcclTransport:
    """Transport between GPUs; not yet run, see the module. Two ranks on one GPU need NCCL 2.30 or later.

    NCCL kernels spin indefinitely on a dead peer. So every wait polls with our own deadline, communicators are
    non-blocking, and failed ones are aborted.
    """

    name = "nccl"
    reach = ""

    def __init__(self, device: torch.device, interface: str | None = None) -> None:
        if device.type != "cuda" or not dist.is_nccl_available():
            raise ConfigError(f"nccl needs KV on a GPU and torch with NCCL; KV is on {device}")
        # torch's default would end the whole process on the first failed communicator; 2 aborts only that one.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        if interface:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # = matches the exact name, not a prefix
        self.device = device

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> GroupEnd:
        """See `Transport`. An end uses its thread's current CUDA stream; abort() returns when no kernel runs."""
        title = f"nccl channel {name}"
        return translate_errors(f"{title}: not built", lambda: self._end(title, name, side, keys, ring, deadline_s))

    def _end(
        self, title: str, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float
    ) -> GroupEnd:
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options._timeout = timedelta(seconds=deadline_s)
        staging = local_ring(ring, self.device)
        with torch.cuda.device(self.device), relayed_store(name, keys) as store:
            group = dist.ProcessGroupNCCL(store, int(side), len(type(side)), options)
            # Make the communicator now, because later no relay carries its keys.
            group.eager_connect_single_device(self.device)
            end = GroupEnd(
                title, staging, group, side, partial(_poll, deadline_s=deadline_s), lambda group: group.abort()
            )
            end.start(0, 1)  # the first operation of a pair is slow
            end.finish(0)
        return end


def _poll(work: dist.Work, deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no progress within {deadline_s} s")
        time.sleep(_POLL_S)
    if not work.is_success():
        raise RuntimeError(str(work.exception()))
