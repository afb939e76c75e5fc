"""What both ends of a Peer stream say in the same words: announcements, and refusals as exceptions and back.

The probe of a channel when it is opened: a known pattern, and how fast it came through.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import torch

from baton.errors import BatonError, ChannelBroken, DigestMismatch, HandoffError, OfferRefused, StaleAttempt
from baton.rpc import convert
from baton.rpc.convert import thinking_from_pb, thinking_to_pb
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.frames import FrameSpec
from kvtransfer.handoff import PushEnd

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from baton.core import HandoffId
    from kvtransfer.handoff import PushJob
    from kvtransfer.transports.base import Ring


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


def offer_of(job: PushJob, fingerprint: str) -> Iterator[pb.PeerCommand]:
    """What the receiver may refuse before any KV moves, and what the sender would like to be sent itself."""
    handoff = convert.handoff_to_pb(job.handoff)
    lengths = {"known_tokens": job.known_tokens, "skip": job.skip}
    yield pb.PeerCommand(offer=pb.Offer(handoff=handoff, fingerprint=fingerprint, verify_kv=job.verify, **lengths))
    if job.fetch is not None:
        begin, end = job.fetch
        yield pb.PeerCommand(fetch=pb.Fetch(handoff=handoff, begin=begin, end=end, verify_kv=job.verify))


def commit_of(handoff: HandoffId, end: PushEnd, digests: Sequence[bytes], kv_digest: bytes) -> pb.Commit:
    """All that decoding needs beside KV, and what the KV must add up to."""
    return pb.Commit(
        handoff=convert.handoff_to_pb(handoff),
        spec=None if end.spec is None else convert.spec_to_pb(end.spec),
        first=convert.tokens_to_pb(end.first),
        digests=digests,
        kv_digest=kv_digest,
        thinking=thinking_to_pb(end.thinking),
    )


def end_of(message: pb.Commit) -> PushEnd:
    """What `commit_of` was given. Raises InvalidRequest; FrameRefused for a thinking state of no sequence."""
    spec = convert.spec_from_pb(message.spec) if message.HasField("spec") else None
    thinking = thinking_from_pb(message.thinking) if message.HasField("thinking") else None
    if spec is None and thinking is not None:
        raise FrameRefused("commit: thinking: must not be set where nobody decodes")
    return PushEnd(spec, convert.tokens_from_pb(message.first), thinking)


def announcement(handoff: HandoffId | None, sequence: int, frame: FrameSpec) -> pb.FrameAnnounce:
    """Frame number `sequence` of the channel is this rectangle of the handoff; None: a piece of the probe's pattern."""
    message = pb.FrameAnnounce(sequence=sequence, **asdict(frame))
    if handoff is not None:
        message.handoff.CopyFrom(convert.handoff_to_pb(handoff))
    return message


def frame_of(message: pb.FrameAnnounce) -> FrameSpec:
    """The rectangle that was announced; nothing of it is checked."""
    return FrameSpec(message.layer_begin, message.layer_end, message.begin, message.end, message.nbytes)


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


FRAMES = 4
_MOST = 1 << 20  # bytes of a frame: enough to see the bandwidth, few enough not to be felt
_STEP = np.uint64(0x9E3779B97F4A7C15)


def frame(ring: Ring) -> FrameSpec:
    """What is announced for each frame of the probe: a rectangle of nothing."""
    return FrameSpec(0, 0, 0, 0, min(ring.size, _MOST))


def pattern(number: int, nbytes: int) -> Tensor:
    """What frame `number` of a channel holds: uint8 [nbytes], no two words of it alike, no two frames alike."""
    words = np.arange(1, -(-nbytes // 8) + 1, dtype=np.uint64) * _STEP + np.uint64(number << 32)
    return torch.from_numpy(words.view(np.uint8)[:nbytes])
