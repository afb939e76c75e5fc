"""One channel at the decode worker: messages are checked in the event loop, bytes are taken by a thread of its own.

    stream --(event loop)--> offers, aborts --items--> thread (intake.py): frames, commits
           <--(event loop)-- replies <----------------'
Where the channel has an express, announcements, credits and commits take that way; a commit and an abort say after
how many frames they come.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, TypeVar

import structlog

from baton.core import HandoffId, WorkerRef
from baton.errors import BatonError, ChannelBroken, HandoffError, StaleAttempt
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.handoff import HandoffTable
from kvtransfer.inbound import Ended, Inbound, inbound_of
from kvtransfer.intake import Intake
from kvtransfer.messages import FrameRefused, refusal_to_pb
from kvtransfer.transport import ChannelName, Endpoint, KeyRelay, Side, Transport

if TYPE_CHECKING:
    import grpc

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
        self._intake = Intake(end, table, sender, transport.name, self._reply)
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
            log.exception("channel_failed", worker=self.sender, channel=str(self._name))
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
        if self._intake.over:
            return
        self._intake.stop()
        self._table.lost(self.sender)
        if error is not None:
            log.info("channel_closed", worker=self.sender, channel=str(self._name), reason=str(error))
            self._replies.put_nowait(refusal_to_pb(error))
        self._replies.put_nowait(None)

    def _take(self, command: pb.PeerCommand) -> None:
        if self._intake.over:
            return
        match command.WhichOneof("command"):
            case "store_key":
                self._keys.deliver(command.store_key.key, command.store_key.value)
            case "offer":
                self._offered(command.offer)
            case "frame":
                self._heard([command.frame, *command.more])
            case "commit":
                self._intake.claim(command)
            case "fetch":
                self._fetch(command.fetch)
            case "abort":
                self._aborted(convert.handoff_from_pb(command.abort.handoff), command.after)
            case other:
                raise FrameRefused(f"unexpected message: {other}")

    def _offered(self, message: pb.Offer) -> None:
        handoff = convert.handoff_from_pb(message.handoff)
        try:
            self._intake.open[handoff] = self._intake.inbound[handoff] = self._accept(handoff, message)
        except HandoffError as error:
            self._replies.put_nowait(refusal_to_pb(error, handoff))
        else:
            self._replies.put_nowait(pb.PeerReply(offer_accepted=pb.OfferAccepted(handoff=message.handoff)))

    def _accept(self, handoff: HandoffId, message: pb.Offer) -> Inbound:
        if handoff in self._intake.inbound:
            raise StaleAttempt(f"handoff {handoff} was offered before")
        offer, inbound = inbound_of(self._end, handoff, message)
        self._table.offer(handoff, self.sender, offer)
        return inbound

    def _fetch(self, message: pb.Fetch) -> None:
        handoff = convert.handoff_from_pb(message.handoff)
        try:
            self._table.fetch(handoff, self.sender, message.begin, message.end, verify=message.verify_kv)
        except HandoffError as error:
            refused = pb.FetchRefused(handoff=message.handoff, detail=str(error))
            self._replies.put_nowait(pb.PeerReply(fetch_refused=refused))

    def _heard(self, frames: Sequence[pb.FrameAnnounce]) -> None:
        if self._intake.inbox.express is not None:
            raise FrameRefused(f"frame {frames[0].sequence}: announced over the stream, beside the express")
        for frame in frames:
            self._intake.inbox.put(self._intake.checked(frame, self._intake.open))

    def _aborted(self, handoff: HandoffId, after: int) -> None:
        self._table.aborted(handoff, self.sender)
        if (inbound := self._intake.open.pop(handoff, None)) is not None:
            inbound.dropped = True
            self._intake.inbox.put(Ended(inbound, None, after))

    # From any thread

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """No handoff is on its way."""
        return not self._intake.open and self._intake.received == self._intake.announced

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
                self._intake.serve(channel)
        except BatonError as error:
            self._in_loop(self.end, error)
        except Exception as error:  # the boundary of this thread: the sender must hear that the channel is gone
            log.exception("channel_failed", worker=self.sender, channel=str(self._name))
            self._in_loop(self.end, ChannelBroken(f"channel {self._name}: {type(error).__name__} at the receiver"))
