"""Messages that both ends of a Peer stream build and parse, and the probe that tests and measures a new channel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from baton.core import HandoffId, RecurrentState, ThinkingState
from baton.engine.memory.exposed import PROBE_BYTES, PROBES
from baton.errors import BatonError, ChannelBroken, DigestMismatch, HandoffError, OfferRefused, StaleAttempt
from baton.hashing import frame_digest
from baton.rpc import convert
from baton.rpc.convert import thinking_from_pb, thinking_to_pb
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.frames import FrameSpec
from kvtransfer.handoff import PushEnd, PushJob
from kvtransfer.transports.base import Ring


class VersionRefused(OfferRefused):
    """The peer uses another protocol version, or no common transport."""


class FingerprintRefused(OfferRefused):
    """The peer has another model, dtype or KV layout."""


class FrameRefused(ChannelBroken):
    """A frame or protocol step that was not agreed. Nothing was received for it; the channel is closed."""


# The first type that fits an exception gives its reason.
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
    """Yield the offer, which the receiver may refuse before any KV moves, and the job's request for a fetch."""
    handoff = convert.handoff_to_pb(job.handoff)
    lengths = {"known_tokens": job.known_tokens, "skip": job.skip}
    yield pb.PeerCommand(offer=pb.Offer(handoff=handoff, fingerprint=fingerprint, verify_kv=job.verify, **lengths))
    if job.fetch is not None:
        begin, end = job.fetch
        yield pb.PeerCommand(fetch=pb.Fetch(handoff=handoff, begin=begin, end=end, verify_kv=job.verify))


def commit_of(handoff: HandoffId, end: PushEnd, digests: Sequence[bytes], kv_digest: bytes) -> pb.Commit:
    """Build the commit: everything that decoding needs except KV, and the digests of the KV and of recurrent state."""
    state, recurrent = end.state, None
    if isinstance(state, RecurrentState):
        recurrent = pb.RecurrentState(position=state.position, digest=frame_digest(state.data))
    return pb.Commit(
        handoff=convert.handoff_to_pb(handoff),
        spec=None if end.spec is None else convert.spec_to_pb(end.spec),
        first=convert.tokens_to_pb(end.first),
        digests=digests,
        kv_digest=kv_digest,
        thinking=thinking_to_pb(state if isinstance(state, ThinkingState) else None),
        recurrent=recurrent,
    )


STATE_PART_BYTES = 4 << 20  # far below the largest message


def state_parts(handoff: HandoffId, end: PushEnd) -> Iterator[pb.PeerCommand]:
    """Yield the parts of a recurrent state. They precede the commit."""
    data = end.state.data if isinstance(end.state, RecurrentState) else b""
    for at in range(0, len(data), STATE_PART_BYTES):
        part = pb.StatePart(handoff=convert.handoff_to_pb(handoff), data=data[at : at + STATE_PART_BYTES])
        yield pb.PeerCommand(state=part)


def end_of(message: pb.Commit, data: bytes = b"") -> PushEnd:
    """Parse a commit, and the received `data` of a recurrent state. Raises InvalidRequest, or FrameRefused for a
    state without a sequence, or for two states.
    """
    spec = convert.spec_from_pb(message.spec) if message.HasField("spec") else None
    thinking = thinking_from_pb(message.thinking) if message.HasField("thinking") else None
    recurrent = RecurrentState(message.recurrent.position, data) if message.HasField("recurrent") else None
    if spec is None and (thinking or recurrent):
        raise FrameRefused(f"commit: {'thinking' if thinking else 'recurrent'}: must not be set without a sequence")
    if thinking and recurrent:
        raise FrameRefused("commit: thinking and recurrent: only one of them may be set")
    return PushEnd(spec, convert.tokens_from_pb(message.first), thinking or recurrent)


def announcement(handoff: HandoffId | None, sequence: int, frame: FrameSpec, digest: bytes = b"") -> pb.FrameAnnounce:
    """Announce `frame` as number `sequence` of the channel. `handoff` is None for a frame of the probe."""
    named = None if handoff is None else convert.handoff_to_pb(handoff)
    return pb.FrameAnnounce(handoff=named, sequence=sequence, digest=digest, **asdict(frame))


_LISTED = 2048  # blocks in one message, which must fit in a packet


def places_of(
    handoff: HandoffId, first: int, blocks: Sequence[int], generations: Sequence[int]
) -> Iterator[pb.PeerCommand]:
    """Yield the messages that list the blocks from number `first` of the sequence on."""
    for at in range(0, len(blocks), _LISTED):
        piece = slice(at, at + _LISTED)
        listed = pb.PoolBlocks(
            handoff=convert.handoff_to_pb(handoff),
            first=first + at,
            blocks=blocks[piece],
            generations=generations[piece],
        )
        yield pb.PeerCommand(blocks=listed)


def frame_of(message: pb.FrameAnnounce) -> FrameSpec:
    """Parse an announcement without any check."""
    return FrameSpec(message.layer_begin, message.layer_end, message.begin, message.end, message.nbytes)


def refusal_to_pb(error: BatonError, handoff: HandoffId | None = None) -> pb.PeerReply:
    """Build a refusal; without `handoff` it ends the stream. Errors other than HandoffError have the reason FRAME."""
    reason = next((reason for reason, kind in _REASONS if isinstance(error, kind)), pb.HANDOFF_REFUSAL_FRAME)
    named = None if handoff is None else convert.handoff_to_pb(handoff)
    return pb.PeerReply(refused=pb.HandoffRefused(handoff=named, reason=reason, detail=str(error)))


def refusal_from_pb(refused: pb.HandoffRefused) -> HandoffError:
    """Parse a refusal. An unknown reason gives a plain HandoffError."""
    kind = dict(_REASONS).get(refused.reason, HandoffError)
    return kind(refused.detail)


FRAMES = PROBES


def frame(ring: Ring) -> FrameSpec:
    """Return the shape of every frame of the probe: bytes without layers or positions. There are enough to measure the
    bandwidth, and too few to delay the channel.
    """
    return FrameSpec(0, 0, 0, 0, min(ring.size, PROBE_BYTES))
