"""Transport over the receiver's gRPC service, for networks in which KV must be encrypted by the service's TLS.

    sender: slot -> chunks -> Data -> the server's event loop -> slot of an expected frame, in which the receiver waits
The receiver sends its address and a ticket over the Peer stream; the ticket identifies the channel when Data arrives. A
chunk waits until its frame is expected, and backpressure stops the network behind it: only the ring buffers.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress

import grpc
import torch
from torch import Tensor

from baton.errors import ChannelBroken
from baton.rpc.channel import sync_channel
from baton.rpc.v1 import peer_pb2 as pb
from baton.rpc.v1.peer_pb2_grpc import PeerStub
from kvtransfer.transports.base import ChannelName, KeyRelay, Ring, RingEnd, Side, local_ring, translate_errors

CHUNK_BYTES = 1 << 20
_TICKET_S = 10.0  # seconds for the first chunk to arrive
_WHERE, _JOINED = "grpc", "grpc-joined"


class GrpcTransport:
    """The transport object of a worker. `address` is its Peer service, which only a receiver needs; its `Data` must
    call `take`. `connect` opens a gRPC channel to an address, with the cluster's credentials.
    """

    name = "grpc"
    one_sided, sends = False, True
    reach = ""
    device = torch.device("cpu")

    def __init__(self, address: str = "", connect: Callable[[str], grpc.Channel] = sync_channel) -> None:
        self._address = address
        self._connect = connect
        self._expected: dict[str, GrpcReceiver] = {}  # by ticket

    def open(self, name: ChannelName, side: Side, keys: KeyRelay, ring: Ring, deadline_s: float) -> RingEnd:
        build = self._receiver if side is Side.RECEIVER else self._sender
        title, staging = f"grpc channel {name}", local_ring(ring, self.device)
        return translate_errors(f"{title}: not built", lambda: build(title, staging, keys, deadline_s))

    async def take(self, requests: AsyncIterator[pb.DataChunk]) -> None:
        """Serve one Data call in the server's event loop until it ends. Raises ChannelBroken."""
        try:
            async with asyncio.timeout(_TICKET_S):
                first = await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            raise ChannelBroken("no ticket was sent") from None
        end = self._expected.pop(first.ticket, None)
        if end is None:
            raise ChannelBroken("no channel here waits for this ticket")
        await end.feed(requests)

    def _receiver(self, title: str, staging: Tensor, keys: KeyRelay, deadline_s: float) -> RingEnd:
        end, ticket = GrpcReceiver(title, staging, deadline_s), secrets.token_hex(16)
        self._expected[ticket] = end
        try:
            keys.send(_WHERE, f"{ticket} {self._address}".encode())
            end.wait_joined()
        finally:
            self._expected.pop(ticket, None)
        keys.send(_JOINED, b"")
        return end

    def _sender(self, title: str, staging: Tensor, keys: KeyRelay, deadline_s: float) -> RingEnd:
        ticket, _, address = keys.expect(_WHERE, deadline_s).decode(errors="replace").partition(" ")
        end = GrpcSender(title, staging, self._connect(address), ticket, deadline_s)
        try:
            keys.expect(_JOINED, deadline_s)
        except OSError as error:
            end.close()
            raise ConnectionError(f"{error}; {end.over}") from None
        return end


class _Shared(RingEnd):
    """An end with frames that another thread counts. `over` is the reason why none can pass, or empty."""

    def __init__(self, title: str, staging: Tensor, deadline_s: float) -> None:
        super().__init__(title, staging)
        self.over = ""
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._passed = 0  # frames that were sent or received
        self._bytes = staging.numpy().data.cast("B")
        self._size = staging.shape[1]

    def _finish(self, number: int) -> None:
        self._wait(lambda: self._passed > number)

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self.over) or ready(), self._deadline_s):
                raise TimeoutError(f"no progress within {self._deadline_s} s")
            if not ready():
                raise ConnectionError(self.over)

    def _check(self) -> None:
        if self.over:
            raise ConnectionError(self.over)

    def _end(self, why: str) -> None:
        with self._changed:
            self.over = self.over or why
            self._changed.notify_all()

    def _pass(self) -> None:
        with self._changed:
            self._passed += 1
            self._changed.notify_all()

    def _piece(self, number: int, begin: int, end: int) -> memoryview:
        offset = number * self._size % len(self._bytes)
        return self._bytes[offset + begin : offset + end]


