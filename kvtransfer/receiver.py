"""The receiving side of KV transfer: `PeerService` admits channels, and one `Session` serves each of them.

    stream --(event loop)--> offers, aborts --items--> thread (receive_loop.py): frames, commits
           <--(event loop)-- replies <----------------'

Messages are checked in the event loop; a thread per channel takes the bytes. Announcements, credits and commits use the
channel's control socket if it has one; a commit or an abort states after how many frames it comes. A session ends with
its stream, a newer channel of the same sender, or any error. The table then gets `lost` once: after the session was
stopped, and before a newer channel of that sender is welcomed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import takewhile
from typing import TypeVar

import grpc
import structlog
from grpc import StatusCode as GrpcCode

from baton.core import LEFT_OUT, PROTOCOL_VERSION, HandoffId, WorkerRef
from baton.engine.kv_cache import KVCache
from baton.errors import BatonError, ChannelBroken, HandoffError, StaleAttempt
from baton.rpc import convert
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import peer_pb2 as pb
from baton.rpc.v1.peer_pb2_grpc import PeerServicer
from kvtransfer.handoff import HandoffTable, TransferSettings
from kvtransfer.receive_loop import EndOfHandoff, ReceiveLoop, inbound_of
from kvtransfer.transports.base import ChannelName, Choice, Endpoint, KeyRelay, Side, Transport
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.wire import FingerprintRefused, FrameRefused, VersionRefused, refusal_to_pb

A = TypeVar("A")
log = structlog.get_logger()


class Session:
    """One channel at the receiver. It is created in the event loop of its stream and runs from then on."""

    def __init__(
        self, end: Endpoint, table: HandoffTable, hello: pb.PeerHello, sender: WorkerRef, transport: Transport
    ) -> None:
        self.sender = sender
        self.generation = hello.generation
        self._end = end
        self._table = table
        self._transport = transport
        self._ring = end.ring_of(transport)
        self._name = ChannelName(sender.incarnation, end.me.incarnation, hello.generation)
        self._loop = asyncio.get_running_loop()
        self._replies: asyncio.Queue[pb.PeerReply | None] = asyncio.Queue()
        welcome = pb.PeerWelcome(credits=self._ring.slots, frame_size=self._ring.size, transport=transport.name)
        welcome.left_out.extend(_refused(end, hello, transport))
        self._replies.put_nowait(pb.PeerReply(welcome=welcome))
        self._keys = KeyRelay(lambda key, value: self._reply(pb.PeerReply(store_key=pb.StoreKey(key=key, value=value))))
        self._receive_loop = ReceiveLoop(end, table, sender, transport, self._reply)
        self._thread = threading.Thread(target=self._run, name=f"kv-recv-{self._name}", daemon=True)
        self._thread.start()

    # In the event loop

    async def read(self, commands: AsyncIterator[pb.PeerCommand]) -> None:
        try:
            async for command in commands:
                self._take(command)
        except BatonError as error:
            self.end(error)
        except Exception as error:  # task boundary: the session must not outlive its reader
            log.exception("channel_failed", worker=self.sender, channel=str(self._name))
            self.end(ChannelBroken(f"{type(error).__name__} at the receiver"))
        finally:
            self.end(None)

    async def write(self, context: grpc.aio.ServicerContext[pb.PeerCommand, pb.PeerReply]) -> None:
        while (reply := await self._replies.get()) is not None:
            await context.write(reply)

    def end(self, error: BatonError | None) -> None:
        """End the session once; later calls do nothing. An `error` is sent to the sender. From now on no block is
        written and no commit is made, except for a write that the table has already admitted.
        """
        if self._receive_loop.over:
            return
        self._receive_loop.stop()
        self._table.lost(self.sender)
        if error is not None:
            log.info("channel_closed", worker=self.sender, channel=str(self._name), reason=str(error))
            self._reply(refusal_to_pb(error))
        self._in_loop(self._replies.put_nowait, None)  # behind replies of the thread that wait in the loop

    def _take(self, command: pb.PeerCommand) -> None:
        if self._receive_loop.over:
            return
        match command.WhichOneof("command"):
            case "store_key":
                self._keys.deliver(command.store_key.key, command.store_key.value)
            case "offer":
                self._offered(command.offer)
            case "frame":
                self._take_frames([command.frame, *command.more])
            case "state":
                self._receive_loop.take_state(command.state)
            case "commit":
                self._receive_loop.claim(command)
            case "fetch":
                self._fetch(command.fetch)
            case "abort":
                self._aborted(convert.handoff_from_pb(command.abort.handoff), command.after)
            case other:
                raise FrameRefused(f"unexpected message: {other}")

    def _offered(self, message: pb.Offer) -> None:
        handoff = convert.handoff_from_pb(message.handoff)
        try:
            if handoff in self._receive_loop.inbound:
                raise StaleAttempt(f"handoff {handoff} was offered before")
            offer, inbound = inbound_of(self._end, handoff, message)
            self._table.offer(handoff, self.sender, offer)
        except HandoffError as error:
            self._replies.put_nowait(refusal_to_pb(error, handoff))
        else:
            self._receive_loop.open[handoff] = self._receive_loop.inbound[handoff] = inbound
            self._replies.put_nowait(pb.PeerReply(offer_accepted=pb.OfferAccepted(handoff=message.handoff)))

    def _fetch(self, message: pb.Fetch) -> None:
        handoff = convert.handoff_from_pb(message.handoff)
        try:
            self._table.fetch(handoff, self.sender, message.begin, message.end, verify=message.verify_kv)
        except HandoffError as error:
            refused = pb.FetchRefused(handoff=message.handoff, detail=str(error))
            self._replies.put_nowait(pb.PeerReply(fetch_refused=refused))

    def _take_frames(self, frames: Sequence[pb.FrameAnnounce]) -> None:
        if self._receive_loop.queue.control_socket is not None:
            raise FrameRefused(f"frame {frames[0].sequence}: announced over the stream instead of the control socket")
        for frame in frames:
            self._receive_loop.queue.put(self._receive_loop.checked(frame, self._receive_loop.open))

    def _aborted(self, handoff: HandoffId, after: int) -> None:
        self._table.aborted(handoff, self.sender)
        if (inbound := self._receive_loop.open.pop(handoff, None)) is not None:
            inbound.dropped = True
            self._receive_loop.queue.put(EndOfHandoff(inbound, None, after))

    # From any thread

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """Whether no handoff is under way. One is, until its commit was answered or its sender has given it up."""
        loop = self._receive_loop
        undecided = loop.open or not all(each.dropped for each in list(loop.inbound.values()))
        return not undecided and loop.received == loop.announced

    def join(self) -> None:
        """Wait for the thread, at most for the deadline of the frame on the wire."""
        self._thread.join()

    def _reply(self, reply: pb.PeerReply) -> None:
        self._in_loop(self._replies.put_nowait, reply)

    def _in_loop(self, call: Callable[[A], None], argument: A) -> None:
        with suppress(RuntimeError):  # the event loop is closed, so the stream is too
            self._loop.call_soon_threadsafe(call, argument)

    # In the thread

    def _run(self) -> None:
        deadline_s = self._end.settings.frame_deadline_s
        try:
            opened = self._transport.open(self._name, Side.RECEIVER, self._keys, self._ring, deadline_s)
            with closing(opened) as channel:
                self._receive_loop.serve(channel)
        except BatonError as error:
            self._in_loop(self.end, error)
        except Exception as error:  # thread boundary: the sender must receive an error
            log.exception("channel_failed", worker=self.sender, channel=str(self._name))
            self._in_loop(self.end, ChannelBroken(f"channel {self._name}: {type(error).__name__} at the receiver"))


class PeerService(PeerServicer):
    """The Peer service for a worker's `grpc.aio` server; `await close()` after the server stopped. `data` takes the
    bytes of channels over gRPC.
    """

    def __init__(
        self,
        kv: KVCache,
        me: WorkerRef,
        fingerprint: str,
        settings: TransferSettings,
        table: HandoffTable,
        transports: Choice,
        data: GrpcTransport | None = None,
    ) -> None:
        self._end = Endpoint(kv, me, fingerprint, settings, transports)
        self._table = table
        self._data = data
        self._sessions: list[Session] = []  # in order: sessions with a live thread, and the last one of each worker

    async def Connect(  # type: ignore[override]  # grpc.aio allows a coroutine that writes; the stub has only iterators
        self,
        request_iterator: AsyncIterator[pb.PeerCommand],
        context: grpc.aio.ServicerContext[pb.PeerCommand, pb.PeerReply],
    ) -> None:
        """Serve one channel, from hello to its end."""
        try:
            session = await self._admit(request_iterator)
        except BatonError as error:
            log.info("channel_refused", reason=str(error))
            await context.write(refusal_to_pb(error))
            return
        reading = asyncio.create_task(session.read(request_iterator))
        try:
            await session.write(context)
        finally:
            reading.cancel()
            session.end(None)

    async def Data(
        self, request_iterator: AsyncIterator[pb.DataChunk], context: grpc.aio.ServicerContext[pb.DataChunk, pb.DataEnd]
    ) -> pb.DataEnd:
        try:
            if self._data is None:
                raise ChannelBroken("no channel here receives bytes over gRPC")
            await self._data.take(request_iterator)
        except BatonError as error:
            await context.abort(GrpcCode.FAILED_PRECONDITION, str(error))
        return pb.DataEnd()

    async def close(self) -> None:
        """End all sessions and wait for their threads, at most for the deadline of the frames on the wire."""
        for session in self._sessions:
            session.end(ChannelBroken("the receiver is shutting down"))
        for session in self._sessions:
            await asyncio.to_thread(session.join)

    async def _admit(self, commands: AsyncIterator[pb.PeerCommand]) -> Session:
        try:
            async with asyncio.timeout(self._end.settings.frame_deadline_s):
                hello = (await anext(commands)).hello
        except (TimeoutError, StopAsyncIteration):
            raise FrameRefused("no hello") from None
        sender, transport = _check_hello(self._end, hello)
        older = [session for session in self._sessions if session.sender == sender]
        if older and hello.generation <= older[-1].generation:
            raise StaleAttempt(f"generation {hello.generation} of {sender} is over")
        for session in older:
            session.end(ChannelBroken("a newer channel took over"))
        self._sessions = [s for s in self._sessions if s.running or s.sender.worker_id != sender.worker_id]
        self._make_room()
        self._sessions.append(Session(self._end, self._table, hello, sender, transport))
        return self._sessions[-1]

    def _make_room(self) -> None:
        """Free staging memory for one more channel, if necessary by closing the idle channel that was opened first."""
        running = [session for session in self._sessions if session.running]
        if len(running) < self._end.max_channels:
            return
        idle = next((session for session in running if session.idle), None)
        if idle is None:
            raise ChannelBroken(f"staging memory is used up by {len(running)} channels, and all of them are busy")
        idle.end(ChannelBroken("closed because it was idle and staging memory is used up"))


def _check_hello(end: Endpoint, hello: pb.PeerHello) -> tuple[WorkerRef, Transport]:
    """Return sender and transport of a compatible hello. Raises HandoffError or InvalidRequest for any other."""
    if hello.protocol_version != PROTOCOL_VERSION:
        raise VersionRefused(f"protocol version {hello.protocol_version} is not supported, only {PROTOCOL_VERSION}")
    sender, wanted = convert.ref_from_pb(hello.sender, "sender"), convert.ref_from_pb(hello.receiver, "receiver")
    if (wanted.worker_id, wanted.incarnation) != (end.me.worker_id, end.me.incarnation):
        raise StaleAttempt(f"this is {end.me}, not {wanted}")
    if hello.fingerprint != end.fingerprint:
        raise FingerprintRefused(f"model fingerprint {hello.fingerprint!r} differs from {end.fingerprint!r} here")
    layout = convert.layout_from_pb(hello.layout)
    if replace(layout, block_size=end.kv.layout.block_size) != end.kv.layout:
        raise FingerprintRefused(f"KV layout {layout} differs from {end.kv.layout} here")
    return sender, _agreed(end, hello)


def _agreed(end: Endpoint, hello: pb.PeerHello) -> Transport:
    """Return the sender's best transport that also works here. Raises VersionRefused if there is none."""
    for offer in hello.transports:
        transport = end.transport(offer.name)
        if transport is not None and transport.reach == offer.reach:
            return transport
    theirs = ", ".join(offer.name for offer in hello.transports)
    ours = ", ".join(transport.name for transport in end.choice.transports)
    raise VersionRefused(f"transports {theirs} are offered, {ours} are here: none works between these two hosts")


def _refused(end: Endpoint, hello: pb.PeerHello, taken: Transport) -> Iterator[common.LeftOut]:
    """Yield the sender's offers before `taken`, with the reasons."""
    here = {one.transport: one.detail or LEFT_OUT[one.reason] for one in end.choice.left_out}
    for offer in takewhile(lambda offer: offer.name != taken.name, hello.transports):
        reason = "peer" if end.transport(offer.name) is None else "reach"
        yield common.LeftOut(transport=offer.name, reason=reason, detail=here.get(offer.name, ""))
