"""Two ends of a channel in one process, whatever the transport, and frames sent through them with credits."""

import asyncio
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import torch

from baton.core import Incarnation
from baton.errors import ChannelBroken
from baton.rpc.channel import aio_server, bind
from baton.rpc.v1 import peer_pb2 as pb
from baton.rpc.v1.peer_pb2_grpc import PeerServicer, add_PeerServicer_to_server
from kvtransfer.transport import ChannelEnd, ChannelName, KeyRelay, Ring, Side, Transport
from kvtransfer.transports.gloo import GlooTransport
from kvtransfer.transports.grpc_bytes import GrpcTransport
from kvtransfer.transports.memory import MemoryTransport
from kvtransfer.transports.shm import ShmTransport
from tests.support.time_factor import scaled

NAME = ChannelName(Incarnation(7, 1), Incarnation(7, 2), 1)
RING = Ring(slots=4, size=1 << 16)
CPU = torch.device("cpu")


def settled(ready: Callable[[], bool], timeout: float = 5.0) -> bool:
    """Poll for what has no event to wait for, e.g. the descriptors of the process."""
    end = time.monotonic() + scaled(timeout)
    while not ready() and time.monotonic() < end:
        time.sleep(0.01)
    return ready()


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def held() -> tuple[int, int]:
    """Descriptors and Python threads of this process."""
    return len(descriptors()), threading.active_count()


def given_back(before: tuple[int, int]) -> bool:
    """Whether there are, soon, no more of either than `before`."""
    return settled(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


def breaks(call: Callable[[], object]) -> bool:
    try:
        call()
    except ChannelBroken:
        return True
    return False


def relayed() -> tuple[KeyRelay, KeyRelay]:
    """By side; what one sends, the other receives."""
    receiver = KeyRelay(lambda key, value: sender.deliver(key, value))  # noqa: PLW0108  # there is no sender yet
    sender = KeyRelay(receiver.deliver)
    return sender, receiver


class DataHost(PeerServicer):
    """A gRPC server on a free port, in a thread of its own, which serves Data and nothing else."""

    def __init__(self) -> None:
        self.transport = GrpcTransport()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._run(self._serve())

    async def Connect(self, request_iterator, context):  # type: ignore[override]  # not part of these tests
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "only Data")

    async def Data(self, request_iterator, context) -> pb.DataEnd:
        try:
            await self.transport.take(request_iterator)
        except ChannelBroken as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        return pb.DataEnd()

    def close(self) -> None:
        self._run(self._server.stop(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(scaled(20))

    async def _serve(self) -> None:
        self._server = aio_server()
        add_PeerServicer_to_server(self, self._server)
        self.address = bind(self._server, "127.0.0.1:0")
        self.transport = GrpcTransport(self.address)
        await self._server.start()


@contextmanager
def two(kind: str) -> Iterator[tuple[Transport, Transport]]:
    """A transport for the sender and one for the receiver."""
    if kind == "grpc":
        host = DataHost()
        try:
            yield GrpcTransport(), host.transport
        finally:
            host.close()
    elif kind == "memory":
        yield (both := MemoryTransport()), both
    elif kind == "gloo":
        yield GlooTransport("127.0.0.1"), GlooTransport("127.0.0.1")
    else:
        yield ShmTransport(), ShmTransport()


@dataclass
class Pairs:
    """Opens channels; each side in a thread. `sides`: transports by side."""

    sides: tuple[Transport, Transport]
    pool: ThreadPoolExecutor
    opened: list[ChannelEnd] = field(default_factory=list)

    def __call__(self, deadline_s: float = 5.0, ring: Ring = RING) -> tuple[ChannelEnd, ChannelEnd]:
        sender, receiver = (opening.result(scaled(10)) for opening in self.opening(deadline_s, ring))
        return sender, receiver

    def opening(self, deadline_s: float, ring: Ring = RING) -> list[Future[ChannelEnd]]:
        relays = relayed()
        return [self.pool.submit(self._open, side, relays[side], ring, deadline_s) for side in Side]

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
    """`ahead`: how many frames are started before the first of them is finished."""
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
