"""The thread of a channel at the decode worker: frames into blocks, commits into the table, in their order.

It expects only frames that it has checked, always in staging that belongs to this channel; all that are announced are
expected at once, so that one is on its way while another is written. A frame of a handoff that ended meanwhile is still
received, so that the channel stays in order, and is then dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from baton.core import HandoffId, WorkerRef
from baton.errors import DigestMismatch, HandoffError, StaleAttempt
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer import probe
from kvtransfer.digests import wire_digest
from kvtransfer.handoff import CommitState, HandoffTable, PushEnd
from kvtransfer.inbound import Ended, Frame, Inbound, Inbox
from kvtransfer.messages import FrameRefused, end_of, frame_of, refusal_to_pb
from kvtransfer.plan import FrameSpec
from kvtransfer.transport import ChannelEnd, Endpoint

if TYPE_CHECKING:
    from torch import Tensor


class Intake:
    """What the thread of a session does: `serve`. The rest is for the event loop.

    `inbound`: the handoffs of which frames may come; the event loop enters them before it says so to the sender.
    `open`: those of them that are neither committed nor aborted. Whoever takes one out says which it is.
    """

    def __init__(
        self,
        end: Endpoint,
        table: HandoffTable,
        sender: WorkerRef,
        transport: str,
        reply: Callable[[pb.PeerReply], None],
    ) -> None:
        self.inbox = Inbox()
        self.inbound: dict[HandoffId, Inbound] = {}
        self.open: dict[HandoffId, Inbound] = {}
        self.over = False
        self.announced = 0  # frames
        self.received = 0  # counted before their credit is given
        self._end = end
        self._table = table
        self._sender = sender
        self._transport = transport
        self._reply = reply
        self._ring = end.ring
        self._credited = 0
        self._done_at = 0.0  # when the last of these was done

    def stop(self) -> None:
        """From now on no block is written and no commit is made, but by a write that the table has let in already."""
        self.over = True
        self.inbox.put(None)

    def serve(self, channel: ChannelEnd) -> None:
        """Until `stop`. Raises BatonError: the channel, or what was said on it, is no good."""
        if channel.express is not None and self.announced:
            raise FrameRefused("a frame was announced before the channel was built")
        self.inbox.express = channel.express
        todo: deque[Frame | Ended | None] = deque()
        early: deque[Ended] = deque()
        while not self.over:
            while not todo or self.inbox.ready:
                self._take_up(channel, todo, early)
            item = todo.popleft()
            if isinstance(item, Frame):
                self._receive(channel, item)
                self._credit(at_once=not any(isinstance(other, Frame) for other in todo))
            elif item is not None:
                self._conclude(item)

    def _take_up(self, channel: ChannelEnd, todo: deque[Frame | Ended | None], early: deque[Ended]) -> None:
        """Wait for an item; expect a frame at once, and an end after the frames that come before it."""
        item = self.inbox.take()
        if isinstance(item, pb.PeerCommand):
            if item.HasField("commit"):
                return self.claim(item)
            item = self.checked(item.frame, self.inbound)
        if isinstance(item, Frame):
            channel.start(item.number, item.spec.nbytes)
            todo.append(item)
        elif item is None:
            todo.append(None)
        else:
            early.append(item)
        while early and early[0].after <= self.announced:
            todo.append(early.popleft())

    def claim(self, command: pb.PeerCommand) -> None:
        """A commit: its turn comes after the frames before it. From either thread, wherever it came."""
        handoff = convert.handoff_from_pb(command.commit.handoff)
        if (inbound := self.open.pop(handoff, None)) is not None:
            self.inbox.put(Ended(inbound, command.commit, command.after))
        else:
            error = StaleAttempt(f"handoff {handoff} was not offered on this channel")
            self._reply(refusal_to_pb(error, handoff))

    def checked(self, message: pb.FrameAnnounce, known: Mapping[HandoffId, Inbound]) -> Frame:
        """The frame that is next; `known`: of which one may come. Raises FrameRefused for one that was not agreed.

        Called where announcements come: by the event loop, or by the thread where there is an express.
        """
        spec, number, inbound = frame_of(message), message.sequence, None
        if message.HasField("handoff"):
            inbound = known.get(convert.handoff_from_pb(message.handoff))
            if inbound is None or not inbound.announced.accepts(spec):
                raise FrameRefused(f"frame {number}: {spec} does not go on where an accepted handoff is")
        elif spec != probe.frame(self._ring) or number >= probe.FRAMES:
            raise FrameRefused(f"frame {number}: of no handoff")
        if number != self.announced or spec.nbytes > self._ring.size:
            raise FrameRefused(f"frame {number}: {self.announced} is next, of {self._ring.size} bytes at most")
        if self.announced - self.received >= self._ring.slots:
            raise FrameRefused(f"frame {number}: more than {self._ring.slots} in flight")
        self.announced += 1
        return Frame(inbound, spec, number, time.monotonic())

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
            inbound.first_at = inbound.first_at or frame.announced_at
            inbound.last_at = now
        self._done_at = now
        self.received += 1

    def _credit(self, *, at_once: bool) -> None:
        """Give slots back: half a ring at a time, or all if there is nothing else to do."""
        if not at_once and self.received - self._credited < self._ring.slots // 2:
            return
        self._credited = self.received
        self._hurry(pb.PeerReply(credit=pb.Credit(sequence=self.received - 1)))

    def _hurry(self, reply: pb.PeerReply) -> None:
        if self.inbox.express is not None:
            self.inbox.express.send(reply.SerializeToString())
        else:
            self._reply(reply)

    def _check_pattern(self, frame: Frame, data: Tensor) -> None:
        if not torch.equal(data.cpu(), probe.pattern(frame.number, frame.spec.nbytes)):
            raise FrameRefused(f"the {self._transport} channel changes bytes: frame {frame.number} of its probe")
        if frame.number == probe.FRAMES - 1:
            self._reply(pb.PeerReply(probed=pb.Probed(frames=probe.FRAMES)))

    def _write(self, inbound: Inbound, spec: FrameSpec, data: Tensor) -> None:
        try:
            with self._table.writing(inbound.handoff, self._sender) as blocks:
                if self.over:  # set before the table heard `lost`: what it lets in now is for a newer channel
                    raise StaleAttempt(f"handoff {inbound.handoff}: its channel is closed")
                self._end.kv.scatter(spec.layers, blocks, spec.begin, spec.end, data)
                self._end.kv.settle()  # before the blocks, and the slot, may be somebody else's
        except HandoffError as error:
            inbound.dropped = True
            self._reply(refusal_to_pb(error, inbound.handoff))

    def _conclude(self, ended: Ended) -> None:
        """Raises InvalidRequest or FrameRefused for a commit that makes no sense: that ends the session."""
        inbound, message = ended.inbound, ended.commit
        del self.inbound[inbound.handoff]
        if message is None:
            return
        if not inbound.announced.complete:
            text = f"{inbound.announced.nbytes} bytes were announced, more are due"
            raise FrameRefused(f"commit of {inbound.handoff}: {text}")
        end = end_of(message)
        if end.spec is not None and len(end.spec) != inbound.known_tokens + 1:
            text = f"{len(end.spec)} tokens, {inbound.known_tokens} were offered"
            raise FrameRefused(f"commit of {inbound.handoff}: {text}")
        try:
            self._commit(inbound, end, message)
        except HandoffError as error:
            self._reply(refusal_to_pb(error, inbound.handoff))
        else:
            self._hurry(pb.PeerReply(commit_ack=pb.CommitAck(handoff=message.handoff)))

    def _commit(self, inbound: Inbound, end: PushEnd, message: pb.Commit) -> None:
        if inbound.dropped or self.over:
            raise StaleAttempt(f"handoff {inbound.handoff} has ended here")
        try:
            inbound.check(message)
        except DigestMismatch:
            self._table.aborted(inbound.handoff, self._sender)
            raise
        state = CommitState(
            spec=end.spec,
            first=end.first,
            thinking=end.thinking,
            transfer_s=inbound.busy_s,
            commit_s=time.monotonic() - inbound.last_at,
            kv_bytes=inbound.announced.nbytes,
            transport=self._transport,
            began_at=inbound.first_at,
            ended_at=inbound.last_at,
        )
        self._table.commit(inbound.handoff, self._sender, state)
