"""The decode worker's end: the Peer service. It admits a channel and gives it to a session.

The end of the stream, a newer channel of the same sender, or any error ends the session: the table hears `lost` once,
after the session was told to stop and before a newer channel of that sender is welcomed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import structlog
from grpc import StatusCode as GrpcCode

from baton.core import PROTOCOL_VERSION, WorkerRef
from baton.errors import BatonError, ChannelBroken, StaleAttempt
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from baton.rpc.v1.peer_pb2_grpc import PeerServicer
from kvtransfer.handoff import HandoffTable, TransferSettings
from kvtransfer.messages import FingerprintRefused, FrameRefused, VersionRefused, refusal_to_pb
from kvtransfer.session import Session
from kvtransfer.transport import Endpoint, Transport

if TYPE_CHECKING:
    import grpc

    from baton.engine.kv import KVCache

log = structlog.get_logger()


class TakesData(Protocol):
    """The part of a gRPC transport that serves the other end's bytes."""

    async def take(self, requests: AsyncIterator[pb.DataChunk]) -> None:
        """The chunks of one channel until they end. Raises ChannelBroken."""


class PeerService(PeerServicer):
    """Add it to the worker's `grpc.aio` server; `await close()` after the server stopped.

    `transports`: what may be used. `data`: takes the bytes of channels whose transport is grpc.
    """

    def __init__(
        self,
        kv: KVCache,
        me: WorkerRef,
        fingerprint: str,
        settings: TransferSettings,
        table: HandoffTable,
        transports: Sequence[Transport],
        data: TakesData | None = None,
    ) -> None:
        self._end = Endpoint(kv, me, fingerprint, settings, tuple(transports))
        self._table = table
        self._data = data
        self._sessions: list[Session] = []  # in order: all whose thread may run, and the last one of each worker

    async def Connect(  # type: ignore[override]  # a coroutine that writes, as grpc.aio allows; the stub knows iterators
        self,
        request_iterator: AsyncIterator[pb.PeerCommand],
        context: grpc.aio.ServicerContext[pb.PeerCommand, pb.PeerReply],
    ) -> None:
        """One channel, from hello to its end."""
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
        self,
        request_iterator: AsyncIterator[pb.DataChunk],
        context: grpc.aio.ServicerContext[pb.DataChunk, pb.DataEnd],
    ) -> pb.DataEnd:
        """The bytes of one channel."""
        try:
            if self._data is None:
                raise ChannelBroken("no channel here takes its bytes over gRPC")
            await self._data.take(request_iterator)
        except BatonError as error:
            await context.abort(GrpcCode.FAILED_PRECONDITION, str(error))
        return pb.DataEnd()

    async def close(self) -> None:
        """End all sessions and wait for their threads: at most the deadline of what is on the wire."""
        for session in self._sessions:
            session.end(ChannelBroken("the receiver is shutting down"))
        await asyncio.to_thread(_join, self._sessions)

    async def _admit(self, commands: AsyncIterator[pb.PeerCommand]) -> Session:
        try:
            async with asyncio.timeout(self._end.settings.frame_deadline_s):
                hello = (await anext(commands)).hello
        except (TimeoutError, StopAsyncIteration):
            raise FrameRefused("no hello") from None
        sender, transport = _check_hello(self._end, hello)
        older = [session for session in self._sessions if session.sender.incarnation == sender.incarnation]
        if older and hello.generation <= older[-1].generation:
            raise StaleAttempt(f"generation {hello.generation} of {sender} is over")
        for session in older:
            session.end(ChannelBroken("a newer channel took over"))
        self._sessions = [s for s in self._sessions if s.running or s.sender.worker_id != sender.worker_id]
        self._make_room()
        self._sessions.append(Session(self._end, self._table, sender, hello.generation, transport))
        return self._sessions[-1]

    def _make_room(self) -> None:
        """Staging memory for one more channel, if need be from the one that was opened first of those that are idle."""
        running = [session for session in self._sessions if session.running]
        if len(running) < self._end.max_channels:
            return
        idle = next((session for session in running if session.idle), None)
        if idle is None:
            raise ChannelBroken(f"staging memory is used up by {len(running)} channels, all of them busy")
        idle.end(ChannelBroken("closed, it was idle and staging memory is used up"))


def _join(sessions: list[Session]) -> None:
    for session in sessions:
        session.join()


def _check_hello(end: Endpoint, hello: pb.PeerHello) -> tuple[WorkerRef, Transport]:
    """The sender and the transport, if both can understand each other. Raises HandoffError or InvalidRequest."""
    if hello.protocol_version != PROTOCOL_VERSION:
        raise VersionRefused(f"protocol version {hello.protocol_version}, here {PROTOCOL_VERSION}")
    sender, wanted = convert.ref_from_pb(hello.sender, "sender"), convert.ref_from_pb(hello.receiver, "receiver")
    if (wanted.worker_id, wanted.incarnation) != (end.me.worker_id, end.me.incarnation):
        raise StaleAttempt(f"this is {end.me}, not {wanted}")
    if hello.fingerprint != end.fingerprint:
        raise FingerprintRefused(f"model fingerprint {hello.fingerprint!r}, here {end.fingerprint!r}")
    layout = convert.layout_from_pb(hello.layout)
    if replace(layout, block_size=end.kv.layout.block_size) != end.kv.layout:
        raise FingerprintRefused(f"KV layout {layout}, here {end.kv.layout}")
    return sender, _agreed(end, hello)


def _agreed(end: Endpoint, hello: pb.PeerHello) -> Transport:
    """The sender's best that can be used here too. Raises VersionRefused."""
    for offer in hello.transports:
        transport = end.transport(offer.name)
        if transport is not None and transport.reach == offer.reach:
            return transport
    theirs = ", ".join(offer.name for offer in hello.transports)
    ours = ", ".join(transport.name for transport in end.transports)
    raise VersionRefused(f"transports {theirs} are offered, here {ours}, and none works between these two hosts")
