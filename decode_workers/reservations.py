"""The reservation table: the one authority on who may write which blocks here, and whose commit counts.

    open ──> RESERVED ──offer──> RECEIVING ──commit (once)──> COMMITTED ──adopt──> the engine's
                 │                   │                            │
                 └──fence, abort, lost channel, deadline──> FENCED ──take──> blocks freed

`open`, `fence`, `take` and `expired` are called by the engine thread, the rest by transfer threads and the event loop.
An entry's lock is held while KV is written into its blocks, so whoever fences or frees it waits for that write.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.core import HandoffId, WorkerRef
from baton.errors import OfferRefused, StaleAttempt
from baton.worker.attempts import Attempts

if TYPE_CHECKING:
    from baton.engine.blocks import Allocation
    from kvtransfer.handoff import CommitState, Offer


class State(enum.Enum):
    """How far a handoff got here."""

    RESERVED = enum.auto()
    RECEIVING = enum.auto()
    COMMITTED = enum.auto()
    FENCED = enum.auto()


@dataclass(slots=True)
class Entry:
    """One handoff's blocks here, and how far it got. `lock` guards `state` and every write into the blocks."""

    handoff: HandoffId
    allocation: Allocation
    known_tokens: int
    deadline: float | None
    state: State = State.RESERVED
    sender: WorkerRef | None = None
    blocks: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def require(self, state: State, sender: WorkerRef) -> None:
        if self.state is not state:
            raise StaleAttempt(f"{self.handoff} is {self.state.name}, not {state.name}")
        if self.sender != sender:
            raise StaleAttempt(f"{self.handoff} was opened by {self.sender}, not by {sender}")


class Reservations:
    """Implements `kvtransfer.handoff.HandoffTable`. `on_commit(handoff, state)` is called exactly once per handoff."""

    def __init__(self, fingerprint: str, block_size: int, on_commit: Callable[[HandoffId, CommitState], None]) -> None:
        self._fingerprint = fingerprint
        self._block_size = block_size
        self._on_commit = on_commit
        self._lock = threading.Lock()
        self._entries: dict[HandoffId, Entry] = {}
        self._attempts = Attempts()  # the engine thread's alone

    # --- the engine thread ---------------------------------------------------------------------------------------

    def check_new(self, handoff: HandoffId) -> None:
        """Raises StaleAttempt if this attempt, or a later one, was seen here."""
        self._attempts.check_new(handoff)

    def open(self, handoff: HandoffId, allocation: Allocation, known_tokens: int, deadline: float | None) -> None:
        """Enter a reservation. Raises StaleAttempt for an attempt that is not newer than all seen of its request."""
        self.check_new(handoff)
        self._attempts.saw(handoff)
        with self._lock:
            self._entries[handoff] = Entry(handoff, allocation, known_tokens, deadline)

    def fence(self, handoff: HandoffId) -> State:
        """After this, `handoff` is never committed here, unless it was: returns FENCED or COMMITTED.

        An unknown handoff is FENCED too: without a reservation there is no commit, and none is opened later.
        """
        self._attempts.saw(handoff)
        with self._lock:
            entry = self._entries.get(handoff)
        if entry is None:
            return State.FENCED
        with entry.lock:
            if entry.state is not State.COMMITTED:
                entry.state = State.FENCED
            return entry.state

    def take(self, handoff: HandoffId) -> Allocation | None:
        """Remove the entry, fenced, and hand out its blocks: nobody writes into them any more. None: no such entry."""
        with self._lock:
            entry = self._entries.pop(handoff, None)
        if entry is None:
            return None
        with entry.lock:
            entry.state = State.FENCED
            return entry.allocation

    def expired(self, now: float) -> list[HandoffId]:
        """Handoffs whose deadline passed without a commit."""
        with self._lock:
            entries = [e for e in self._entries.values() if e.deadline is not None and e.deadline <= now]
        return [entry.handoff for entry in entries if entry.state is not State.COMMITTED]

    def __len__(self) -> int:
        return len(self._entries)

    # --- kvtransfer.handoff.HandoffTable ------------------------------------------------------------------------

    def offer(self, handoff: HandoffId, sender: WorkerRef, offer: Offer) -> None:
        """P asks to send. Raises StaleAttempt (no such reservation) or OfferRefused (does not fit)."""
        entry = self._entry(handoff)
        with entry.lock:
            if entry.state is not State.RESERVED:
                raise StaleAttempt(f"{handoff} is {entry.state.name}, not RESERVED")
            if offer.fingerprint != self._fingerprint:
                raise OfferRefused(f"fingerprint: {offer.fingerprint} offered, {self._fingerprint} is served here")
            if offer.known_tokens != entry.known_tokens or offer.skip:
                got = f"{offer.known_tokens} tokens after {offer.skip} offered"
                raise OfferRefused(f"length: {got}, {entry.known_tokens} after 0 reserved")
            entry.state, entry.sender = State.RECEIVING, sender
            entry.blocks = -(-offer.known_tokens // self._block_size)

    @contextlib.contextmanager
    def writing(self, handoff: HandoffId, sender: WorkerRef) -> Iterator[Sequence[int]]:
        """The blocks that the handoff's KV goes to; fence and take wait until this is left. Raises StaleAttempt."""
        entry = self._entry(handoff)
        with entry.lock:
            entry.require(State.RECEIVING, sender)
            yield entry.allocation.blocks[: entry.blocks]

    def commit(self, handoff: HandoffId, sender: WorkerRef, commit: CommitState) -> None:
        """Accept the one commit. Raises StaleAttempt for any other."""
        entry = self._entry(handoff)
        with entry.lock:
            entry.require(State.RECEIVING, sender)
            if len(commit.spec) != entry.known_tokens + 1:
                text = f"the commit knows {len(commit.spec)} tokens, {entry.known_tokens} and the first are due"
                raise OfferRefused(f"length: {text}")
            _check_first(commit)
            entry.state = State.COMMITTED
        self._on_commit(handoff, commit)

    def aborted(self, handoff: HandoffId, sender: WorkerRef) -> None:
        """P gave the handoff up: no commit of it will be accepted."""
        with self._lock:
            entry = self._entries.get(handoff)
        if entry is not None:
            self._give_up(entry, sender)

    def lost(self, sender: WorkerRef) -> None:
        """The channel from `sender` is closed: what it was sending is fenced."""
        with self._lock:
            entries = list(self._entries.values())
        for entry in entries:
            self._give_up(entry, sender)

    def _give_up(self, entry: Entry, sender: WorkerRef) -> None:
        with entry.lock:
            if entry.state is State.RECEIVING and entry.sender == sender:
                entry.state = State.FENCED

    def _entry(self, handoff: HandoffId) -> Entry:
        with self._lock:
            entry = self._entries.get(handoff)
        if entry is None:
            raise StaleAttempt(f"{handoff} has no reservation here")
        return entry


def _check_first(commit: CommitState) -> None:
    """What the router was told must be what decoding goes on from."""
    known = commit.spec.known
    told = [(token.index, token.token_id) for token in commit.first]
    if not known or told != [(len(known) - 1, token_id) for token_id in known[-1:]]:
        raise OfferRefused(f"first: {len(told)} tokens that are not the last of the {len(known)} known")
