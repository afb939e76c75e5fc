"""The decode worker's end: the Peer service, one session per stream, one intake thread per session.

    stream --(asyncio)--> Session: checks each message, agrees sizes --> Intake (thread): receives, writes, commits
           <--replies---- outbox <-------------------------------------'
The end of the stream, a newer channel of the same sender, or any error ends the session: the table hears `lost` once,
after the intake was told to stop and before a newer channel of that sender is welcomed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import structlog

from baton.core import PROTOCOL_VERSION
from baton.errors import BatonError, ChannelBroken, HandoffError, OfferRefused, StaleAttempt
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from baton.rpc.v1.peer_pb2_grpc import PeerServicer
from kvtransfer.choose import make_transport
from kvtransfer.handoff import Offer
from kvtransfer.intake import CommitClaim, Frame, Inbound, Intake, IntakeSetup
from kvtransfer.plan import FrameSpec, plan_frames
from kvtransfer.refusals import FingerprintRefused, FrameRefused, VersionRefused, refusal_to_pb
from kvtransfer.transport import ChannelName, KeyRelay

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import grpc

    from baton.core import HandoffId, WorkerRef
    from baton.engine.kv import KVCache
    from kvtransfer.handoff import HandoffTable, TransferSettings
    from kvtransfer.transport import Transport

log = structlog.get_logger()


class PeerService(PeerServicer):
    """Add it to the worker's `grpc.aio` server; `await close()` after the server stopped.

    `transport` is for workers that share a process, and for tests. Raises ConfigError for one that cannot be had.
    """

    def __init__(
        self,
        kv: KVCache,
        me: WorkerRef,
        fingerprint: str,
        settings: TransferSettings,
        table: HandoffTable,
        *,
        transport: Transport | None = None,
    ) -> None:
        transport = transport or make_transport(settings, kv.device)
        self.transport_name = transport.name
        self._setup = IntakeSetup(kv, me, fingerprint, settings, table, transport)
        self._sessions: dict[WorkerRef, Session] = {}
        self._ending: set[Session] = set()

    async def Connect(  # type: ignore[override]  # a coroutine that writes, as grpc.aio allows; the stub knows iterators
        self,
        request_iterator: AsyncIterator[pb.PeerCommand],
        context: grpc.aio.ServicerContext[pb.PeerCommand, pb.PeerReply],
    ) -> None:
        """One channel, from hello to its end."""
        try:
            session = await self._admit(request_iterator)
        except BatonError as error:
            log.info("channel refused", why=str(error))
            await context.write(refusal_to_pb(error))
            return
        reading = asyncio.create_task(session.read(request_iterator))
        try:
            await session.write(context)
        finally:
            reading.cancel()
            session.end(None)

    async def close(self) -> None:
        """End all sessions and wait for their threads."""
        for session in [*self._sessions.values()]:
            session.end(ChannelBroken("the receiver is shutting down"))
        await asyncio.gather(*(asyncio.to_thread(session.intake.join) for session in self._ending))

    async def _admit(self, commands: AsyncIterator[pb.PeerCommand]) -> Session:
        try:
            async with asyncio.timeout(self._setup.settings.frame_deadline_s):
                command = await anext(commands)
        except (TimeoutError, StopAsyncIteration):
            raise FrameRefused("no hello") from None
        sender = _check_hello(self._setup, command.hello)
        if older := self._sessions.get(sender):
            if command.hello.generation <= older.generation:
                raise StaleAttempt(f"generation {command.hello.generation} of {sender} is over")
            older.end(ChannelBroken("a newer channel took over"))
        session = self._sessions[sender] = Session(self._setup, sender, command.hello.generation, self._ended)
        self._ending = {session for session in self._ending if session.intake.running} | {session}
        return session

    def _ended(self, session: Session) -> None:
        if self._sessions.get(session.sender) is session:
            del self._sessions[session.sender]


def _check_hello(setup: IntakeSetup, hello: pb.PeerHello) -> WorkerRef:
    """The sender, if it and this worker can understand each other. Raises HandoffError or InvalidRequest."""
    if hello.protocol_version != PROTOCOL_VERSION:
        raise VersionRefused(f"protocol version {hello.protocol_version}, here {PROTOCOL_VERSION}")
    sender, wanted = convert.ref_from_pb(hello.sender, "sender"), convert.ref_from_pb(hello.receiver, "receiver")
    if (wanted.worker_id, wanted.incarnation) != (setup.me.worker_id, setup.me.incarnation):
        raise StaleAttempt(f"this is {setup.me}, not {wanted}")
    if hello.transport != setup.transport.name:
        raise VersionRefused(f"transport {hello.transport!r}, here {setup.transport.name!r}")
    if hello.fingerprint != setup.fingerprint:
        raise FingerprintRefused(f"model fingerprint {hello.fingerprint!r}, here {setup.fingerprint!r}")
    if (layout := convert.layout_from_pb(hello.layout)) != setup.kv.layout:
        raise FingerprintRefused(f"KV layout {layout}, here {setup.kv.layout}")
    return sender


class Session:
    """One stream. All methods but `_reply` and `_failed` belong to the event loop."""

    def __init__(
        self, setup: IntakeSetup, sender: WorkerRef, generation: int, ended: Callable[[Session], None]
    ) -> None:
        self.sender = sender
        self.generation = generation
        self._setup = setup
        self._ended = ended
        self._over = False
        self._inbound: dict[HandoffId, Inbound] = {}
        self._sequence = 0
        self._outbox: asyncio.Queue[pb.PeerReply | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        welcome = pb.PeerWelcome(credits=setup.settings.credits, frame_size=setup.settings.frame_size)
        self._outbox.put_nowait(pb.PeerReply(welcome=welcome))
        self._keys = KeyRelay(lambda key, value: self._reply(pb.PeerReply(store_key=pb.StoreKey(key=key, value=value))))
        name = ChannelName(sender.incarnation, setup.me.incarnation, generation)
        self.intake = Intake(setup, sender, name, self._keys, self._reply, self._failed)

    async def read(self, commands: AsyncIterator[pb.PeerCommand]) -> None:
        """Take commands until the stream or the session ends."""
        try:
            async for command in commands:
                self._take(command)
        except BatonError as error:
            self.end(error)
        except Exception as error:  # the boundary of this task: the session must not outlive its reader
            log.exception("session failed", sender=str(self.sender))
            self.end(ChannelBroken(f"{type(error).__name__} at the receiver"))
        finally:
            self.end(None)

    async def write(self, context: grpc.aio.ServicerContext[pb.PeerCommand, pb.PeerReply]) -> None:
        """Send replies until the session ends."""
        while (reply := await self._outbox.get()) is not None:
            await context.write(reply)

    def end(self, error: BatonError | None) -> None:
        """Once, for whatever reason; with an error, the sender hears it."""
        if self._over:
            return
        self._over = True
        self.intake.stop()
        self._setup.table.lost(self.sender)
        self._ended(self)
        if error is not None:
            log.info("channel closed", sender=str(self.sender), generation=self.generation, why=str(error))
            self._outbox.put_nowait(refusal_to_pb(error))
        self._outbox.put_nowait(None)

    def _reply(self, reply: pb.PeerReply) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._outbox.put_nowait, reply)

    def _failed(self, error: BatonError) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.end, error)

    def _take(self, command: pb.PeerCommand) -> None:
        if self._over:
            return
        match command.WhichOneof("command"):
            case "store_key":
                self._keys.deliver(command.store_key.key, command.store_key.value)
            case "offer":
                self._offered(command.offer)
            case "frame":
                self._announced(command.frame)
            case "commit":
                self._claimed(command.commit)
            case "abort":
                handoff = convert.handoff_from_pb(command.abort.handoff)
                self._inbound.pop(handoff, None)
                self._setup.table.aborted(handoff, self.sender)
            case other:
                raise FrameRefused(f"unexpected message: {other}")

    def _offered(self, message: pb.Offer) -> None:
        handoff = convert.handoff_from_pb(message.handoff)
        offer = Offer(message.fingerprint, message.known_tokens, message.skip, message.frames)
        try:
            inbound = self._accept(handoff, offer)
        except HandoffError as error:
            self._outbox.put_nowait(refusal_to_pb(error, handoff))
            return
        self._inbound[handoff] = inbound
        self._outbox.put_nowait(pb.PeerReply(offer_accepted=pb.OfferAccepted(handoff=message.handoff)))

    def _accept(self, handoff: HandoffId, offer: Offer) -> Inbound:
        if handoff in self._inbound:
            raise StaleAttempt(f"handoff {handoff} was offered before")
        if offer.fingerprint != self._setup.fingerprint:
            raise FingerprintRefused(f"model fingerprint {offer.fingerprint!r}, here {self._setup.fingerprint!r}")
        if offer.skip or not offer.known_tokens:
            raise OfferRefused(f"{offer.known_tokens} tokens with {offer.skip} skipped: need all, at least 1")
        layout = self._setup.kv.layout
        plan = plan_frames(layout, layout.blocks_for(offer.known_tokens), self._setup.settings.frame_size)
        if len(plan) != offer.frames:
            raise OfferRefused(f"{offer.frames} frames offered, {len(plan)} planned here")
        self._setup.table.offer(handoff, self.sender, offer)
        return Inbound(handoff, offer.known_tokens, plan)

    def _announced(self, message: pb.FrameAnnounce) -> None:
        inbound = self._inbound.get(convert.handoff_from_pb(message.handoff))
        if inbound is None or message.sequence != self._sequence or message.index != inbound.announced:
            raise FrameRefused(f"frame {message.sequence}: not next, or of a handoff that was not accepted")
        claimed = FrameSpec(
            message.layer_begin, message.layer_end, message.block_begin, message.block_end, message.nbytes
        )
        if message.index >= len(inbound.plan) or claimed != inbound.plan[message.index]:
            raise FrameRefused(f"frame {message.sequence}: {claimed} is not what was planned")
        if self._sequence - self.intake.received >= self._setup.settings.credits:
            raise FrameRefused(f"frame {message.sequence}: more than {self._setup.settings.credits} in flight")
        self._sequence += 1
        inbound.announced += 1
        self.intake.put(Frame(inbound, claimed, message.sequence, time.monotonic()))

    def _claimed(self, message: pb.Commit) -> None:
        handoff = convert.handoff_from_pb(message.handoff)
        inbound = self._inbound.pop(handoff, None)
        if inbound is None:
            error = StaleAttempt(f"handoff {handoff} was not offered on this channel")
            self._outbox.put_nowait(refusal_to_pb(error, handoff))
            return
        spec, first = convert.spec_from_pb(message.spec), convert.tokens_from_pb(message.first)
        if inbound.announced != len(inbound.plan) or len(spec) != inbound.known_tokens + 1:
            raise FrameRefused(
                f"commit of {handoff}: {inbound.announced} of {len(inbound.plan)} frames, spec of {len(spec)} tokens"
            )
        self.intake.put(CommitClaim(inbound, spec, first, tuple(message.digests)))
