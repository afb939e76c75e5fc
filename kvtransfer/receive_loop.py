"""The receiving thread of a channel: writes frames into blocks and commits into the handoff table, in channel order.

`ReceiveLoop` posts a receive only for a frame that it has checked, and only into the channel's own staging. Every
announced frame is posted immediately, so one frame arrives while another is written. A frame of an ended handoff is
still received, to keep the channel in order, and then dropped.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest

import torch
from torch import Tensor

from baton.core import HandoffId, RecurrentState, WorkerRef
from baton.engine.memory.exposed import pattern
from baton.errors import DigestMismatch, HandoffError, OfferRefused, StaleAttempt
from baton.hashing import frame_digest
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer import wire
from kvtransfer.frames import Coverage, FrameSpec, KVDigest, wire_digest
from kvtransfer.handoff import CommitState, HandoffTable, Offer, PushEnd
from kvtransfer.transports.base import ChannelEnd, ControlPath, Endpoint, Places, RemotePool, Transport
from kvtransfer.wire import FingerprintRefused, FrameRefused, end_of, frame_of, refusal_to_pb


@dataclass(slots=True, eq=False)
class IncomingHandoff:
    """A handoff offered on this channel and accepted by the table. The first thread to see its end sets `dropped`."""

    handoff: HandoffId
    known_tokens: int
    skip: int
    announced: Coverage  # of a one-sided channel: read
    places: Places = field(default_factory=Places)  # in the pool of the sender, of a one-sided channel
    whole: KVDigest | None = None  # None unless the whole KV is verified
    digests: list[bytes] = field(default_factory=list)
    state: list[bytes] = field(default_factory=list)  # parts, of recurrent layers; all precede the commit
    dropped: bool = False
    busy_s: float = 0.0
    first_at: float = 0.0  # time of the first announcement; 0 before it
    last_at: float = 0.0

    def check(self, message: pb.Commit, state: bytes) -> None:
        """Raise DigestMismatch if the received KV or recurrent `state` differs from the sent one."""
        sent = message.recurrent.digest if message.HasField("recurrent") else frame_digest(b"")
        if frame_digest(state) != sent:
            raise DigestMismatch(f"handoff {self.handoff}: the state of the recurrent layers differs")
        if list(message.digests) != self.digests:
            wrong = [n for n, pair in enumerate(zip_longest(self.digests, message.digests)) if len(set(pair)) > 1]
            raise DigestMismatch(f"handoff {self.handoff}: frames {wrong} of {len(self.digests)} differ")
        if self.whole is not None and self.whole.value != message.kv_digest:
            what = "the KV as a whole differs" if message.kv_digest else "no digest of the whole KV was sent"
            raise DigestMismatch(f"handoff {self.handoff}: {what}")


def inbound_of(end: Endpoint, handoff: HandoffId, message: pb.Offer) -> tuple[Offer, IncomingHandoff]:
    """Convert an offer for the table and the session. Raises OfferRefused if this worker cannot take it."""
    offer, layout = Offer(message.fingerprint, message.known_tokens, message.skip), end.kv.layout
    if offer.fingerprint != end.fingerprint:
        raise FingerprintRefused(f"model fingerprint {offer.fingerprint!r} differs from {end.fingerprint!r} here")
    if not 0 <= offer.skip < offer.known_tokens <= end.kv.total_blocks * layout.block_size:
        raise OfferRefused(f"{offer.known_tokens} tokens with {offer.skip} skipped do not fit the KV pool")
    coverage = Coverage(layout, offer.skip, offer.known_tokens)
    whole = KVDigest(layout) if end.settings.verify_kv or message.verify_kv else None
    return offer, IncomingHandoff(handoff, offer.known_tokens, offer.skip, coverage, whole=whole)


@dataclass(slots=True, eq=False)
class Frame:
    """An announced frame. `inbound` is None for a piece of the probe's pattern."""

    inbound: IncomingHandoff | None
    spec: FrameSpec
    number: int
    announced_at: float
    digest: bytes = b""  # of a one-sided channel that verifies frames
    places: Places = field(default_factory=Places)  # of a one-sided channel, as they were known before the frame


@dataclass(slots=True, eq=False)
class EndOfHandoff:
    """The end of a handoff, after the channel's first `after` frames. `commit` is None if the sender aborted it."""

    inbound: IncomingHandoff
    commit: pb.Commit | None
    after: int


# An item for the receiving thread. Messages from the control socket are not checked yet. None ends the thread.
Item = Frame | EndOfHandoff | pb.PeerCommand | None


