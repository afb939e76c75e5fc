"""Both ends of a channel in one process, over any transport, and frames sent through them with credits."""

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from baton.core import Incarnation
from baton.errors import ChannelBroken
from kvtransfer.receiver import PeerService
from kvtransfer.transports.base import ChannelEnd, ChannelName, Choice, KeyRelay, Ring, Side, Transport
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.torch_dist import GlooTransport
from tests.support.time_factor import scaled
from tests.support.transports import MemoryTransport, served
from tests.support.waiting import eventually
from tests.unit.kvtransfer.support import FINGERPRINT, SETTINGS, D, LoopbackPeer, RecordingTable, make_kv

NAME = ChannelName(Incarnation(7, 1), Incarnation(7, 2), 1)
RING = Ring(slots=4, size=1 << 16)
CPU = torch.device("cpu")
PATIENT_S = 600.0  # a deadline longer than any test


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def held() -> tuple[int, int]:
    """Return the numbers of descriptors and Python threads of this process."""
    return len(descriptors()), threading.active_count()


def breaks(call: Callable[[], object]) -> bool:
    try:
        call()
    except ChannelBroken:
        return True
    return False


def broken(end: ChannelEnd, first: int = 0) -> None:
    """Wait until no frame from `first` on can be started."""
    numbers = itertools.count(first)
    eventually(lambda: breaks(lambda: end.start(next(numbers), 8)))


def mute() -> KeyRelay:
    """Return a relay without a peer."""
    return KeyRelay(lambda key, value: None)


def relayed() -> tuple[KeyRelay, KeyRelay]:
    """Return the relays by side. Each receives the other's keys."""
    receiver = KeyRelay(lambda key, value: sender.deliver(key, value))  # noqa: PLW0108  # there is no sender yet
    sender = KeyRelay(receiver.deliver)
    return sender, receiver


@contextmanager
def two(kind: str) -> Iterator[tuple[Transport, Transport]]:
    """Yield a transport for the sender and one for the receiver."""
    if kind == "grpc":
        grpc, kv = GrpcTransport(), make_kv(None)
        peer = LoopbackPeer(lambda: PeerService(kv, D, FINGERPRINT, SETTINGS, RecordingTable(), Choice([]), data=grpc))
        with served(peer) as grpc._address:
            yield GrpcTransport(), grpc
        peer.close()
    elif kind == "memory":
        yield (both := MemoryTransport()), both
    else:
        yield GlooTransport("127.0.0.1"), GlooTransport("127.0.0.1")


@dataclass
class Pairs:
    """Opens channels, each end on a thread. `sides`: transports by side."""

    sides: tuple[Transport, Transport]
    pool: ThreadPoolExecutor
    opened: list[ChannelEnd] = field(default_factory=list)

    def __call__(self, deadline_s: float = 5.0, ring: Ring = RING) -> tuple[ChannelEnd, ChannelEnd]:
        relays = relayed()
        sender, receiver = (self.alone(side, relays[side], deadline_s, ring) for side in Side)
        self.opened += [sender.result(scaled(10)), receiver.result(scaled(10))]
        return sender.result(), receiver.result()

    def open(self, side: Side, keys: KeyRelay, deadline_s: float = 5.0, ring: Ring = RING) -> ChannelEnd:
        return self.sides[side].open(NAME, side, keys, ring, deadline_s)

    def alone(self, *args: Any) -> Future[ChannelEnd]:
        """Open one end on a thread. The test plays the other."""
        return self.pool.submit(self.open, *args)

    def carry(self, ends: tuple[ChannelEnd, ChannelEnd], data: list[torch.Tensor], ahead: int, ring: Ring = RING):
        """Send frames and return the received ones. `ahead`: number started before the first is finished."""
        credits = threading.Semaphore(ring.slots)
        sending = self.pool.submit(send, ends[0], credits, data, ring.slots)
        taken = receive(ends[1], credits, list(map(len, data)), ahead)
        sending.result(scaled(10))
        return taken

    def close(self) -> None:
        for end in self.opened:
            end.close()


def frames(seed: int, count: int, ring: Ring = RING) -> list[torch.Tensor]:
    """Return random bytes of random lengths: first a whole slot, then one byte."""
    draw = random.Random(seed)
    sizes = [ring.size, 1] + [draw.randint(1, ring.size) for _ in range(count - 2)]
    return [torch.frombuffer(bytearray(draw.randbytes(size)), dtype=torch.uint8) for size in sizes]


def send(end: ChannelEnd, credits: threading.Semaphore, data: list[torch.Tensor], slots: int) -> None:
    for number, part in enumerate(data):
        assert credits.acquire(timeout=scaled(10))
        end.slot(number)[: len(part)].copy_(part)
        with end.turn():
            end.start(number, len(part))
        if number >= slots:
            end.finish(number - slots)


def receive(end: ChannelEnd, credits: threading.Semaphore, sizes: list[int], ahead: int) -> list[torch.Tensor]:
    started, taken = 0, list[torch.Tensor]()
    for number, nbytes in enumerate(sizes):
        while started < min(number + ahead, len(sizes)):
            with end.turn():
                end.start(started, sizes[started])
            started += 1
        end.finish(number)
        taken.append(end.slot(number)[:nbytes].clone())
        end.slot(number).zero_()  # so that late or repeated data is detected
        credits.release()
    return taken
