"""Two ends of a channel in one process, whatever the transport, and frames sent through them with credits."""

from __future__ import annotations

import itertools
import queue
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from baton.core import Incarnation
from baton.errors import ChannelBroken
from kvtransfer.receiver import PeerService
from kvtransfer.transport import ChannelEnd, ChannelName, KeyRelay, Ring, Side, Transport
from kvtransfer.transports.cuda_ipc import CudaIpcTransport
from kvtransfer.transports.gloo import GlooTransport
from kvtransfer.transports.grpc_bytes import GrpcTransport
from kvtransfer.transports.memory import MemoryTransport
from kvtransfer.transports.shm import ShmTransport
from tests.support.time_factor import scaled
from tests.support.transports import MainMemory, served
from tests.support.waiting import eventually
from tests.unit.kvtransfer.support import FINGERPRINT, SETTINGS, D, LoopbackPeer, RecordingTable, make_kv

NAME = ChannelName(Incarnation(7, 1), Incarnation(7, 2), 1)
RING = Ring(slots=4, size=1 << 16)
CPU = torch.device("cpu")
PATIENT_S = 600.0  # a deadline that no test waits for


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def held() -> tuple[int, int]:
    """Descriptors and Python threads of this process."""
    return len(descriptors()), threading.active_count()


def given_back(before: tuple[int, int]) -> None:
    """Wait until there are no more of either than `before`."""
    eventually(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


def breaks(call: Callable[[], object]) -> bool:
    try:
        call()
    except ChannelBroken:
        return True
    return False


def broken(end: ChannelEnd, first: int = 0) -> None:
    """Wait until no frame from `first` on can be started any more."""
    numbers = itertools.count(first)
    eventually(lambda: breaks(lambda: end.start(next(numbers), 8)))


def mute() -> KeyRelay:
    """The other side has no end."""
    return KeyRelay(lambda key, value: None)


def relayed() -> tuple[KeyRelay, KeyRelay]:
    """By side; what one sends, the other receives."""
    receiver = KeyRelay(lambda key, value: sender.deliver(key, value))  # noqa: PLW0108  # there is no sender yet
    sender = KeyRelay(receiver.deliver)
    return sender, receiver


@contextmanager
def two(kind: str) -> Iterator[tuple[Transport, Transport]]:
    """A transport for the sender and one for the receiver."""
    if kind == "grpc":
        grpc, kv = GrpcTransport(), make_kv(None)
        peer = LoopbackPeer(lambda: PeerService(kv, D, FINGERPRINT, SETTINGS, RecordingTable(), [], data=grpc))
        with served(peer) as grpc._address:
            yield GrpcTransport(), grpc
        peer.close()
    elif kind == "memory":
        yield (both := MemoryTransport()), both
    elif kind == "gloo":
        yield GlooTransport("127.0.0.1"), GlooTransport("127.0.0.1")
    elif kind == "cuda_ipc":
        gpu = MainMemory()
        yield CudaIpcTransport(CPU, gpu), CudaIpcTransport(CPU, gpu)
    else:
        yield ShmTransport(), ShmTransport()


@dataclass
class Pairs:
    """Opens channels; each side in a thread. `sides`: transports by side."""

    sides: tuple[Transport, Transport]
    pool: ThreadPoolExecutor
    opened: list[ChannelEnd] = field(default_factory=list)

    def __call__(self, deadline_s: float = 5.0, ring: Ring = RING) -> tuple[ChannelEnd, ChannelEnd]:
        relays = relayed()
        opening = [self.pool.submit(self._open, side, relays[side], ring, deadline_s) for side in Side]
        sender, receiver = (end.result(scaled(10)) for end in opening)
        return sender, receiver

    def alone(self, side: Side, keys: KeyRelay, deadline_s: float = 5.0) -> Future[ChannelEnd]:
        """An end whose other one is the test's."""
        return self.pool.submit(self.sides[side].open, NAME, side, keys, RING, deadline_s)

    def carry(self, ends: tuple[ChannelEnd, ChannelEnd], data: list[torch.Tensor], ahead: int, ring: Ring = RING):
        """Send these frames; what came. `ahead`: how many are started before the first of them is finished."""
        control = Control(ring.slots)
        sending = self.pool.submit(send, ends[0], control, data, ring.slots)
        taken = receive(ends[1], control, len(data), ahead)
        sending.result(scaled(10))
        return taken

    def close(self) -> None:
        for end in self.opened:
            end.close()

    def _open(self, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> ChannelEnd:
        end = self.sides[side].open(NAME, side, keys, ring, deadline_s)
        self.opened.append(end)
        return end


def frames(seed: int, count: int, ring: Ring = RING) -> list[torch.Tensor]:
    """Random bytes of random lengths, the first of a whole slot, the second of one byte."""
    draw = random.Random(seed)
    sizes = [ring.size, 1] + [draw.randint(1, ring.size) for _ in range(count - 2)]
    return [torch.frombuffer(bytearray(draw.randbytes(size)), dtype=torch.uint8) for size in sizes]


class Control:
    """What the Peer stream carries: announcements one way, credits the other."""

    def __init__(self, slots: int) -> None:
        self.announced: queue.Queue[tuple[int, int]] = queue.Queue()
        self.credits = threading.Semaphore(slots)


def send(end: ChannelEnd, control: Control, data: list[torch.Tensor], slots: int) -> None:
    for number, part in enumerate(data):
        assert control.credits.acquire(timeout=scaled(10))
        end.slot(number)[: len(part)].copy_(part)
        control.announced.put((number, len(part)))
        end.start(number, len(part))
        if number >= slots:
            end.finish(number - slots)


def receive(end: ChannelEnd, control: Control, count: int, ahead: int) -> list[torch.Tensor]:
    started, taken = list[tuple[int, int]](), list[torch.Tensor]()
    while len(taken) < count:
        while len(started) < ahead and len(started) + len(taken) < count:
            started.append(control.announced.get(timeout=scaled(10)))
            end.start(*started[-1])
        number, nbytes = started.pop(0)
        end.finish(number)
        taken.append(end.slot(number)[:nbytes].clone())
        end.slot(number).zero_()  # what comes late, or is sent twice, is seen
        control.credits.release()
    return taken
