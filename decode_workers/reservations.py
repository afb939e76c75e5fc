"""The reservation table: the only authority over writes into blocks and over commits on a decode worker.

    open ──> RESERVED ──offer──> RECEIVING ──commit (once)──> COMMITTED ──adopt──> engine
                 │                   │                            │
                 └──fence, abort, lost channel, deadline──> FENCED ──take──> blocks freed

`open`, `fence`, `take` and `expired` run on the engine thread, the rest on transfer threads and the event loop. An
entry's lock is held while KV is written into its blocks, so fencing or freeing it waits for that write.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.core import HandoffId, SequenceSpec, Token, WorkerRef
from baton.engine.block_pool import Reservation
from baton.errors import OfferRefused, StaleAttempt
from baton.event_journal import OFF, History
from baton.metrics.worker import Counts
from baton.worker.service import Attempts
from kvtransfer.handoff import CommitState, Offer, PushJob


class State(enum.Enum):
    """Progress of a handoff on this worker."""

    RESERVED = enum.auto()
    RECEIVING = enum.auto()
    COMMITTED = enum.auto()
    FENCED = enum.auto()


@dataclass(slots=True)
class Entry:
    """The blocks and the state of one handoff. `lock` guards `state` and every write into the blocks."""

    handoff: HandoffId
    reservation: Reservation
    known_tokens: int
    deadline: float | None
    state: State = State.RESERVED
    sender: WorkerRef | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def require(self, state: State, sender: WorkerRef) -> None:
        if self.state is not state:
            raise StaleAttempt(f"{self.handoff} is {self.state.name}, not {state.name}")
        if self.sender != sender:
            raise StaleAttempt(f"{self.handoff} was opened by {self.sender}, not by {sender}")


class Reservations:
    """Implementation of `kvtransfer.handoff.HandoffTable`."""

    def __init__(
        self,
        fingerprint: str,
        on_commit: Callable[[HandoffId, CommitState], None],  # called exactly once per committed handoff
        on_fetch: Callable[[PushJob], None],  # the prefill worker asks for KV cached here
        history: History = OFF,
    ) -> None:
        self.counts = Counts()
        self._fingerprint = fingerprint
        self._on_commit = on_commit
        self._on_fetch = on_fetch
        self._history = history
        self._lock = threading.Lock()
        self._entries: dict[HandoffId, Entry] = {}
        self._attempts = Attempts()  # used only by the engine thread

    # --- the engine thread ---------------------------------------------------------------------------------------

    def check_new(self, handoff: HandoffId) -> None:
        """Raise StaleAttempt if this or a later attempt of the request was seen here."""
        self._attempts.check_new(handoff)

    def open(self, handoff: HandoffId, reservation: Reservation, known_tokens: int, deadline: float | None) -> None:
        """Add a reservation. Raises StaleAttempt unless the attempt is newer than all seen of its request."""
        self.check_new(handoff)
        self._attempts.saw(handoff)
        with self._lock:
            self._entries[handoff] = Entry(handoff, reservation, known_tokens, deadline)

    def fence(self, handoff: HandoffId) -> State:
        """Prevent every later commit of `handoff`. Return COMMITTED if it was committed before, else FENCED. An unknown
        handoff is FENCED too: it has no reservation, and `open` rejects it from now on.
        """
        self._attempts.saw(handoff)
        with self._lock:
            entry = self._entries.get(handoff)
        if entry is None:
            return State.FENCED
        with entry.lock:
            if entry.state is not State.COMMITTED:
                self._end(entry)
            return entry.state

    def take(self, handoff: HandoffId, *, alone: bool = False) -> Reservation | None:
        """Remove the entry, mark it FENCED so that no thread writes its blocks any more, and return the blocks, if any.
        `alone` means that the prompt is computed here, so the handoff is not counted as fenced.
        """
        with self._lock:
            entry = self._entries.pop(handoff, None)
        if entry is None:
            return None
        with entry.lock:
            self._end(entry, counts=not alone)
            return entry.reservation

    def shared(self, handoff: HandoffId) -> list[int]:
        """Return the blocks that were cached before the handoff, or an empty list if it is over."""
        with self._lock:
            entry = self._entries.get(handoff)
        return entry.reservation.shared.blocks if entry is not None else []

    def expired(self, now: float) -> list[HandoffId]:
        """Return the handoffs past their deadline without a commit."""
        entries = [entry for entry in self.entries() if entry.deadline is not None and entry.deadline <= now]
        return [entry.handoff for entry in entries if entry.state is not State.COMMITTED]

    def entries(self) -> list[Entry]:
        with self._lock:
            return list(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    # --- kvtransfer.handoff.HandoffTable ------------------------------------------------------------------------

    def offer(self, handoff: HandoffId, sender: WorkerRef, offer: Offer) -> None:
        """Bind the reservation to its sender. Raises StaleAttempt if there is none, OfferRefused if it does not fit."""
        entry = self._entry(handoff)
        with entry.lock:
            if entry.state is not State.RESERVED:
                raise StaleAttempt(f"{handoff} is {entry.state.name}, not RESERVED")
            if offer.fingerprint != self._fingerprint:
                raise OfferRefused(f"fingerprint: {offer.fingerprint} is offered, {self._fingerprint} is served here")
            cached = entry.reservation.cached_tokens
            if (offer.known_tokens, offer.skip) != (entry.known_tokens, cached):
                got = f"{offer.known_tokens} tokens with {offer.skip} skipped are offered"
                raise OfferRefused(f"length: {got}, {entry.known_tokens} with {cached} skipped are reserved")
            entry.state, entry.sender = State.RECEIVING, sender
            self._history.step("offered", handoff)

    @contextlib.contextmanager
    def writing(self, handoff: HandoffId, sender: WorkerRef) -> Iterator[Sequence[int]]:
        """Yield the blocks of all positions. Blocks of skipped positions are shared and must not be written."""
        entry = self._entry(handoff)
        with entry.lock:
            entry.require(State.RECEIVING, sender)
            yield entry.reservation.blocks

    def commit(self, handoff: HandoffId, sender: WorkerRef, commit: CommitState) -> None:
        """Accept the first commit. Raises StaleAttempt for any other, OfferRefused for wrong tokens."""
        entry = self._entry(handoff)
        with entry.lock:
            entry.require(State.RECEIVING, sender)
            known = len(commit.spec or ())
            if commit.spec is None or known != entry.known_tokens + 1:
                text = f"the commit has {known} tokens instead of {entry.known_tokens} and the first token"
                raise OfferRefused(f"length: {text}")
            _check_first(commit.spec, commit.first)
            entry.state = State.COMMITTED
            self._history.step("committed", handoff)
        self.counts.ended("committed")
        self.counts.moved("received", commit.transport, commit.kv_bytes, 0, commit.transfer_s)
        self._on_commit(handoff, commit)

    def fetch(self, handoff: HandoffId, sender: WorkerRef, begin: int, end: int, *, verify: bool = False) -> None:
        """Push back cached positions that the prefill worker lacks. Raises StaleAttempt or OfferRefused."""
        entry = self._entry(handoff)
        with entry.lock:
            entry.require(State.RECEIVING, sender)
            if not 0 <= begin < end <= entry.reservation.cached_tokens:
                raise OfferRefused(f"positions {begin} to {end}: {entry.reservation.cached_tokens} are cached here")
        self._on_fetch(PushJob(handoff, sender, end, begin, verify=verify))

    def aborted(self, handoff: HandoffId, sender: WorkerRef) -> None:
        with self._lock:
            entry = self._entries.get(handoff)
        if entry is not None:
            self._give_up(entry, sender)

    def lost(self, sender: WorkerRef) -> None:
        for entry in [each for each in self.entries() if each.sender == sender]:  # set once, so it needs no lock
            self._give_up(entry, sender)

    def _give_up(self, entry: Entry, sender: WorkerRef) -> None:
        with entry.lock:
            if entry.state is State.RECEIVING and entry.sender == sender:
                self._end(entry)

    def _end(self, entry: Entry, *, counts: bool = True) -> None:
        if entry.state in {State.RESERVED, State.RECEIVING}:
            self._history.step("fenced", entry.handoff)
            if counts:
                self.counts.ended("fenced")
        entry.state = State.FENCED

    def _entry(self, handoff: HandoffId) -> Entry:
        with self._lock:
            entry = self._entries.get(handoff)
        if entry is None:
            raise StaleAttempt(f"{handoff} has no reservation here")
        return entry


def _check_first(spec: SequenceSpec, first: Sequence[Token]) -> None:
    """Raise OfferRefused unless the tokens sent to the router are those that decoding continues from."""
    known = spec.known
    sent = [(token.index, token.token_id) for token in first]
    if not known or sent != [(len(known) - 1, token_id) for token_id in known[-1:]]:
        raise OfferRefused(f"first: the {len(sent)} tokens are not the last of the {len(known)} known tokens")