class ReceiveQueue:
    """Items from the event loop and the control socket. Only `EndOfHandoff.after` orders those of different paths."""

    def __init__(self) -> None:
        self.control_socket: ControlPath | None = None  # set by the receiving thread before its first `take`
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()  # bounded by credits and offers

    def put(self, item: Item) -> None:
        self._items.put(item)
        if self.control_socket is not None:
            self.control_socket.wake()

    @property
    def ready(self) -> bool:
        return not self._items.empty() or (self.control_socket is not None and self.control_socket.ready)

    def take(self) -> Item:
        """Wait for the next item. Raises ChannelBroken if the control socket fails."""
        while self.control_socket is not None and self._items.empty():
            if (packet := self.control_socket.receive()) is not None:
                return pb.PeerCommand.FromString(packet)
        return self._items.get()


class ReceiveLoop:
    """The work of the receiving thread (`serve`), and the state that it shares with the event loop."""

    def __init__(
        self,
        end: Endpoint,
        table: HandoffTable,
        sender: WorkerRef,
        transport: Transport,
        reply: Callable[[pb.PeerReply], None],
    ) -> None:
        self.queue = ReceiveQueue()
        self.inbound: dict[HandoffId, IncomingHandoff] = {}  # may receive frames; added before the offer is accepted
        self.open: dict[HandoffId, IncomingHandoff] = {}  # undecided; a removal is the decision to commit or abort
        self.over = False
        self.announced = 0  # frames
        self.received = 0  # frames, counted before the credit is sent
        self._end = end
        self._table = table
        self._sender = sender
        self._transport = transport.name
        self._reply = reply
        self._ring = end.ring_of(transport)
        self._credited = 0
        self._one_sided = transport.one_sided
        self._done_at = 0.0  # when the last frame was done

    def stop(self) -> None:
        """Stop all writes and commits, except for a write that the table has already admitted."""
        self.over = True
        self.queue.put(None)

    def serve(self, channel: ChannelEnd) -> None:
        """Run until `stop`. Raises BatonError if the channel fails or the peer violates the protocol."""
        if channel.control_socket is not None and self.announced:
            raise FrameRefused("a frame was announced before the channel was built")
        self.queue.control_socket = channel.control_socket
        todo: deque[Frame | EndOfHandoff | None] = deque()
        early: deque[EndOfHandoff] = deque()
        while not self.over:
            while not todo or self.queue.ready:
                self._take_up(channel, todo, early)
            item = todo.popleft()
            if isinstance(item, Frame):
                self._receive(channel, item)
            elif item is not None:
                self._conclude(item)
            self._credit(at_once=not todo and not self.queue.ready)

    def _take_up(
        self, channel: ChannelEnd, todo: deque[Frame | EndOfHandoff | None], early: deque[EndOfHandoff]
    ) -> None:
        """Wait for an item. Post a frame's receive immediately; queue an end behind the frames that precede it."""
        item = self.queue.take()
        if isinstance(item, pb.PeerCommand):
            if item.HasField("commit"):
                return self.claim(item)
            if item.HasField("blocks"):
                return self._learn_places(item.blocks, channel.pool)
            item = self.checked(item.frame, self.inbound)
        if isinstance(item, Frame):
            self._start(channel, item)
        if isinstance(item, EndOfHandoff):
            early.append(item)
        else:
            todo.append(item)
        while early and early[0].after <= self.announced:
            todo.append(early.popleft())

    def _start(self, channel: ChannelEnd, frame: Frame) -> None:
        """Post the receive of a frame, or note the places that are known now."""
        with channel.turn():
            channel.start(frame.number, frame.spec.nbytes)
        inbound = frame.inbound
        if channel.pool is not None and inbound is not None:
            if len(inbound.places.blocks) * channel.pool.block_size < frame.spec.end:
                raise FrameRefused(f"frame {frame.number}: its places in the sender's pool are not known")
            frame.places = replace(inbound.places)

    def _learn_places(self, message: pb.PoolBlocks, pool: RemotePool | None) -> None:
        """Take the places of a handoff's KV, for the frames that follow. Raises FrameRefused if they are not in the
        sender's pool, or of no accepted handoff.
        """
        inbound = self.inbound.get(convert.handoff_from_pb(message.handoff))
        if inbound is None or pool is None:
            raise FrameRefused("places in the sender's pool belong to no accepted handoff of a one-sided channel")
        total, most = pool.total_blocks, -(-inbound.known_tokens // pool.block_size)
        if len(message.blocks) != len(message.generations) or message.first + len(message.blocks) > most:
            raise FrameRefused(f"{len(message.blocks)} places from block {message.first} of {most} on are not valid")
        if max(message.blocks, default=0) >= total:
            raise FrameRefused(f"block {max(message.blocks)} is not in the sender's pool of {total} blocks")
        inbound.places.replace(message.first, message.blocks, message.generations)

    def take_state(self, message: pb.StatePart) -> None:
        """Append a part of a recurrent state, unless its handoff has ended. Raises FrameRefused if it is too long.
        Called by the event loop.
        """
        handoff, most = convert.handoff_from_pb(message.handoff), self._end.kv.layout.state_bytes
        if (inbound := self.open.get(handoff)) is None:
            return
        inbound.state += [message.data] if message.data else []
        if sum(map(len, inbound.state)) > most:
            raise FrameRefused(
                f"the state of {handoff} has more than the {most} bytes of this model's recurrent layers"
            )

    def claim(self, command: pb.PeerCommand) -> None:
        """Queue a commit behind its frames, or refuse it. Called from either thread."""
        handoff = convert.handoff_from_pb(command.commit.handoff)
        if (inbound := self.open.pop(handoff, None)) is not None:
            self.queue.put(EndOfHandoff(inbound, command.commit, command.after))
        else:
            error = StaleAttempt(f"handoff {handoff} was not offered on this channel")
            self._reply(refusal_to_pb(error, handoff))

    def checked(self, message: pb.FrameAnnounce, known: Mapping[HandoffId, IncomingHandoff]) -> Frame:
        """Return an announced frame if it belongs to a handoff in `known`. Raises FrameRefused if it was not agreed.
        Called by the event loop, or by the receiving thread if the channel has a control socket.
        """
        spec, number, inbound = frame_of(message), message.sequence, None
        if message.HasField("handoff"):
            inbound = known.get(convert.handoff_from_pb(message.handoff))
            if inbound is None or not (inbound.announced.fits if self._one_sided else inbound.announced.accepts)(spec):
                raise FrameRefused(f"frame {number}: {spec} does not continue an accepted handoff")
        elif spec != wire.frame(self._ring) or number >= wire.FRAMES:
            raise FrameRefused(f"frame {number} belongs to no handoff")
        if number != self.announced or spec.nbytes > self._ring.size:
            raise FrameRefused(f"frame {number}: expected frame {self.announced} of at most {self._ring.size} bytes")
        if self.announced - self.received >= self._ring.slots:
            raise FrameRefused(f"frame {number}: more than {self._ring.slots} in flight")
        self.announced += 1
        return Frame(inbound, spec, number, time.monotonic(), message.digest)

    def _receive(self, channel: ChannelEnd, frame: Frame) -> None:
        channel.finish(frame.number)
        inbound, pool, size = frame.inbound, channel.pool, frame.spec.nbytes
        if inbound is None:
            piece = channel.slot(frame.number)[:size] if pool is None else pool.probe(frame.number, size)
            self._check_pattern(frame, piece)
        elif pool is not None and not inbound.dropped:
            self._writing(inbound, partial(self._copy, pool, inbound, frame))
        elif not inbound.dropped:
            data = channel.slot(frame.number)[:size]
            inbound.digests.append(wire_digest(data))
            if inbound.whole is not None:
                inbound.whole.add(frame.spec, data)
            self._writing(inbound, partial(self._write, frame.spec, data))
        now = time.monotonic()
        if inbound is not None:
            inbound.busy_s += now - max(frame.announced_at, self._done_at)
            inbound.first_at = inbound.first_at or frame.announced_at
            inbound.last_at = now
        self._done_at = now
        self.received += 1

    def _credit(self, *, at_once: bool) -> None:
        """Return slots to the sender: half a ring at a time, or all of them if nothing is waiting. So the answer to a
        commit leaves before the credits of its frames.
        """
        if self.received - self._credited < (1 if at_once else max(1, self._ring.slots // 2)):
            return
        self._credited = self.received
        self._hurry(pb.PeerReply(credit=pb.Credit(sequence=self.received - 1)))

    def _hurry(self, reply: pb.PeerReply) -> None:
        if self.queue.control_socket is not None:
            self.queue.control_socket.send(reply.SerializeToString())
        else:
            self._reply(reply)

    def _copy(self, pool: RemotePool, inbound: IncomingHandoff, frame: Frame, blocks: Sequence[int]) -> None:
        """Read a frame from the sender's pool, verify and record it. If its blocks were given away, the sender withdrew
        it. Raises DigestMismatch.
        """
        kv, spec = self._end.kv, frame.spec
        frame.places.fresh = inbound.places.fresh
        whole = pool.read(kv, spec, frame.places, blocks)
        inbound.places.fresh = frame.places.fresh
        if not whole:
            return inbound.announced.spoiled(spec)
        if frame.digest and frame.digest != wire_digest(kv.copied(spec.layers, blocks, spec.begin, spec.end)):
            raise DigestMismatch(f"handoff {inbound.handoff}: frame {frame.number} differs")
        return inbound.announced.read(spec)

    def _check_pattern(self, frame: Frame, data: Tensor) -> None:
        if not torch.equal(data.cpu(), pattern(frame.number, frame.spec.nbytes)):
            raise FrameRefused(f"the {self._transport} channel changes bytes: frame {frame.number} of its probe")
        if frame.number == wire.FRAMES - 1:
            self._reply(pb.PeerReply(probed=pb.Probed(frames=wire.FRAMES)))

    def _write(self, spec: FrameSpec, data: Tensor, blocks: Sequence[int]) -> None:
        self._end.kv.scatter(spec.layers, blocks, spec.begin, spec.end, data)
        self._end.kv.settle()  # before the blocks or the slot are reused

    def _writing(self, inbound: IncomingHandoff, write: Callable[[Sequence[int]], None]) -> None:
        """Call `write` with the blocks. A HandoffError drops the handoff, and the sender gets it."""
        try:
            with self._table.writing(inbound.handoff, self._sender) as blocks:
                # Set before `lost` reaches the table: the table admits this write for a newer channel of the sender.
                if self.over:
                    raise StaleAttempt(f"handoff {inbound.handoff}: its channel is closed")
                write(blocks)
        except HandoffError as error:
            inbound.dropped = True
            if isinstance(error, DigestMismatch):
                self._table.aborted(inbound.handoff, self._sender)
            self._reply(refusal_to_pb(error, inbound.handoff))

    def _conclude(self, ended: EndOfHandoff) -> None:
        """Commit or drop an ended handoff. Until its commit was answered, it is in `inbound` and keeps the session."""
        if ended.commit is not None:
            self._answer(ended.inbound, ended.commit)
        del self.inbound[ended.inbound.handoff]

    def _answer(self, inbound: IncomingHandoff, message: pb.Commit) -> None:
        """Commit or refuse. A bad commit raises InvalidRequest or FrameRefused; the session ends."""
        if not inbound.announced.complete and (self._one_sided or inbound.dropped):
            error = StaleAttempt(f"handoff {inbound.handoff}: not all of its KV was read")
            return self._reply(refusal_to_pb(error, inbound.handoff))
        if not inbound.announced.complete:
            text = f"only {inbound.announced.nbytes} bytes were announced, which is incomplete"
            raise FrameRefused(f"commit of {inbound.handoff}: {text}")
        end = end_of(message, b"".join(inbound.state))
        if end.spec is not None and len(end.spec) != inbound.known_tokens + 1:
            text = f"{len(end.spec)} tokens, but {inbound.known_tokens} were offered"
            raise FrameRefused(f"commit of {inbound.handoff}: {text}")
        try:
            self._commit(inbound, end, message)
        except HandoffError as error:
            self._reply(refusal_to_pb(error, inbound.handoff))
        else:
            self._hurry(pb.PeerReply(commit_ack=pb.CommitAck(handoff=message.handoff)))

    def _commit(self, inbound: IncomingHandoff, end: PushEnd, message: pb.Commit) -> None:
        if inbound.dropped or self.over:
            raise StaleAttempt(f"handoff {inbound.handoff} has ended here")
        try:
            if self._one_sided and inbound.whole is not None:
                blocks = partial(self._table.writing, inbound.handoff, self._sender)
                inbound.whole.add_all(self._end.kv, blocks, inbound.skip, inbound.known_tokens)
            data = end.state.data if isinstance(end.state, RecurrentState) else b"".join(inbound.state)
            inbound.check(message, data)
        except DigestMismatch:
            self._table.aborted(inbound.handoff, self._sender)
            raise
        state = CommitState(
            spec=end.spec,
            first=end.first,
            state=end.state,
            transfer_s=inbound.busy_s,
            commit_s=time.monotonic() - inbound.last_at,
            kv_bytes=inbound.announced.nbytes,
            transport=self._transport,
            began_at=inbound.first_at,
            ended_at=inbound.last_at,
        )
        self._table.commit(inbound.handoff, self._sender, state)
