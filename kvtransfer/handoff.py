"""The values that the two ends of a handoff take and give, and the table that decides what lands.

A push begins with a `PushJob`, is told what is computed, ends with a `PushEnd`, and comes back as a `PushResult` or a
`HandoffError`. On the other side a `HandoffTable` is asked at each step: it is the authority over the reservations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from baton.core import HandoffId, SequenceSpec, ThinkingState, Token, WorkerRef
    from baton.errors import HandoffError


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """How KV moves. `frame_deadline_s` bounds every single step (a frame, an answer), never a time spent queued."""

    transport: str = "auto"  # auto | gloo | nccl | shm | cuda_ipc | grpc | memory
    frame_size: int = 4 << 20  # bytes; the receiver's value holds for the channel
    credits: int = 4  # frames in flight, and slots of the staging ring; the receiver's value holds
    coalesce_below: int = 256 << 10  # bytes that are waited for before a frame leaves, while there is more to compute
    frame_deadline_s: float = 10.0
    bind_host: str = "127.0.0.1"  # where gloo listens and connects from
    interface: str | None = None  # that NCCL takes; None: which it likes
    staging_memory: int = 1 << 30  # bytes of all rings: when used up, the channel that is idle for longest is closed
    encrypted: bool = False  # `auto` lets no KV leave its machine in the clear
    verify_kv: bool = False  # beside the digest of each frame, one of the whole KV that knows no frames


@dataclass(frozen=True, slots=True)
class PushJob:
    """KV of positions [skip, known_tokens) for the reservation at `to`, which has the first `skip` already.

    `fetch`: positions [begin, end) of these first that the pusher lacks, and wants to be sent. `verify`: a digest of
    the whole KV goes with it, and with what is fetched, whatever the settings say.
    """

    handoff: HandoffId
    to: WorkerRef
    known_tokens: int
    skip: int = 0
    fetch: tuple[int, int] | None = None
    verify: bool = False


@dataclass(frozen=True, slots=True)
class PushEnd:
    """All is computed. `spec.known` ends with the first token, whose KV is not sent: `len(spec) == known_tokens + 1`.

    `first` is what the router was told. `spec` None: the answer to a fetch, after which nobody decodes.
    """

    spec: SequenceSpec | None = None
    first: Sequence[Token] = ()
    thinking: ThinkingState | None = None  # of a model that thinks, at the first position whose KV is not sent


@dataclass(frozen=True, slots=True)
class PushResult:
    """The decode worker accepted the commit. All in seconds, by the pusher's clock.

    `exposed_s`: from `finish` to the acknowledgement. `round_trip_s`: what one message and its answer took (the
    offer). `filling_s`: spent on reading KV into frames.
    """

    nbytes: int
    frames: int
    exposed_s: float
    round_trip_s: float
    filling_s: float
    transport: str


@dataclass(frozen=True, slots=True)
class Reports:
    """Where a sender says what became of a push: `done` exactly once; `unfetched` if its fetch was refused."""

    done: Callable[[HandoffId, PushResult | HandoffError], None]
    unfetched: Callable[[HandoffId], None] = lambda handoff: None


@dataclass(frozen=True, slots=True)
class Offer:
    """What a sender wants to hand over: KV of positions [skip, known_tokens)."""

    fingerprint: str
    known_tokens: int
    skip: int


@dataclass(frozen=True, slots=True)
class CommitState:
    """All that decoding needs beside KV, and what the transfer took.

    `transfer_s`: the time in which frames of it were under way, each from its announcement (or the end of the one
    before, if that is later) until it was in its blocks. `commit_s`: from the last of these until the commit was
    checked. `spec` None: the KV was fetched. `began_at`, `ended_at`: of the first frame's announcement, and of the last
    one's end, in monotonic seconds here.
    """

    spec: SequenceSpec | None
    first: Sequence[Token]
    transfer_s: float
    commit_s: float
    kv_bytes: int
    transport: str
    thinking: ThinkingState | None = None
    began_at: float = 0.0
    ended_at: float = 0.0


class HandoffTable(Protocol):
    """A decode worker's reservations, as transfers see them. Thread-safe; no method blocks longer than a block copy.

    `writing` and `commit` are called in a receiver thread, the others in the asyncio thread.
    """

    def offer(self, handoff: HandoffId, sender: WorkerRef, offer: Offer) -> None:
        """Bind the reservation to this sender. Raises OfferRefused or StaleAttempt."""

    def writing(self, handoff: HandoffId, sender: WorkerRef) -> AbstractContextManager[Sequence[int]]:
        """The block ids to write, held until left: fencing and freeing wait. Raises StaleAttempt on entry."""

    def commit(self, handoff: HandoffId, sender: WorkerRef, commit: CommitState) -> None:
        """Accept, exactly once. Raises StaleAttempt."""

    def fetch(self, handoff: HandoffId, sender: WorkerRef, begin: int, end: int, *, verify: bool = False) -> None:
        """It wants KV of these positions, which are here. Returns at once. Raises HandoffError if they are not."""

    def aborted(self, handoff: HandoffId, sender: WorkerRef) -> None:
        """It gave up, or sent wrong bytes: no commit will come. No-op if not bound to it, or committed already."""

    def lost(self, sender: WorkerRef) -> None:
        """The channel is closed: what this sender offered and did not commit will never be written again."""
