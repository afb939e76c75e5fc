"""What a session knows of the handoffs on its way in."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from baton.errors import DigestMismatch, OfferRefused
from baton.rpc.v1 import peer_pb2 as pb
from kvtransfer.digests import KVDigest
from kvtransfer.handoff import Offer
from kvtransfer.messages import FingerprintRefused
from kvtransfer.plan import Coverage

if TYPE_CHECKING:
    from baton.core import HandoffId
    from kvtransfer.plan import FrameSpec
    from kvtransfer.transport import Endpoint
    from kvtransfer.transports.express import Express


@dataclass(slots=True, eq=False)
class Inbound:
    """A handoff that was offered on this channel and accepted by the table. `dropped`: by whoever knows it first."""

    handoff: HandoffId
    known_tokens: int
    announced: Coverage
    whole: KVDigest | None = None  # None: nobody looks at it
    digests: list[bytes] = field(default_factory=list)
    dropped: bool = False
    busy_s: float = 0.0
    first_at: float = 0.0  # a frame was announced; 0: none was
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
    whole = KVDigest(layout) if end.settings.verify_kv or message.verify_kv else None
    return offer, Inbound(handoff, offer.known_tokens, coverage, whole)


@dataclass(slots=True, eq=False)
class Frame:
    """A frame that was announced, for this handoff; None: a piece of the probe's pattern."""

    inbound: Inbound | None
    spec: FrameSpec
    number: int
    announced_at: float


@dataclass(slots=True, eq=False)
class Ended:
    """The sender has said all of this handoff, with the first `after` frames of the channel. None: it gave up."""

    inbound: Inbound
    commit: pb.Commit | None
    after: int


Item = Frame | Ended | pb.PeerCommand | None
"""What the thread of a session is given: what came by express is still to be checked; None: it is over."""


class Inbox:
    """Items for the thread of a session: put here by the event loop, or come from the sender by `express`.

    Each way keeps its order; between the two there is none, but what `Ended.after` says.
    """

    def __init__(self) -> None:
        self.express: Express | None = None  # set by the thread, before it takes
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()  # bounded by credits and offers

    def put(self, item: Item) -> None:
        """From the event loop."""
        self._items.put(item)
        if self.express is not None:
            self.express.wake()

    @property
    def ready(self) -> bool:
        """Whether there is something to take."""
        return not self._items.empty() or (self.express is not None and self.express.ready)

    def take(self) -> Item:
        """Wait for the next one. Raises ChannelBroken."""
        while self.express is not None and self._items.empty():
            if (packet := self.express.receive()) is not None:
                return pb.PeerCommand.FromString(packet)
        return self._items.get()
