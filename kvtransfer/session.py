"""One channel at the decode worker: messages are checked in the event loop, bytes are taken by a thread of its own.

    stream --(event loop)--> checks, agrees sizes --items--> thread: receives, writes, commits, in announced order
           <--(event loop)-- replies <----------------------'
The thread expects only frames that were checked, always in staging that belongs to this channel; all that are announced
are expected at once, so that one is on its way while another is written. A frame of a handoff that ended meanwhile is
still received, so that the channel stays in order, and is then dropped.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, TypeVar

import structlog
import torch

from baton.core import HandoffId, SequenceSpec, Token, WorkerRef
from baton.errors import BatonError, ChannelBroken, DigestMismatch, HandoffError, StaleAttempt
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer import probe
from kvtransfer.digests import wire_digest
from kvtransfer.handoff import CommitState, HandoffTable
from kvtransfer.inbound import Frame, Inbound, Item, inbound_of
from kvtransfer.messages import FrameRefused, frame_of, refusal_to_pb
from kvtransfer.plan import FrameSpec
from kvtransfer.transport import ChannelEnd, ChannelName, Endpoint, KeyRelay, Side, Transport

if TYPE_CHECKING:
    import grpc
    from torch import Tensor

A = TypeVar("A")
log = structlog.get_logger()


class Session:
    """Make it in the event loop that serves its stream; it runs from there on."""

    def __init__(
        self, end: Endpoint, table: HandoffTable, sender: WorkerRef, generation: int, transport: Transport
    ) -> None:
        self.sender = sender
        self.generation = generation
        self._end = end
        self._table = table
        self._transport = transport
        self._ring = end.ring
        self._name = ChannelName(sender.incarnation, end.me.incarnation, generation)
        self._loop = asyncio.get_running_loop()
        self._replies: asyncio.Queue[pb.PeerReply | None] = asyncio.Queue()
        welcome = pb.PeerWelcome(credits=self._ring.slots, frame_size=self._ring.size, transport=transport.name)
        self._replies.put_nowait(pb.PeerReply(welcome=welcome))
        self._keys = KeyRelay(lambda key, value: self._reply(pb.PeerReply(store_key=pb.StoreKey(key=key, value=value))))
        self._inbound: dict[HandoffId, Inbound] = {}
        self._over = False
        self._sequence = 0  # frames announced
        self._received = 0  # frames; counted by the thread before their credit is given
        self._done_at = 0.0  # when the last of these was done; the thread's
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()  # bounded by credits and offers
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
            case "fetch":
                self._fetch(command.fetch)
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
        if handoff in self._inbound:
            raise StaleAttempt(f"handoff {handoff} was offered before")
        offer, inbound = inbound_of(self._end, handoff, message)
        self._table.offer(handoff, self.sender, offer)
        return inbound

    def _fetch(self, message: pb.Fetch) -> None:
        handoff = convert.handoff_from_pb(message.handoff)
        try:
            self._table.fetch(handoff, self.sender, message.begin, message.end)
        except HandoffError as error:
            refused = pb.FetchRefused(handoff=message.handoff, detail=str(error))
            self._replies.put_nowait(pb.PeerReply(fetch_refused=refused))

    def _announced(self, message: pb.FrameAnnounce) -> None:
        spec, inbound = frame_of(message), None
        if message.HasField("handoff"):
            inbound = self._inbound.get(convert.handoff_from_pb(message.handoff))
            if inbound is None or not inbound.announced.accepts(spec):
                raise FrameRefused(f"frame {message.sequence}: {spec} does not go on where an accepted handoff is")
        elif spec != probe.frame(self._ring) or message.sequence >= probe.FRAMES:
            raise FrameRefused(f"frame {message.sequence}: of no handoff")
        if message.sequence != self._sequence or spec.nbytes > self._ring.size:
            raise FrameRefused(
                f"frame {message.sequence}: {self._sequence} is next, of {self._ring.size} bytes at most"
            )
        if self._sequence - self._received >= self._ring.slots:
            raise FrameRefused(f"frame {message.sequence}: more than {self._ring.slots} in flight")
        self._items.put(Frame(inbound, spec, self._sequence, time.monotonic()))
        self._sequence += 1

    def _claimed(self, message: pb.Commit) -> None:
        handoff = convert.handoff_from_pb(message.handoff)
        inbound = self._inbound.pop(handoff, None)
        if inbound is None:
            error = StaleAttempt(f"handoff {handoff} was not offered on this channel")
            self._replies.put_nowait(refusal_to_pb(error, handoff))
            return
        if not inbound.announced.complete:
            raise FrameRefused(f"commit of {handoff}: {inbound.announced.nbytes} bytes were announced, more are due")
        self._items.put((inbound, message))

    # From any thread

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """No handoff is on its way. In the event loop."""
        return not self._inbound and self._received == self._sequence

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
        deadline_s = self._end.settings.frame_deadline_s
        try:
            opened = self._transport.open(self._name, Side.RECEIVER, self._keys, self._ring, deadline_s)
            with closing(opened) as channel:
                self._serve(channel)
        except BatonError as error:
            self._in_loop(self.end, error)
        except Exception as error:  # the boundary of this thread: the sender must hear that the channel is gone
            log.exception("channel failed", channel=str(self._name))
            self._in_loop(self.end, ChannelBroken(f"channel {self._name}: {type(error).__name__} at the receiver"))

    def _serve(self, channel: ChannelEnd) -> None:
        items: deque[Item] = deque()
        while not self._over:
            self._expect(channel, items)
            item = items.popleft()
            if item is None:
                return
            if isinstance(item, Frame):
                self._receive(channel, item)
            else:
                self._answer(*item)

    def _expect(self, channel: ChannelEnd, items: deque[Item]) -> None:
        """Take up what was announced; wait for it if there is nothing else to do."""
        while not items or not self._items.empty():
            item = self._items.get()
            items.append(item)
            if isinstance(item, Frame):
                channel.start(item.number, item.spec.nbytes)

    def _receive(self, channel: ChannelEnd, frame: Frame) -> None:
        channel.finish(frame.number)
        data, inbound = channel.slot(frame.number)[: frame.spec.nbytes], frame.inbound
        if inbound is None:
            self._check_pattern(frame, data)
        elif not inbound.dropped:
            inbound.digests.append(wire_digest(data))
            if inbound.whole is not None:
                inbound.whole.add(frame.spec, data)
            self._write(inbound, frame.spec, data)
        now = time.monotonic()
        if inbound is not None:
            inbound.busy_s += now - max(frame.announced_at, self._done_at)
            inbound.last_at = now
        self._done_at = now
        self._received += 1
        self._reply(pb.PeerReply(credit=pb.Credit(sequence=frame.number)))

    def _check_pattern(self, frame: Frame, data: Tensor) -> None:
        if not torch.equal(data.cpu(), probe.pattern(frame.number, frame.spec.nbytes)):
            raise FrameRefused(f"the {self._transport.name} channel changes bytes: frame {frame.number} of its probe")
        if frame.number == probe.FRAMES - 1:
            self._reply(pb.PeerReply(probed=pb.Probed(frames=probe.FRAMES)))

    def _write(self, inbound: Inbound, spec: FrameSpec, data: Tensor) -> None:
        try:
            with self._table.writing(inbound.handoff, self.sender) as blocks:
                if self._over:  # set before the table heard `lost`: what it lets in now is for a newer channel
                    raise StaleAttempt(f"handoff {inbound.handoff}: its channel is closed")
                self._end.kv.scatter(spec.layers, blocks, spec.begin, spec.end, data)
                self._end.kv.settle()  # before the blocks, and the slot, may be somebody else's
        except HandoffError as error:
            inbound.dropped = True
            self._reply(refusal_to_pb(error, inbound.handoff))

    def _answer(self, inbound: Inbound, message: pb.Commit) -> None:
        """Raises InvalidRequest or FrameRefused for a commit that makes no sense: that ends the session."""
        spec = convert.spec_from_pb(message.spec) if message.HasField("spec") else None
        first = convert.tokens_from_pb(message.first)
        if spec is not None and len(spec) != inbound.known_tokens + 1:
            raise FrameRefused(f"commit of {inbound.handoff}: {len(spec)} tokens, {inbound.known_tokens} were offered")
        try:
            self._commit(inbound, spec, first, message)
        except HandoffError as error:
            self._reply(refusal_to_pb(error, inbound.handoff))
        else:
            self._reply(pb.PeerReply(commit_ack=pb.CommitAck(handoff=message.handoff)))

    def _commit(self, inbound: Inbound, spec: SequenceSpec | None, first: Sequence[Token], message: pb.Commit) -> None:
        if inbound.dropped or self._over:
            raise StaleAttempt(f"handoff {inbound.handoff} has ended here")
        try:
            inbound.check(message)
        except DigestMismatch:
            self._table.aborted(inbound.handoff, self.sender)
            raise
        state = CommitState(
            spec=spec,
            first=first,
            transfer_s=inbound.busy_s,
            commit_s=time.monotonic() - inbound.last_at,
            kv_bytes=inbound.announced.nbytes,
            transport=self._transport.name,
        )
        self._table.commit(inbound.handoff, self.sender, state)
