"""Who owns which request's KV: D's writer. The rules and the records in Redis are in `ownership_table`.

`OwnershipLog` keeps Redis off the path of a handoff: a note costs microseconds and never waits, one task writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from baton.core import HandoffId, WorkerRef
from baton.errors import LedgerError
from baton.ledger.beside import BesideWriter
from baton.ledger.ledger import Ledger
from baton.ledger.ownership_table import OwnershipRecord, OwnershipStore, OwnershipTable, RecordState, Write

__all__ = ["LogCounters", "OwnershipLog", "OwnershipRecord", "OwnershipStore", "OwnershipTable", "RecordState", "Write"]

log = structlog.get_logger(__name__)

BATCH = 128
MOST_WRITES = 4  # of one handoff, so as many round trips at most
LINGER_S = 0.1  # PREPARED lasts for as long as a commit takes: written only if that is long, or with something else
REPEAT_S = 1200.0  # a third of the life of a record


@dataclass(slots=True)
class LogCounters:
    """What became of the notes: noted + repeated = coalesced + written + refused + dropped + still pending."""

    noted: int = 0
    repeated: int = 0  # queued again: the store lost something, room ran out, or the record would expire
    coalesced: int = 0  # overtaken by a later state of the same request before it was written
    written: int = 0
    refused: int = 0  # stale: another attempt or incarnation owns the record
    dropped: int = 0  # no room while Redis was away, or not written when the log was closed
    round_trips: int = 0
    failures: int = 0  # round trips that Redis did not answer


@dataclass(slots=True)
class _Entry:
    """The latest state of one request, and how many writes of its handoff were queued."""

    write: Write
    queued: int = 0


class OwnershipLog(BesideWriter):
    """Writes one decode worker's records beside the path, in order for each request. Create it on the event loop.

    At most one round trip is under way, and all that is noted meanwhile goes with the next: one write per request,
    its latest state. So a handoff costs at most `MOST_WRITES` round trips, usually three, under load far fewer.
    While Redis is away it queues up to `max_pending` requests and drops the oldest beyond. Those which are not released
    are remembered all the same, and are written again when Redis is back, or comes back without its data.
    """

    def __init__(self, ledger: Ledger, owner: WorkerRef, *, max_pending: int = 10_000) -> None:
        self.counters = LogCounters()
        self._store = OwnershipStore(ledger.connection)
        self._owner = owner
        self._max_pending = max_pending
        self._entries: dict[str, _Entry] = {}  # held here, or queued
        self._pending: dict[str, None] = {}  # in the order in which they are written
        self._in_flight: list[Write] = []
        self._missing = False  # something that is held was dropped from the queue
        super().__init__(ledger, "ownership records", REPEAT_S)

    def note(self, handoff: HandoffId, router_id: str, state: RecordState, stream: str = "") -> None:
        """Have this transition recorded. From any thread; never blocks, never raises for a Redis that is away.

        `stream`: what its client calls it, if it may be resumed; said once, at any of its states.
        """
        with self._lock:
            self.counters.noted += 1
            if self._closed:
                self.counters.dropped += 1
            elif not self._update(Write(handoff, self._owner, router_id, state, stream)):
                self.counters.coalesced += 1
            else:
                self._enqueue(handoff.request_id)
                self._signal(LINGER_S if state is RecordState.PREPARED else 0.0)

    def _update(self, new: Write) -> bool:
        """Take in what was noted. False: nothing is to be written; it came late, or the next write is the last."""
        entry = self._entries.get(new.handoff.request_id)
        if entry is None or entry.write.handoff.attempt < new.handoff.attempt:
            self._entries[new.handoff.request_id] = _Entry(new)
            return True
        if (new.handoff.attempt, new.state) < (entry.write.handoff.attempt, entry.write.state):
            return False
        entry.write = replace(new, router_id=entry.write.router_id, stream=new.stream or entry.write.stream)
        return entry.queued < MOST_WRITES - 1 or new.state is RecordState.RELEASED

    def _enqueue(self, request_id: str) -> None:
        if request_id in self._pending:
            self.counters.coalesced += 1
            return
        self._entries[request_id].queued += 1
        self._pending[request_id] = None
        self._bound()

    def _bound(self) -> None:
        while len(self._pending) > self._max_pending:
            request_id = next(iter(self._pending))
            del self._pending[request_id]
            self.counters.dropped += 1
            self._missing = True
            if self._entries[request_id].write.state is RecordState.RELEASED:
                del self._entries[request_id]

    def _repeat(self) -> None:
        again = [request_id for request_id in self._entries if request_id not in self._pending]
        self._pending.update(dict.fromkeys(again))  # beyond the bound: these are held, and so is memory for them
        self.counters.repeated += len(again)

    def _left(self) -> int:
        return len(self._pending) + len(self._in_flight)

    async def _write(self) -> LedgerError | None:
        batch = self._take()
        self.counters.round_trips += 1
        answers: Sequence[bool | LedgerError]
        try:
            answers = await self._store.write_many(batch)
        except LedgerError as error:
            answers = [error] * len(batch)
        return self._settle(batch, answers)

    def _take(self) -> list[Write]:
        with self._lock:
            requests = list(self._pending)[:BATCH]
            for request_id in requests:
                del self._pending[request_id]
            self._in_flight = [self._entries[request_id].write for request_id in requests]
            return self._in_flight

    def _settle(self, batch: list[Write], answers: Sequence[bool | LedgerError]) -> LedgerError | None:
        """Count what was decided; what was not goes back to the front of the queue. The last error, if any."""
        error: LedgerError | None = None
        again: list[str] = []
        with self._lock:
            for write, answer in zip(batch, answers, strict=True):
                if not isinstance(answer, LedgerError):
                    self._decided(write, answer)
                    continue
                error = answer
                if write.handoff.request_id in self._entries:
                    again.append(write.handoff.request_id)
                else:  # what came after it was dropped
                    self.counters.dropped += 1
            self._in_flight = []
            self._requeue(again)
            self.counters.failures += error is not None
            if error is None and self._missing:
                self._missing = False
                self._repeat()
        return error

    def _decided(self, write: Write, accepted: bool) -> None:
        """The store has accepted or refused it: what is released, or not ours, need not be remembered any more."""
        if accepted:
            self.counters.written += 1
        else:
            self.counters.refused += 1
            log.info("ownership_write_refused", handoff=write.handoff, state=write.state.name)
        request_id = write.handoff.request_id
        entry, over = self._entries.get(request_id), not accepted or write.state is RecordState.RELEASED
        if over and entry and entry.write == write and request_id not in self._pending:
            del self._entries[request_id]

    def _requeue(self, requests: list[str]) -> None:
        newer, self._pending = self._pending, dict.fromkeys(requests)
        self.counters.coalesced += len(newer.keys() & self._pending.keys())
        self._pending |= newer
        self._bound()

    async def close(self, timeout_s: float = 1.0) -> None:
        """Write what is left, for `timeout_s` at most; the rest is dropped and counted."""
        await super().close(timeout_s)
        self.counters.dropped += self._left()
        self._pending, self._in_flight = {}, []
