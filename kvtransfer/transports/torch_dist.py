"""Transports over a two-rank `torch.distributed` process group: gloo (TCP between CPUs) and NCCL (between GPUs).

Each frame is a pending send or receive. There is no world and no TCPStore: each end has a local `HashStore`. The few
keys of the rendezvous (two of about 170 bytes with gloo) travel over the Peer stream. Pools grow and shrink freely, and
only the pair itself listens. NCCL is written from the sources of NCCL and torch 2.13 and has not run yet, because no
machine with two GPUs was available.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
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


class Turns:
    """Order of one GPU's channels in one direction: at most one of them has kernels under way.

    A kernel of NCCL spins until its counterpart runs. Kernels of many channels may fill a GPU or one of its 8 launch
    queues, and GPUs could then wait for each other in a cycle. A sender takes its turn before it announces a frame; a
    receiver takes one for an announced frame. So the turn of a receiver waits only for a send that was posted, and the
    turn of a sender waits only for turns of receivers. Thus there is no cycle.
    """

    def __init__(self) -> None:
        self._waiting: deque[object] = deque()  # the first one may start frames
        self._holder: GroupEnd | None = None

    @contextmanager
    def take(self, end: GroupEnd, patience_s: float) -> Iterator[None]:
        """Wait until the operations of other ends are done, then let the block start some. The end keeps its turn
        between blocks until another one waits. Raises RuntimeError after `patience_s`.
        """
        ticket, deadline = object(), time.monotonic() + patience_s
        self._waiting.append(ticket)
        try:
            while not self._is_due(ticket, end):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the other channels of this GPU made no progress within {patience_s} s")
                time.sleep(_POLL_S)
            self._holder = end
            yield
        finally:
            self._waiting.remove(ticket)

    def _is_due(self, ticket: object, end: GroupEnd) -> bool:
        if self._waiting[0] is not ticket:
            return False
        keeps = self._holder is end and len(self._waiting) == 1
        return keeps or self._holder is None or self._holder.idle


class GroupEnd(RingEnd):
    """An end with its own ring; operations of a pair match by order. `wait` blocks until an operation is done or the
    deadline is over. `end` releases the resources of a group, given the operations under way. `turns`, if any, orders
    this end among those of its GPU, each at most `patience_s` late.
    """

    def __init__(
        self,
        title: str,
        staging: Tensor,
        group: Group,
        side: Side,
        wait: Callable[[dist.Work], object],
        end: Callable[[Group, Sequence[dist.Work]], object] = lambda group, works: None,
        turns: Turns | None = None,
        patience_s: float = 0.0,
    ) -> None:
        super().__init__(title, staging)
        self._group = group
        self._post = group.recv if side is Side.RECEIVER else group.send  # type: ignore[union-attr]  # not in the stub
        self._peer = 1 - int(side)
        self._wait = wait
        self._end = end
        self._turns, self._patience_s = turns, patience_s
        self._slots = len(staging)
        self._under_way: deque[tuple[int, dist.Work]] = deque()

    @property
    def ordered(self) -> bool:
        return self._turns is not None

    @property
    def idle(self) -> bool:
        """Whether no operation is under way. Called from any thread."""
        return all(work.is_completed() for _, work in tuple(self._under_way))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """See `ChannelEnd`. Raises ChannelBroken."""
        with ExitStack() as stack:
            if (turns := self._turns) is not None:
                self._guard(lambda: stack.enter_context(turns.take(self, self._patience_s)))
            yield

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
        group, works = self._group, [work for _, work in self._under_way]
        del self._group, self._post  # they hold the connection, also if the end fails
        self._end(group, works)
        self._under_way.clear()


class GlooTransport:
    """TCP between CPUs, bound to one local address on both ends. A peer's death is detected immediately, a frozen peer
    at the deadline; either closes the pair permanently. A message longer than the posted receive kills the process
    (SIGABRT), a shorter one is not detected: sizes come from the Peer stream.
    """

    name = "gloo"
    one_sided, sends = False, True
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
_STARTS = "first-send-starts"
_FAREWELL_S = 1.0  # longer than any healthy frame
_MAX_CTAS = 8  # multiprocessors that one operation may occupy; enough for NVLink, and a small part of any GPU


class NcclTransport:
    """Transport between GPUs; not yet run, see the module. Two ranks on one GPU need NCCL 2.30 or later.

    NCCL kernels spin indefinitely on a dead peer. So every wait polls with our own deadline, communicators are
    non-blocking, and failed ones are aborted. `Turns` orders the channels of a GPU. A receive is posted after its send,
    so it gets half of the deadline; the peer of the next channel in order waits for both.
    """

    name = "nccl"
    one_sided, sends = False, True
    reach = ""

    def __init__(self, device: torch.device, interface: str | None = None) -> None:
        if device.type != "cuda" or not dist.is_nccl_available():
            raise ConfigError(f"nccl needs KV on a GPU and torch with NCCL; KV is on {device}")
        if device.index is None:  # torch would store the communicator under index -1 and look it up under another
            raise ConfigError(f"nccl needs the index of its GPU, such as cuda:0; KV is on {device}")
        # torch's default would end the whole process on the first failed communicator; 2 aborts only that one.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        if interface:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # = matches the exact name, not a prefix
        self.device = device
        self._turns = {side: Turns() for side in Side}

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> GroupEnd:
        """See `Transport`. An end uses its thread's current CUDA stream; abort() returns when no kernel runs."""
        title = f"nccl channel {name}"
        return translate_errors(f"{title}: not built", lambda: self._open(title, name, side, keys, ring, deadline_s))

    def _open(
        self, title: str, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float
    ) -> GroupEnd:
        options = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options.config.max_ctas = _MAX_CTAS
        options._timeout = timedelta(seconds=deadline_s)
        staging = local_ring(ring, self.device)
        limit_s = deadline_s / 2 if side is Side.RECEIVER else deadline_s
        # A start waits within torch for its peer, by default 30 minutes. torch reads this once per process.
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(deadline_s)))
        with torch.cuda.device(self.device), relayed_store(name, keys) as store:
            store.set_timeout(options._timeout)
            group = dist.ProcessGroupNCCL(store, int(side), len(type(side)), options)
            # Make the communicator now, because later no relay carries its keys.
            group.eager_connect_single_device(self.device)
            wait, turns = partial(_poll, deadline_s=limit_s), self._turns[side]
            end = GroupEnd(title, staging, group, side, wait, _part, turns, patience_s=2 * deadline_s)
            _exchange_first(end, side, store)
        return end


