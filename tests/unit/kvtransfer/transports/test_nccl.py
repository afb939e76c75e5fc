"""NCCL channels over a process group that answers as torch 2.13's source does; see `tests.support.nccl`."""

import itertools
import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from baton.core import Incarnation
from baton.errors import ChannelBroken, ConfigError
from kvtransfer.transports import torch_dist
from kvtransfer.transports.base import ChannelName, Ring, Side
from kvtransfer.transports.torch_dist import GroupEnd, NcclTransport
from tests.support.nccl import Group, Machine, make_module
from tests.support.time_factor import scaled
from tests.support.waiting import eventually
from tests.unit.kvtransfer.transports.pairs import PATIENT_S, RING, frames, receive, relayed, send


class Cluster:
    """Workers with one GPU each. Each opens its ends on the threads of `pool`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine, self.groups, self.here = Machine(), list[Group](), threading.local()
        self.pool = ThreadPoolExecutor(16)
        self.generations = itertools.count(1)
        self.opened: list[GroupEnd] = []
        monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "")
        monkeypatch.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT")  # the first channel sets it, and no other test keeps it
        module = make_module(self.machine, lambda: self.here.gpu, self.groups)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", module, raising=False)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(
            torch_dist, "local_ring", lambda ring, device: torch.empty(ring.slots, ring.size, dtype=torch.uint8)
        )

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.here.gpu = device.index
        yield

    def pair(
        self, sender: NcclTransport, receiver: NcclTransport, deadline_s: float = PATIENT_S, ring: Ring = RING
    ) -> tuple[GroupEnd, GroupEnd]:
        name, relays = ChannelName(Incarnation(7, 1), Incarnation(7, 2), next(self.generations)), relayed()
        opening = [
            self.pool.submit(transport.open, name, side, relays[side], ring, deadline_s)
            for side, transport in zip(Side, (sender, receiver), strict=True)
        ]
        ends = opening[0].result(scaled(20)), opening[1].result(scaled(20))
        self.opened += ends
        return ends


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster(monkeypatch)
    yield cluster
    for group in cluster.groups:
        group.abort()  # a farewell waits for kernels that spin
    for end in cluster.opened:
        end.close()
    cluster.pool.shutdown()


def gpu(index: int) -> NcclTransport:
    return NcclTransport(torch.device("cuda", index))


def test_a_channel_opens_and_carries_frames(cluster: Cluster, seed: int) -> None:
    sender, receiver = cluster.pair(gpu(0), gpu(1))
    data, credits = frames(seed, 20), threading.Semaphore(RING.slots)
    sending = cluster.pool.submit(send, sender, credits, data, RING.slots)
    assert all(map(torch.equal, receive(receiver, credits, list(map(len, data)), 3), data))
    sending.result(scaled(20))


def test_a_communicator_leaves_most_of_the_gpu_to_the_engine(cluster: Cluster) -> None:
    cluster.pair(gpu(0), gpu(1))
    assert {(group.options.config.blocking, group.options.config.max_ctas) for group in cluster.groups} == {(0, 8)}


def test_an_end_whose_peer_never_starts_is_not_built(cluster: Cluster, monkeypatch) -> None:
    """The peer is frozen after it has exchanged the keys. Channels of the GPU wait no longer than the deadline."""
    monkeypatch.setattr(torch_dist, "_exchange_first", lambda *_: None)
    name, relays = ChannelName(Incarnation(7, 1), Incarnation(7, 2), next(cluster.generations)), relayed()
    frozen = cluster.pool.submit(gpu(1).open, name, Side.RECEIVER, relays[Side.RECEIVER], RING, 1.0)
    end = cluster.pool.submit(gpu(0).open, name, Side.SENDER, relays[Side.SENDER], RING, 1.0).result(scaled(20))
    cluster.opened += [end, frozen.result(scaled(20))]
    with pytest.raises(ChannelBroken, match="pointToPoint"), end.turn():
        end.start(0, 1)


def test_a_gpu_without_an_index_is_rejected(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="index of its GPU, such as cuda:0; KV is on cuda"):
        NcclTransport(torch.device("cuda"))


@pytest.mark.parametrize("side", list(Side))
def test_the_error_of_an_operation_breaks_the_channel(cluster: Cluster, side: Side) -> None:
    """Such as `ncclRemoteError`, or the abort of torch's watchdog, which sets the exception of the work first."""
    end = cluster.pair(gpu(0), gpu(1))[side]
    group = next(group for group in cluster.groups if group.side is side)
    with end.turn():
        end.start(1, 8)
    group.works[-1].error = RuntimeError("NCCL error: remote process exited")
    with pytest.raises(ChannelBroken, match="remote process exited"):
        end.finish(1)
    assert group.aborted


def test_a_silent_peer_breaks_the_channel_at_the_deadline(cluster: Cluster, monkeypatch) -> None:
    monkeypatch.setattr(torch_dist, "_FAREWELL_S", 0.0)
    sender, _ = cluster.pair(gpu(0), gpu(1), deadline_s=scaled(0.5))
    with sender.turn():
        sender.start(1, 8)
    with pytest.raises(ChannelBroken, match="no progress"):
        sender.finish(1)
    assert next(group for group in cluster.groups if group.side is Side.SENDER).aborted


