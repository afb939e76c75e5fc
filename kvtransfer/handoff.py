"""Values that the two ends of a handoff exchange, and the table that decides which KV is accepted.

A push starts with a `PushJob`, is fed by `computed` calls, ends with a `PushEnd` and returns a `PushResult` or a
`HandoffError`. The receiver asks its `HandoffTable`, the authority over the reservations, at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from baton.core import HandoffId, SequenceSpec, SequenceState, Token, WorkerRef
from baton.errors import HandoffError


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """Transfer settings. `frame_deadline_s` limits every single step (a frame, an answer), never a time in a queue."""

    transport: str = "auto"  # auto | shm | cuda_ipc | nixl | nccl | gloo | grpc | memory
    frame_size: int = 4 << 20  # bytes; the receiver's value holds for the channel
    credits: int = 4  # frames in flight, and slots of the staging ring; the receiver's value holds
    coalesce_below: int = 256 << 10  # bytes to wait for before a frame is sent, while there is more to compute
    frame_deadline_s: float = 10.0
    bind_host: str = "127.0.0.1"  # gloo and nixl listen and connect here
    interface: str | None = None  # for NCCL, to which None leaves the choice, and NIXL, which takes that of `bind_host`
    staging_memory: int = 1 << 30  # bytes of all rings; an idle channel is closed if they are used up
    encrypted: bool = False  # `auto` never sends KV unencrypted to another machine
    verify_frames: bool = False  # also within a host, where the receiver reads the sender's memory
    verify_kv: bool = False  # also verify a digest of the whole KV, independent of frames


@dataclass(frozen=True, slots=True)
class PushJob:
    """A transfer of positions [skip, known_tokens) to the reservation at `to`, which has the first `skip` positions."""

    handoff: HandoffId
    to: WorkerRef
    known_tokens: int
    skip: int = 0
    fetch: tuple[int, int] | None = None  # skipped positions [begin, end) that the pusher lacks and requests
    verify: bool = False  # verify a digest of the whole KV, and of fetched KV, whatever the settings are


@dataclass(frozen=True, slots=True)
class PushEnd:
    """The end of a computed push. KV of the first token is not sent: `len(spec) == known_tokens + 1`."""

    spec: SequenceSpec | None = None  # None in the answer to a fetch: no decoding follows
    first: Sequence[Token] = ()  # as sent to the router
    state: SequenceState | None = None  # of models that have one, at the first position without sent KV


@dataclass(frozen=True, slots=True)
class PushResult:
    """The outcome of a push with an accepted commit. Times are in seconds, by the pusher's clock."""

    nbytes: int
    frames: int
    exposed_s: float  # from `finish` to the acknowledgement
    round_trip_s: float  # of the offer and its answer
    filling_s: float  # spent on reading KV into frames
    transport: str


@dataclass(frozen=True, slots=True)
class Reports:
    """Callbacks of a sender: `done` exactly once per push, `unfetched` if its fetch was refused."""

    done: Callable[[HandoffId, PushResult | HandoffError], None]
    unfetched: Callable[[HandoffId], None] = lambda handoff: None


@dataclass(frozen=True, slots=True)
class Offer:
    """A sender's offer: KV of positions [skip, known_tokens)."""

    fingerprint: str
    known_tokens: int
    skip: int


@dataclass(frozen=True, slots=True)
class CommitState:
    """Everything that decoding needs except KV, and the figures of the transfer.

    `transfer_s` adds up the times of all frames. A frame counts from its announcement, or from the end of the previous
    frame if that is later, until it is in its blocks.
    """

    spec: SequenceSpec | None  # None if the KV was fetched
    first: Sequence[Token]
    transfer_s: float
    commit_s: float  # from the end of the last frame until the commit was checked
    kv_bytes: int
    transport: str
    state: SequenceState | None = None
    began_at: float = 0.0  # announcement of the first frame, in monotonic seconds of this worker
    ended_at: float = 0.0  # end of the last frame, likewise


class HandoffTable(Protocol):
    """A worker's reservations, as transfers use them. Thread-safe; no method blocks longer than a block copy. `writing`
    and `commit` run on a receiving thread, the others in the event loop.
    """

    def offer(self, handoff: HandoffId, sender: WorkerRef, offer: Offer) -> None:
        """Bind the reservation to this sender. Raises OfferRefused or StaleAttempt."""

    def writing(self, handoff: HandoffId, sender: WorkerRef) -> AbstractContextManager[Sequence[int]]:
        """Hold the block ids to write; fencing and freeing wait for the exit. Entering raises StaleAttempt."""

    def commit(self, handoff: HandoffId, sender: WorkerRef, commit: CommitState) -> None:
        """Accept the commit, exactly once. Raises StaleAttempt."""

    def fetch(self, handoff: HandoffId, sender: WorkerRef, begin: int, end: int, *, verify: bool = False) -> None:
        """Request a push of these cached positions and return immediately. Raises HandoffError if they are not here."""

    def aborted(self, handoff: HandoffId, sender: WorkerRef) -> None:
        """Fence a handoff that `sender` aborted or corrupted. No-op if it is not bound to `sender` or is committed."""

    def lost(self, sender: WorkerRef) -> None:
        """Fence all uncommitted handoffs of `sender`, because its channel is closed."""
