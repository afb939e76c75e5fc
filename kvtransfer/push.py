"""One push under way on a link, and what it says on the Peer stream."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb

if TYPE_CHECKING:
    from baton.errors import HandoffError
    from kvtransfer.handoff import PushJob
    from kvtransfer.plan import FrameSpec

NEVER = float("inf")


class State(enum.Enum):
    """Of a push; the life is drawn in `outbox`."""

    WAITING = enum.auto()
    OFFERED = enum.auto()
    READY = enum.auto()
    SENDING = enum.auto()
    COMMITTED = enum.auto()


@dataclass(slots=True, eq=False)
class Push:
    """State under the outbox's lock; `digests`, `started` and `transfer_s` are the link thread's own."""

    job: PushJob
    state: State = State.WAITING
    deadline: float = NEVER
    plan: tuple[FrameSpec, ...] = ()
    digests: list[bytes] = field(default_factory=list)
    started: float = 0.0
    transfer_s: float = 0.0
    reading: bool = False
    outcome: HandoffError | None = None  # decided while `reading`, reported after it

    @property
    def nbytes(self) -> int:
        return sum(frame.nbytes for frame in self.plan)

    def offer(self, fingerprint: str) -> pb.PeerCommand:
        """What is coming."""
        offer = pb.Offer(
            handoff=convert.handoff_to_pb(self.job.handoff),
            fingerprint=fingerprint,
            known_tokens=self.job.known_tokens,
            frames=len(self.plan),
        )
        return pb.PeerCommand(offer=offer)

    def frame(self, index: int, sequence: int) -> pb.PeerCommand:
        """Frame `index` of the plan comes next, as number `sequence` of the channel."""
        frame = self.plan[index]
        announce = pb.FrameAnnounce(
            handoff=convert.handoff_to_pb(self.job.handoff),
            index=index,
            sequence=sequence,
            layer_begin=frame.layer_begin,
            layer_end=frame.layer_end,
            block_begin=frame.block_begin,
            block_end=frame.block_end,
            nbytes=frame.nbytes,
        )
        return pb.PeerCommand(frame=announce)

    def commit(self) -> pb.PeerCommand:
        """All that decoding needs beside the KV."""
        commit = pb.Commit(
            handoff=convert.handoff_to_pb(self.job.handoff),
            spec=convert.spec_to_pb(self.job.spec),
            first=convert.tokens_to_pb(self.job.first),
            digests=self.digests,
        )
        return pb.PeerCommand(commit=commit)

    def abort(self) -> pb.PeerCommand:
        """It is given up."""
        return pb.PeerCommand(abort=pb.AbortHandoff(handoff=convert.handoff_to_pb(self.job.handoff)))
