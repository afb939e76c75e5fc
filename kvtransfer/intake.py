"""The receiving thread of one channel: bytes to staging, staging to blocks, digests, commits. In announced order.

It posts a receive only for a frame that the session has checked against the plan, always into staging that belongs to
this channel. A frame of a handoff that ended meanwhile is still received, so that the channel stays in order, and is
then dropped.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog
import torch

from baton.errors import BatonError, ChannelBroken, DigestMismatch, HandoffError, StaleAttempt
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.handoff import CommitState
from kvtransfer.plan import staging_bytes
from kvtransfer.refusals import refusal_to_pb
from kvtransfer.transport import Side, wire_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.core import HandoffId, SequenceSpec, Token, WorkerRef
    from baton.engine.kv import KVCache
    from kvtransfer.handoff import HandoffTable, TransferSettings
    from kvtransfer.plan import FrameSpec
    from kvtransfer.transport import ChannelEnd, ChannelName, KeyRelay, Transport

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Inbound:
    """A handoff that was offered on this channel and accepted by the table."""

    handoff: HandoffId
    known_tokens: int
    plan: tuple[FrameSpec, ...]
    announced: int = 0  # frames; the session's
    digests: list[bytes] = field(default_factory=list)  # of frames received; the intake's, like all below
    dropped: bool = False
    first_at: float = 0.0
    last_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Frame:
    """A checked announcement: its bytes come next on the channel."""

    inbound: Inbound
    spec: FrameSpec
    sequence: int
    announced_at: float


@dataclass(frozen=True, slots=True)
class CommitClaim:
    """A commit whose frames were all announced before it."""

    inbound: Inbound
    spec: SequenceSpec
    first: Sequence[Token]
    digests: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class IntakeSetup:
    """What all channels of a receiver have in common."""

    kv: KVCache
    me: WorkerRef
    fingerprint: str
    settings: TransferSettings
    table: HandoffTable
    transport: Transport


class Intake:
    """One per session. `reply` and `failed` are called from its thread."""

    def __init__(
        self,
        setup: IntakeSetup,
        sender: WorkerRef,
        name: ChannelName,
        keys: KeyRelay,
        reply: Callable[[pb.PeerReply], None],
        failed: Callable[[BatonError], None],
    ) -> None:
        self._setup = setup
        self._sender = sender
        self._name = name
        self._keys = keys
        self._reply = reply
        self._failed = failed
        self._stopped = False
        self.received = 0  # frames; counted before their credit is given
        self._items: queue.SimpleQueue[Frame | CommitClaim | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kv-recv-{name}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def put(self, item: Frame | CommitClaim) -> None:
        """Next in order. Never blocks: the session bounds it by credits and accepted offers."""
        self._items.put(item)

    def stop(self) -> None:
        """No block is written and no commit is made from now on, but by a write that the table has let in already."""
        self._stopped = True
        self._items.put(None)

    def join(self) -> None:
        """Wait for the thread: at most the deadline of what is on the wire."""
        self._thread.join()

    def _run(self) -> None:
        channel: ChannelEnd | None = None
        try:
            channel = self._open()
            self._serve(channel)
        except BatonError as error:
            self._failed(error)
        except Exception as error:  # the boundary of this thread: the sender must hear that the channel is gone
            log.exception("channel failed", channel=str(self._name))
            self._failed(ChannelBroken(f"channel {self._name}: {type(error).__name__} at the receiver"))
        finally:
            if channel is not None:
                channel.close()

    def _open(self) -> ChannelEnd:
        settings, transport = self._setup.settings, self._setup.transport
        nbytes = staging_bytes(self._setup.kv.layout, settings.frame_size)
        self._staging = torch.empty(nbytes, dtype=torch.uint8, device=transport.device)
        return transport.open(self._name, Side.RECEIVER, self._keys, settings.frame_deadline_s)

    def _serve(self, channel: ChannelEnd) -> None:
        while (item := self._items.get()) is not None:
            if isinstance(item, Frame):
                self._receive(channel, item)
            else:
                self._answer(item)

    def _receive(self, channel: ChannelEnd, frame: Frame) -> None:
        inbound, data = frame.inbound, self._staging[: frame.spec.nbytes]
        inbound.first_at = inbound.first_at or frame.announced_at
        channel.recv(data)
        if not inbound.dropped:
            inbound.digests.append(wire_digest(data))
            self._write(inbound, frame.spec, data)
        inbound.last_at = time.monotonic()
        self.received += 1
        self._reply(pb.PeerReply(credit=pb.Credit(sequence=frame.sequence)))

    def _write(self, inbound: Inbound, spec: FrameSpec, data: torch.Tensor) -> None:
        try:
            with self._setup.table.writing(inbound.handoff, self._sender) as blocks:
                if self._stopped:  # set before the table heard `lost`: what it lets in now is for a newer channel
                    raise StaleAttempt(f"handoff {inbound.handoff}: its channel is closed")
                self._setup.kv.scatter(spec.layers, blocks[spec.blocks], data)
        except HandoffError as error:
            inbound.dropped = True
            self._reply(refusal_to_pb(error, inbound.handoff))

    def _answer(self, claim: CommitClaim) -> None:
        handoff = claim.inbound.handoff
        try:
            self._commit(claim)
        except HandoffError as error:
            self._reply(refusal_to_pb(error, handoff))
        else:
            self._reply(pb.PeerReply(commit_ack=pb.CommitAck(handoff=convert.handoff_to_pb(handoff))))

    def _commit(self, claim: CommitClaim) -> None:
        inbound = claim.inbound
        if inbound.dropped or self._stopped:
            raise StaleAttempt(f"handoff {inbound.handoff} has ended here")
        if wrong := _first_difference(inbound.digests, claim.digests):
            self._setup.table.aborted(inbound.handoff, self._sender)
            raise DigestMismatch(f"handoff {inbound.handoff}: {wrong}")
        state = CommitState(
            spec=claim.spec,
            first=claim.first,
            transfer_s=inbound.last_at - inbound.first_at,
            commit_s=time.monotonic() - inbound.last_at,
            kv_bytes=sum(frame.nbytes for frame in inbound.plan),
            transport=self._setup.transport.name,
        )
        self._setup.table.commit(inbound.handoff, self._sender, state)


def _first_difference(ours: Sequence[bytes], theirs: Sequence[bytes]) -> str:
    if len(ours) != len(theirs):
        return f"{len(theirs)} digests for {len(ours)} frames"
    return next(
        (f"frame {index}" for index, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) > 1), ""
    )