def _exchange_first(end: GroupEnd, side: Side, store: Store) -> None:
    """Run the first operation of a pair, which is slow. The key replaces an announcement; see `Turns`. It is set before
    the start, because the first send waits for the first receive of its peer: NCCL connects them then.
    """
    if side is Side.RECEIVER:
        store.wait([_STARTS])
    with end.turn():
        if side is Side.SENDER:
            store.set(_STARTS, "1")
        end.start(0, 1)
    end.finish(0)


def _poll(work: dist.Work, deadline_s: float) -> None:
    """Wait for `work`. Raises RuntimeError if it fails or is late.

    `WorkNCCL::isSuccess()` always raises. `WorkNCCL::wait()` without a timeout never blocks the host: it makes the
    current stream wait for the end of the work, and raises the error that the work has, that of an abort included.
    """
    deadline = time.monotonic() + deadline_s
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no progress within {deadline_s} s")
        time.sleep(_POLL_S)
    work.wait()


def _part(group: Group, works: Sequence[dist.Work]) -> None:
    """Abort the group, but let operations under way end first, because the peer may still read memory of this end."""
    deadline = time.monotonic() + _FAREWELL_S
    with suppress(RuntimeError):
        for work in works:
            _poll(work, max(0.0, deadline - time.monotonic()))
    group.abort()
