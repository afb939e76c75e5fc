"""The values that the two ends of a handoff take and give, and the table that decides what lands.

`PushJob` goes into a `Sender` and comes back as a `PushResult` or a `HandoffError`. On the other side a `HandoffTable`
is asked at each step: it is the authority over the decode worker's reservations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from baton.core import HandoffId, SequenceSpec, Token, WorkerRef


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """How KV moves. `frame_deadline_s` bounds every single step (a frame, an answer), never a time spent queued."""

    transport: str = "auto"  # auto | gloo | nccl | memory
    frame_size: int = 8 << 20  # bytes; the receiver's value holds for the channel
    credits: int = 4  # frames announced and not yet out of staging
    frame_deadline_s: float = 10.0
    bind_host: str = "127.0.0.1"  # where gloo listens and connects from
    idle_channels: int = 64  # more idle ones than this: the least recently used is closed


@dataclass(frozen=True, slots=True)
class PushJob:
    """KV of the first `known_tokens` positions, in `blocks` of the pusher's cache, for the reservation at `to`.

    `spec.known` ends with the first token; `first` is what the router was told. KV of that token is not sent:
    `len(spec) == known_tokens + 1`. `blocks` may be longer than needed.
    """

    handoff: HandoffId
    to: WorkerRef
    blocks: Sequence[int]
    known_tokens: int
    spec: SequenceSpec
    first: Sequence[Token]


@dataclass(frozen=True, slots=True)
class PushResult:
    """The decode worker accepted the commit. `transfer_s`: from the push's turn to the acknowledgement, in seconds."""

    nbytes: int
    transfer_s: float
    transport: str


@dataclass(frozen=True, slots=True)
class Offer:
    """What a sender wants to hand over: KV of `known_tokens` positions from `skip` on, in `frames` frames."""

    fingerprint: str
    known_tokens: int
    skip: int
    frames: int


@dataclass(frozen=True, slots=True)
class CommitState:
    """All that decoding needs beside KV, and what the transfer took.

    `transfer_s`: first frame announced to last one in its blocks. `commit_s`: from there until the commit was checked.
    """

    spec: SequenceSpec
    first: Sequence[Token]
    transfer_s: float
    commit_s: float
    kv_bytes: int
    transport: str


class HandoffTable(Protocol):
    """A decode worker's reservations, as transfers see them. Thread-safe; no method blocks longer than a block copy.

    `offer`, `aborted` and `lost` are called in the asyncio thread, `writing` and `commit` in a receiver thread.
    """

    def offer(self, handoff: HandoffId, sender: WorkerRef, offer: Offer) -> None:
        """Bind the reservation to this sender. Raises OfferRefused or StaleAttempt."""

    def writing(self, handoff: HandoffId, sender: WorkerRef) -> AbstractContextManager[Sequence[int]]:
        """The block ids to write, held until left: fencing and freeing wait. Raises StaleAttempt on entry."""

    def commit(self, handoff: HandoffId, sender: WorkerRef, commit: CommitState) -> None:
        """Accept, exactly once. Raises StaleAttempt."""

    def aborted(self, handoff: HandoffId, sender: WorkerRef) -> None:
        """It gave up, or sent wrong bytes: no commit will come. No-op if not bound to it, or committed already."""

    def lost(self, sender: WorkerRef) -> None:
        """The channel is closed: what this sender offered and did not commit will never be written again."""