class GrpcSender(_Shared):
    """The sending end. gRPC's thread reads its bytes, and a slow receiver blocks that thread."""

    def __init__(self, title: str, staging: Tensor, channel: grpc.Channel, ticket: str, deadline_s: float) -> None:
        super().__init__(title, staging, deadline_s)
        self._frames: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._channel = channel
        self._call = PeerStub(channel).Data.future(self._chunks(ticket))
        self._call.add_done_callback(self._ended)

    def _start(self, number: int, nbytes: int) -> None:
        self._check()
        self._frames.put((number, nbytes))

    def _release(self) -> None:
        self._end("closed")
        self._frames.put(None)  # ends gRPC's writer thread
        self._call.cancel()
        self._channel.close()

    def _ended(self, call: grpc.Future[pb.DataEnd]) -> None:
        status = f"{call.code()}: {call.details()}" if isinstance(call, grpc.Call) else ""
        self._end(f"the stream ended: {status}")

    def _chunks(self, ticket: str) -> Iterator[pb.DataChunk]:
        yield pb.DataChunk(ticket=ticket)
        while (frame := self._frames.get()) is not None:
            number, nbytes = frame
            for begin in range(0, nbytes, CHUNK_BYTES):
                yield pb.DataChunk(data=bytes(self._piece(number, begin, min(begin + CHUNK_BYTES, nbytes))))
            self._pass()


class GrpcReceiver(_Shared):
    """The receiving end. `feed` fills its slots in the server's event loop."""

    def __init__(self, title: str, staging: Tensor, deadline_s: float) -> None:
        super().__init__(title, staging, deadline_s)
        self._expected: deque[tuple[int, int]] = deque()  # (number, bytes) of started, incomplete frames
        self._at = 0  # received bytes of the first of them
        self._loop: asyncio.AbstractEventLoop | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._room = asyncio.Event()

    def wait_joined(self) -> None:
        """Wait for the sender's stream. Raises OSError."""
        try:
            self._wait(lambda: self._feeding is not None)
        except OSError:
            self.close()
            raise

    async def feed(self, requests: AsyncIterator[pb.DataChunk]) -> None:
        """Copy chunks into their slots until they end or this end is closed. Raises ChannelBroken."""
        feeding, why = asyncio.create_task(self._fill(requests)), "the stream of the peer was cut"
        with self._changed:
            self._loop, self._feeding = asyncio.get_running_loop(), feeding
            self._changed.notify_all()
        if self.over:  # closed before
            feeding.cancel()
        try:
            await asyncio.wait({feeding})
            error = None if feeding.cancelled() else feeding.exception()
            why = "closed by the peer" if error is None else str(error)
        finally:
            feeding.cancel()
            self._end(why)
        if feeding.cancelled() or error is not None:
            raise ChannelBroken(f"{self._title}: {self.over}")

    async def _fill(self, requests: AsyncIterator[pb.DataChunk]) -> None:
        async for chunk in requests:
            while not self._land(chunk.data):
                await self._room.wait()
                self._room.clear()

    def _land(self, data: bytes) -> bool:
        """Copy a chunk, or return False if no frame is expected yet. Raises ConnectionError if it does not fit."""
        with self._changed:
            self._check()
            if not self._expected:
                return False
            number, nbytes = self._expected[0]
            end = self._at + len(data)
            if not 0 < len(data) <= min(CHUNK_BYTES, nbytes - self._at):
                raise ConnectionError(f"frame {number} of {nbytes} bytes: {len(data)} arrived after {self._at}")
            self._piece(number, self._at, end)[:] = data
            self._at = end % nbytes
            if end == nbytes:
                self._expected.popleft()
                self._pass()
        return True

    def _start(self, number: int, nbytes: int) -> None:
        with self._changed:
            self._check()
            self._expected.append((number, nbytes))
        self._in_loop(self._room.set)

    def _release(self) -> None:
        self._end("closed")
        if self._feeding is not None:
            self._in_loop(self._feeding.cancel)

    def _in_loop(self, call: Callable[[], object]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and the stream with it
                self._loop.call_soon_threadsafe(call)
