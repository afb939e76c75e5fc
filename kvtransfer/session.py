"""One channel at the decode worker: messages are checked in the event loop, bytes are taken by a thread of its own.

    stream --(event loop)--> checks, agrees sizes --items--> thread: receives, writes, commits, in announced order
           <--(event loop)-- replies <----------------------'
The thread posts a receive only for a frame that was checked against the plan, always into staging that belongs to this
channel. A frame of a handoff that ended meanwhile is still received, so that the channel stays in order, and is then
dropped.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeVar

import structlog

from baton.core import HandoffId, SequenceSpec, Token, WorkerRef
from baton.errors import BatonError, ChannelBroken, DigestMismatch, HandoffError, OfferRefused, StaleAttempt
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.handoff import CommitState, HandoffTable, Offer
from kvtransfer.messages import FingerprintRefused, FrameRefused, announcement, refusal_to_pb
from kvtransfer.plan import FrameSpec
from kvtransfer.transport import ChannelEnd, ChannelName, Endpoint, KeyRelay, Side, wire_digest

if TYPE_CHECKING:
    import grpc
    from torch import Tensor

A = TypeVar("A")
log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Inbound:
    """A handoff that was offered on this channel and accepted by the table."""

    handoff: HandoffId
    known_tokens: int
    plan: tuple[FrameSpec, ...]
    announced: int = 0  # frames; the event loop's, like `first_at`
    first_at: float = 0.0  # when the first of them was announced
    received: int = 0  # frames; the thread's, like all below
    digests: list[bytes] = field(default_factory=list)
    dropped: bool = False
    last_at: float = 0.0


class Session:
    """Make it in the event loop that serves its stream; it runs from there on."""

    def __init__(self, end: Endpoint, table: HandoffTable, sender: WorkerRef, generation: int) -> None:
        self.sender = sender
        self.generation = generation
        self._end = end
        self._table = table
        self._name = ChannelName(sender.incarnation, end.me.incarnation, generation)
        self._loop = asyncio.get_running_loop()
        self._replies: asyncio.Queue[pb.PeerReply | None] = asyncio.Queue()
        welcome = pb.PeerWelcome(credits=end.settings.credits, frame_size=end.settings.frame_size)
        self._replies.put_nowait(pb.PeerReply(welcome=welcome))
        self._keys = KeyRelay(lambda key, value: self._reply(pb.PeerReply(store_key=pb.StoreKey(key=key, value=value))))
        self._inbound: dict[HandoffId, Inbound] = {}
        self._over = False
        self._sequence = 0  # frames announced
        self._received = 0  # frames; counted by the thread before their credit is given
        # An Inbound stands for its next frame, whose bytes come next on the channel. Bounded by credits and offers.
        self._items: queue.SimpleQueue[Inbound | tuple[Inbound, pb.Commit] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kv-recv-{self._name}", daemon=True)
        self._thread.start()

    # In the event loop

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
        while (reply := await self._replies.get()) is not None:
            await context.write(reply)

    def end(self, error: BatonError | None) -> None:
        """Once, for whatever reason; with an error, the sender hears it.

        From now on no block is written and no commit is made, but by a write that the table has let in already.
        """
        if self._over:
            return
        self._over = True
        self._items.put(None)
        self._table.lost(self.sender)
        if error is not None:
            log.info("channel closed", sender=str(self.sender), generation=self.generation, why=str(error))
            self._replies.put_nowait(refusal_to_pb(error))
        self._replies.put_nowait(None)

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
                self._table.aborted(handoff, self.sender)
            case other:
                raise FrameRefused(f"unexpected message: {other}")

    def _offered(self, message: pb.Offer) -> None:
        handoff = convert.handoff_from_pb(message.handoff)
        try:
            self._inbound[handoff] = self._accept(handoff, message)
        except HandoffError as error:
            self._replies.put_nowait(refusal_to_pb(error, handoff))
        else:
            self._replies.put_nowait(pb.PeerReply(offer_accepted=pb.OfferAccepted(handoff=message.handoff)))

    def _accept(self, handoff: HandoffId, message: pb.Offer) -> Inbound:
        offer = Offer(message.fingerprint, message.known_tokens, message.skip, message.frames)
        if handoff in self._inbound:
            raise StaleAttempt(f"handoff {handoff} was offered before")
        if offer.fingerprint != self._end.fingerprint:
            raise FingerprintRefused(f"model fingerprint {offer.fingerprint!r}, here {self._end.fingerprint!r}")
        kv = self._end.kv
        if offer.skip or not 1 <= kv.layout.blocks_for(offer.known_tokens) <= kv.total_blocks:  # before it is planned
            raise OfferRefused(f"{offer.known_tokens} tokens with {offer.skip} skipped: need all, at least 1, that fit")
        plan = self._end.plan(offer.known_tokens, self._end.settings.frame_size)
        if len(plan) != offer.frames:
            raise OfferRefused(f"{offer.frames} frames offered, {len(plan)} planned here")
        self._table.offer(handoff, self.sender, offer)
        return Inbound(handoff, offer.known_tokens, plan)

    def _announced(self, message: pb.FrameAnnounce) -> None:
        inbound = self._inbound.get(convert.handoff_from_pb(message.handoff))
        if inbound is None or inbound.announced == len(inbound.plan):
            raise FrameRefused(f"frame {message.sequence}: of a handoff that was not accepted, or has all its frames")
        spec = inbound.plan[inbound.announced]
        if message != announcement(inbound.handoff, inbound.announced, self._sequence, spec):
            raise FrameRefused(f"frame {message.sequence}: index, place or size is not what was planned, {spec}")
        if self._sequence - self._received >= self._end.settings.credits:
            raise FrameRefused(f"frame {message.sequence}: more than {self._end.settings.credits} in flight")
        inbound.first_at = inbound.first_at or time.monotonic()
        inbound.announced += 1
        self._sequence += 1
        self._items.put(inbound)

    def _claimed(self, message: pb.Commit) -> None:
        handoff = convert.handoff_from_pb(message.handoff)
        inbound = self._inbound.pop(handoff, None)
        if inbound is None:
            error = StaleAttempt(f"handoff {handoff} was not offered on this channel")
            self._replies.put_nowait(refusal_to_pb(error, handoff))
            return
        if inbound.announced != len(inbound.plan):
            raise FrameRefused(f"commit of {handoff}: {inbound.announced} of {len(inbound.plan)} frames")
        self._items.put((inbound, message))

    # From any thread

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the thread: at most the deadline of what is on the wire."""
        self._thread.join()

    def _reply(self, reply: pb.PeerReply) -> None:
        self._in_loop(self._replies.put_nowait, reply)

    def _in_loop(self, call: Callable[[A], None], argument: A) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(call, argument)

    # In the thread

    def _run(self) -> None:
        settings, transport = self._end.settings, self._end.transport
        try:
            staging = self._end.staging(settings.frame_size)
            with closing(transport.open(self._name, Side.RECEIVER, self._keys, settings.frame_deadline_s)) as channel:
                self._serve(channel, staging)
        except BatonError as error:
            self._in_loop(self.end, error)
        except Exception as error:  # the boundary of this thread: the sender must hear that the channel is gone
            log.exception("channel failed", channel=str(self._name))
            self._in_loop(self.end, ChannelBroken(f"channel {self._name}: {type(error).__name__} at the receiver"))

    def _serve(self, channel: ChannelEnd, staging: Tensor) -> None:
        while (item := self._items.get()) is not None and not self._over:
            if isinstance(item, Inbound):
                self._receive(channel, item, staging)
            else:
                self._answer(*item)

    def _receive(self, channel: ChannelEnd, inbound: Inbound, staging: Tensor) -> None:
        spec = inbound.plan[inbound.received]
        data = staging[: spec.nbytes]
        channel.recv(data)
        inbound.received += 1
        if not inbound.dropped:
            inbound.digests.append(wire_digest(data))
            self._write(inbound, spec, data)
        inbound.last_at = time.monotonic()
        credit = pb.Credit(sequence=self._received)
        self._received += 1
        self._reply(pb.PeerReply(credit=credit))

    def _write(self, inbound: Inbound, spec: FrameSpec, data: Tensor) -> None:
        try:
            with self._table.writing(inbound.handoff, self.sender) as blocks:
                if self._over:  # set before the table heard `lost`: what it lets in now is for a newer channel
                    raise StaleAttempt(f"handoff {inbound.handoff}: its channel is closed")
                self._end.kv.scatter(spec.layers, blocks[spec.blocks], data)
        except HandoffError as error:
            inbound.dropped = True
            self._reply(refusal_to_pb(error, inbound.handoff))

    def _answer(self, inbound: Inbound, message: pb.Commit) -> None:
        """Raises InvalidRequest or FrameRefused for a commit that makes no sense: that ends the session."""
        spec, first = convert.spec_from_pb(message.spec), convert.tokens_from_pb(message.first)
        if len(spec) != inbound.known_tokens + 1:
            raise FrameRefused(f"commit of {inbound.handoff}: {len(spec)} tokens, {inbound.known_tokens} were offered")
        try:
            self._commit(inbound, spec, first, message.digests)
        except HandoffError as error:
            self._reply(refusal_to_pb(error, inbound.handoff))
        else:
            self._reply(pb.PeerReply(commit_ack=pb.CommitAck(handoff=message.handoff)))

    def _commit(self, inbound: Inbound, spec: SequenceSpec, first: Sequence[Token], digests: Sequence[bytes]) -> None:
        if inbound.dropped or self._over:
            raise StaleAttempt(f"handoff {inbound.handoff} has ended here")
        if list(digests) != inbound.digests:
            self._table.aborted(inbound.handoff, self.sender)
            wrong = [n for n, pair in enumerate(zip_longest(inbound.digests, digests)) if len(set(pair)) > 1]
            raise DigestMismatch(f"handoff {inbound.handoff}: frames {wrong} of {len(inbound.plan)}")
        state = CommitState(
            spec=spec,
            first=first,
            transfer_s=inbound.last_at - inbound.first_at,
            commit_s=time.monotonic() - inbound.last_at,
            kv_bytes=sum(frame.nbytes for frame in inbound.plan),
            transport=self._end.transport.name,
        )
        self._table.commit(inbound.handoff, self.sender, state)
