"""What both ends of a Peer stream say in the same words: announcements, and refusals as exceptions and back."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from baton.errors import BatonError, ChannelBroken, DigestMismatch, HandoffError, OfferRefused, StaleAttempt
from baton.rpc import convert
from baton.rpc.v1 import peer_pb2 as pb

if TYPE_CHECKING:
    from baton.core import HandoffId
    from kvtransfer.plan import FrameSpec


class VersionRefused(OfferRefused):
    """The other side speaks another protocol version, or another transport."""


class FingerprintRefused(OfferRefused):
    """The other side has another model, dtype or KV layout."""


class FrameRefused(ChannelBroken):
    """A frame, or a step of the protocol, that was not agreed. Nothing was received for it; the channel is closed."""


# Read downwards: the first type that fits an exception is its reason.
_REASONS: tuple[tuple[pb.HandoffRefusal.ValueType, type[HandoffError]], ...] = (
    (pb.HANDOFF_REFUSAL_VERSION, VersionRefused),
    (pb.HANDOFF_REFUSAL_FINGERPRINT, FingerprintRefused),
    (pb.HANDOFF_REFUSAL_LENGTH, OfferRefused),
    (pb.HANDOFF_REFUSAL_STALE, StaleAttempt),
    (pb.HANDOFF_REFUSAL_DIGEST, DigestMismatch),
    (pb.HANDOFF_REFUSAL_FRAME, FrameRefused),
    (pb.HANDOFF_REFUSAL_BROKEN, ChannelBroken),
)


def announcement(handoff: HandoffId, index: int, sequence: int, frame: FrameSpec) -> pb.FrameAnnounce:
    """Frame `index` of the handoff is the next, number `sequence`, of the channel. The receiver expects just this."""
    return pb.FrameAnnounce(handoff=convert.handoff_to_pb(handoff), index=index, sequence=sequence, **asdict(frame))


def refusal_to_pb(error: BatonError, handoff: HandoffId | None = None) -> pb.PeerReply:
    """`handoff` None: the refusal ends the stream. What is no HandoffError (a malformed message) counts as FRAME."""
    reason = next((reason for reason, kind in _REASONS if isinstance(error, kind)), pb.HANDOFF_REFUSAL_FRAME)
    refused = pb.HandoffRefused(reason=reason, detail=str(error))
    if handoff is not None:
        refused.handoff.CopyFrom(convert.handoff_to_pb(handoff))
    return pb.PeerReply(refused=refused)


def refusal_from_pb(refused: pb.HandoffRefused) -> HandoffError:
    """A reason that this version does not know is a plain HandoffError."""
    kind = dict(_REASONS).get(refused.reason, HandoffError)
    return kind(refused.detail)
