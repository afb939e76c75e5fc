"""Sending end of a measured lane: a `Sender`, its Peer stream, and the outcome of each push."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import TYPE_CHECKING
from unittest.mock import patch

from baton.core import HandoffId, Incarnation, Sampling, SequenceSpec, Token, WorkerRef
from baton.errors import HandoffError
from benchmarks.lib.transfer_peer import FINGERPRINT
from kvtransfer.handoff import PushEnd, PushJob, PushResult
from kvtransfer.send_queue import FlowControl
from kvtransfer.sender import GrpcPeerStream, Sender
from kvtransfer.transports.select import make_transports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from baton.engine.kv_cache import KVCache
    from baton.rpc.v1 import peer_pb2 as pb
    from benchmarks.lib.protocol import Answer
    from benchmarks.lib.transfer_partner import Partner
    from kvtransfer.frames import FrameSpec
    from kvtransfer.handoff import TransferSettings
    from kvtransfer.sender import OnEnd, OnReply, PeerStream

WAIT_S = 30.0
LANES = count(1)  # each lane has its own incarnation, so its receiver sees one sender


@dataclass(slots=True, eq=False)
class Told:
    """Record of one push: events, outcome, and monotonic times of its end and of each announced frame."""

    accepted: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    done_at: float = 0.0
    outcome: PushResult | HandoffError | None = None
    announced: list[tuple[float, FrameSpec]] = field(default_factory=list)

    def result(self) -> PushResult:
        """Wait for the result. Raises HandoffError or TimeoutError."""
        if not self.done.wait(WAIT_S):
            raise TimeoutError(f"no report of a push within {WAIT_S} s")
        if not isinstance(self.outcome, PushResult):
            raise self.outcome or HandoffError("no outcome")
        return self.outcome


class Lane:
    """One sender with its own settings, and its receiver in the partner process. Pushes are numbered."""

    def __init__(self, kv: KVCache, partner: Partner, settings: TransferSettings, peer_device: str) -> None:
        self.settings = settings
        self.told: dict[str, Told] = {}
        self.on_done: Callable[[HandoffId, PushResult | HandoffError], None] = self.ended
        self._layers = kv.layout.layers
        self._partner = partner
        opened = partner.ask("open", settings=asdict(settings), device=peer_device)
        self.to = WorkerRef("decode-0", Incarnation(1, opened["counter"]), opened["address"])
        me = WorkerRef("prefill-0", Incarnation(1, next(LANES)), "none")
        transports = make_transports(settings, kv)
        self.sender = Sender(kv, me, FINGERPRINT, settings, transports, self._done, connect=self._connect)
        self._numbers = count(1)

    def new(self) -> HandoffId:
        """Return the id of the next push."""
        handoff = HandoffId(f"push-{next(self._numbers)}", 1)
        self.told[handoff.request_id] = Told()
        return handoff

    def hand_over(self, blocks: Sequence[int], end: PushEnd, *, from_begin: bool) -> dict[str, float]:
        """Hand over computed KV. Returns seconds from `begin`, or from `computed`, until the acknowledgment."""
        handoff, tokens = self.new(), len(end.spec or ()) - 1
        told, began = self.told[handoff.request_id], time.monotonic()
        with patch("kvtransfer.send_queue.FlowControl", self._window):  # applies to a link that this block creates
            self.sender.begin(PushJob(handoff, self.to, tokens))
        if not from_begin:
            told.accepted.wait(WAIT_S)  # happens long before a prompt is computed
            began = time.monotonic()
        self.sender.computed(handoff, blocks, self._layers, tokens)
        self.sender.finish(handoff, end)
        result = told.result()
        there = self.committed(handoff)
        return {
            "seconds": told.done_at - began,
            "exposed_s": result.exposed_s,
            "round_trip_s": result.round_trip_s,
            "filling_s": result.filling_s,
            "transfer_s": there["transfer_s"],
            "commit_s": there["commit_s"],
        }

    def wake(self, blocks: Sequence[int]) -> None:
        """Open and warm up the channel. Replaces a channel that did not survive a pause of the processes."""
        for attempt in range(3):
            try:
                self.hand_over(blocks, end_of(1), from_begin=True)
                return
            except HandoffError:
                if attempt == 2:
                    raise

    def committed(self, handoff: HandoffId) -> Answer:
        """Return the receiver's times of the handoff, and forget it on both sides."""
        self.told.pop(handoff.request_id, None)
        return self._partner.ask("committed", address=self.to.address, handoff=handoff.request_id)

    def close(self) -> None:
        """Close both ends."""
        self.sender.close()
        self._partner.ask("close", address=self.to.address)

    def ended(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        """Record the sender's report."""
        if (told := self.told.get(handoff.request_id)) is not None:
            told.done_at, told.outcome = time.monotonic(), outcome
            told.done.set()

    def _done(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        self.on_done(handoff, outcome)

    def _connect(self, address: str, on_reply: OnReply, on_end: OnEnd) -> PeerStream:
        def noted(reply: pb.PeerReply) -> None:
            on_reply(reply)
            if reply.HasField("offer_accepted"):
                told = self.told.get(reply.offer_accepted.handoff.request_id)
                if told is not None:
                    told.accepted.set()

        return GrpcPeerStream(address, noted, on_end)

    def _window(self, say: Callable[[pb.PeerCommand], None]) -> FlowControl:
        return _Noted(say, self.told)


class _Noted(FlowControl):
    """Flow control that records when frames are announced."""

    def __init__(self, say: Callable[[pb.PeerCommand], None], told: dict[str, Told]) -> None:
        super().__init__(say)
        self._told = told

    def announce(self, handoff: HandoffId | None, frame: FrameSpec, digest: bytes = b"") -> None:
        super().announce(handoff, frame, digest)
        if handoff is not None and (told := self._told.get(handoff.request_id)) is not None:
            told.announced.append((time.monotonic(), frame))


def end_of(tokens: int) -> PushEnd:
    """Return a commit of realistic size, with token ids as long as those of a vocabulary of 32,000."""
    ids = tuple(1000 + position % 31_000 for position in range(tokens))
    return PushEnd(SequenceSpec(ids, Sampling(max_tokens=4, temperature=0.0), (5,)), [Token(0, 5, " five")])
