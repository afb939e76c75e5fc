"""What a session knows of the handoffs on its way in."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from baton.errors import DigestMismatch, OfferRefused
from kvtransfer.digests import KVDigest
from kvtransfer.handoff import Offer
from kvtransfer.messages import FingerprintRefused
from kvtransfer.plan import Coverage

if TYPE_CHECKING:
    from baton.core import HandoffId
    from baton.rpc.v1 import peer_pb2 as pb
    from kvtransfer.plan import FrameSpec
    from kvtransfer.transport import Endpoint


@dataclass(slots=True, eq=False)
class Inbound:
    """A handoff that was offered on this channel and accepted by the table."""

    handoff: HandoffId
    known_tokens: int
    announced: Coverage  # the event loop's; all below are the thread's
    whole: KVDigest | None = None  # None: nobody looks at it
    digests: list[bytes] = field(default_factory=list)
    dropped: bool = False
    busy_s: float = 0.0
    last_at: float = 0.0

    def check(self, message: pb.Commit) -> None:
        """Raises DigestMismatch if what came is not what was sent."""
        if list(message.digests) != self.digests:
            wrong = [n for n, pair in enumerate(zip_longest(self.digests, message.digests)) if len(set(pair)) > 1]
            raise DigestMismatch(f"handoff {self.handoff}: frames {wrong} of {len(self.digests)}")
        if self.whole is not None and self.whole.value != message.kv_digest:
            what = "the KV as a whole" if message.kv_digest else "no digest of the whole KV was sent"
            raise DigestMismatch(f"handoff {self.handoff}: {what}")


def inbound_of(end: Endpoint, handoff: HandoffId, message: pb.Offer) -> tuple[Offer, Inbound]:
    """What `message` offers, as the table and the session want it. Raises OfferRefused for what cannot be taken."""
    offer, layout = Offer(message.fingerprint, message.known_tokens, message.skip), end.kv.layout
    if offer.fingerprint != end.fingerprint:
        raise FingerprintRefused(f"model fingerprint {offer.fingerprint!r}, here {end.fingerprint!r}")
    if not 0 <= offer.skip < offer.known_tokens <= end.kv.total_blocks * layout.block_size:
        raise OfferRefused(f"{offer.known_tokens} tokens with {offer.skip} skipped: at least 1 that fits is due")
    coverage = Coverage(layout, offer.skip, offer.known_tokens)
    return offer, Inbound(handoff, offer.known_tokens, coverage, KVDigest(layout) if end.settings.verify_kv else None)


@dataclass(slots=True, eq=False)
class Frame:
    """A frame that was announced, for this handoff; None: a piece of the probe's pattern."""

    inbound: Inbound | None
    spec: FrameSpec
    number: int
    announced_at: float


Item = Frame | tuple[Inbound, "pb.Commit"] | None
"""What the thread of a session is given; None: the session is over."""