def test_a_close_lets_the_peer_receive_what_was_sent(cluster: Cluster) -> None:
    sender, receiver = cluster.pair(gpu(0), gpu(1))
    sender.slot(1)[:8].copy_(torch.arange(8, dtype=torch.uint8))
    with sender.turn():
        sender.start(1, 8)
    closing = cluster.pool.submit(sender.close)
    with receiver.turn():
        receiver.start(1, 8)
    receiver.finish(1)
    closing.result(scaled(20))
    assert receiver.slot(1)[:8].tolist() == list(range(8))


def test_a_close_aborts_operations_that_never_end(cluster: Cluster, monkeypatch) -> None:
    monkeypatch.setattr(torch_dist, "_FAREWELL_S", 0.05)
    sender, _ = cluster.pair(gpu(0), gpu(1))
    with sender.turn():
        sender.start(1, 8)
    sender.close()
    assert next(group for group in cluster.groups if group.side is Side.SENDER).aborted


def test_a_group_is_let_go_although_its_end_fails() -> None:
    """`abort` raises after its own deadline. The group holds threads and sockets."""

    class Stuck:
        def send(self, *_: object) -> None: ...

    def end(*_: object) -> None:
        raise RuntimeError("abort timed out")

    group = Stuck()
    kept = weakref.ref(group)
    channel = GroupEnd("t", torch.empty(2, 8, dtype=torch.uint8), cast("Any", group), Side.SENDER, print, end)
    del group
    with suppress(RuntimeError):
        channel.close()
    channel.close()
    assert kept() is None


def test_channels_of_a_gpu_take_turns(cluster: Cluster) -> None:
    """The second channel starts when the operations of the first are done, not before."""
    source = gpu(0)
    (one, at_one), (two, _) = cluster.pair(source, gpu(1)), cluster.pair(source, gpu(2))
    with one.turn():
        one.start(1, 8)
    entered = threading.Event()

    def start() -> None:
        with two.turn():
            entered.set()
            two.start(1, 8)

    starting = cluster.pool.submit(start)
    eventually(lambda: bool(source._turns[Side.SENDER]._waiting))
    assert not entered.is_set()
    with at_one.turn():
        at_one.start(1, 8)
    starting.result(scaled(20))
    assert cluster.machine.worst == 1


def test_a_closed_channel_gives_its_turn_away(cluster: Cluster, monkeypatch) -> None:
    monkeypatch.setattr(torch_dist, "_FAREWELL_S", 0.0)
    source = gpu(0)
    (one, _), (two, _) = cluster.pair(source, gpu(1)), cluster.pair(source, gpu(2))
    with one.turn():
        one.start(1, 8)
    one.close()
    with two.turn():
        two.start(1, 8)
    assert cluster.machine.worst == 1


def test_a_turn_that_never_comes_breaks_the_channel(cluster: Cluster, monkeypatch) -> None:
    monkeypatch.setattr(torch_dist, "_FAREWELL_S", 0.0)
    source = gpu(0)
    one, _ = cluster.pair(source, gpu(1))
    two, _ = cluster.pair(source, gpu(2), deadline_s=scaled(0.2))
    with one.turn():
        one.start(1, 8)
    with pytest.raises(ChannelBroken, match="other channels of this GPU"), two.turn():
        raise AssertionError("the turn came")


class Wire:
    """A channel with the protocol of `Sender` and `ReceiveLoop`: announced frames and credits."""

    def __init__(self, ends: tuple[GroupEnd, GroupEnd], data: list[torch.Tensor]) -> None:
        (self.sender, self.receiver), self.data = ends, data
        self.credits, self.announced = threading.Semaphore(RING.slots), queue.SimpleQueue[tuple[int, int]]()

    def send(self) -> None:
        for number, part in enumerate(self.data, start=1):  # the first one is of `open`
            assert self.credits.acquire(timeout=scaled(60))
            self.sender.slot(number)[: len(part)].copy_(part)
            with self.sender.turn():
                self.announced.put((number, len(part)))
                self.sender.start(number, len(part))

    def receive(self) -> list[torch.Tensor]:
        posted, taken = deque[tuple[int, int]](), list[torch.Tensor]()
        while len(taken) < len(self.data):
            while not posted or not self.announced.empty():
                posted.append(self.announced.get(timeout=scaled(60)))
                with self.receiver.turn():
                    self.receiver.start(*posted[-1])
            number, nbytes = posted.popleft()
            self.receiver.finish(number)
            taken.append(self.receiver.slot(number)[:nbytes].clone())
            self.credits.release()
        return taken


@pytest.mark.slow
def test_channels_between_all_gpus_of_two_pools_do_not_block_each_other(cluster: Cluster, seed: int) -> None:
    """Without turns, launch queues wait for each other in a cycle: 0 to 2, 1 to 3, 0 to 3, 1 to 2."""
    workers = [gpu(index) for index in range(4)]
    ways = [(p, d) for p in (0, 1) for d in (2, 3)]
    ways += [(d, p) for p, d in ways]  # prefixes that are fetched back
    wires = [Wire(cluster.pair(workers[a], workers[b]), frames(seed + a * 4 + b, 30)) for a, b in ways]
    taking = [cluster.pool.submit(wire.receive) for wire in wires]
    sending = [cluster.pool.submit(wire.send) for wire in wires]
    for future, wire in zip(taking, wires, strict=True):
        assert all(map(torch.equal, future.result(scaled(60)), wire.data))
    assert [future.result() for future in sending] == [None] * len(wires)
    assert cluster.machine.worst == 1
