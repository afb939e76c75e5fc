"""Who owns which request's KV: D's writer. The rules and the records in Redis are in `ownership_table`.

`OwnershipLog` keeps Redis off the path of a handoff: a note costs microseconds and never waits, one task writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from baton.core import HandoffId, WorkerRef
from baton.errors import LedgerError
from baton.ledger.ledger import Ledger
from baton.ledger.ownership_table import OwnershipRecord, OwnershipStore, OwnershipTable, RecordState, Write

__all__ = ["LogCounters", "OwnershipLog", "OwnershipRecord", "OwnershipStore", "OwnershipTable", "RecordState", "Write"]

log = structlog.get_logger(__name__)

BATCH = 128
FIRST_DELAY_S = 0.05
LONGEST_DELAY_S = 2.0


@dataclass(slots=True)
class LogCounters:
    """What became of the notes: noted = coalesced + written + refused + dropped + still pending."""

    noted: int = 0
    coalesced: int = 0  # overtaken by a later state of the same request before it was written
    written: int = 0
    refused: int = 0  # stale: another attempt or incarnation owns the record
    dropped: int = 0  # no room while Redis was away, or not written when the log was closed
    round_trips: int = 0
    failures: int = 0  # round trips that Redis did not answer


class OwnershipLog:
    """Writes one decode worker's records beside the path, in order for each request. Create it on the event loop.

    At most one round trip is under way, and all that is noted meanwhile goes with the next: one write per request,
    its latest state. So a handoff costs at most as many round trips as it has states (4), under load far fewer.
    While Redis is away it holds the latest state of up to `max_pending` requests and drops the oldest beyond.
    """

    def __init__(self, ledger: Ledger, owner: WorkerRef, *, max_pending: int = 10_000) -> None:
        self.counters = LogCounters()
        self._store = OwnershipStore(ledger.connection)
        self._owner = owner
        self._max_pending = max_pending
        self._lock = threading.Lock()  # guards what follows, up to the counters; held for microseconds
        self._pending: dict[str, Write] = {}
        self._in_flight: list[Write] = []
        self._signalled = False
        self._closed = False
        self._delay_s = FIRST_DELAY_S
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._task = self._loop.create_task(self._run(), name="ownership-log")

    def note(self, handoff: HandoffId, router_id: str, state: RecordState) -> None:
        """Have this transition recorded. From any thread; never blocks, never raises for a Redis that is away."""
        with self._lock:
            self.counters.noted += 1
            if self._closed:
                self.counters.dropped += 1
                return
            self._merge(Write(handoff, self._owner, router_id, state))
            signal, self._signalled = not self._signalled, True
        if signal:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process is on its way out
                self._loop.call_soon_threadsafe(self._wake.set)

    def _merge(self, write: Write) -> None:
        """Keep the later one of this and what is pending for the request, at its place in the queue."""
        request_id = write.handoff.request_id
        other = self._pending.get(request_id)
        if other is not None:
            self.counters.coalesced += 1
            self._pending[request_id] = _later(other, write)
            return
        if len(self._pending) >= self._max_pending:
            del self._pending[next(iter(self._pending))]
            self.counters.dropped += 1
        self._pending[request_id] = write

    async def _run(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while batch := self._take():
                    await self._write(batch)
                self._drained.set()
        except Exception:
            log.exception("ownership_log_failed")
            raise

    def _take(self) -> list[Write]:
        with self._lock:
            self._signalled = False
            requests = list(self._pending)[:BATCH]
            self._in_flight = [self._pending.pop(request) for request in requests]
            return self._in_flight

    async def _write(self, batch: list[Write]) -> None:
        self.counters.round_trips += 1
        answers: Sequence[bool | LedgerError]
        try:
            answers = await self._store.write_many(batch)
        except LedgerError as error:
            answers = [error] * len(batch)
        failed = self._settle(batch, answers)
        if failed is None:
            self._delay_s = FIRST_DELAY_S
            return
        if self._delay_s == FIRST_DELAY_S:
            log.warning("ownership_log_waits", pending=len(self._pending), error=str(failed))
        await asyncio.sleep(self._delay_s * random.uniform(0.5, 1.0))
        self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)

    def _settle(self, batch: list[Write], answers: Sequence[bool | LedgerError]) -> LedgerError | None:
        """Count what was decided; what was not goes back to the front of the queue. The last error, if any."""
        error: LedgerError | None = None
        again: list[Write] = []
        with self._lock:
            for write, answer in zip(batch, answers, strict=True):
                if isinstance(answer, LedgerError):
                    error = answer
                    again.append(write)
                elif answer:
                    self.counters.written += 1
                else:
                    self.counters.refused += 1
                    log.info("ownership_write_refused", handoff=str(write.handoff), state=write.state.name)
            self._requeue(again)
            self._in_flight = []
            self.counters.failures += error is not None
        return error

    def _requeue(self, writes: list[Write]) -> None:
        if not writes:
            return
        newer, self._pending = self._pending, {}
        for write in [*writes, *newer.values()]:
            self._merge(write)

    async def flush(self, timeout_s: float = 10.0) -> None:
        """Wait until nothing is pending. Raises LedgerError with what is left after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._pending or self._in_flight:
                    self._drained.clear()
                    await self._drained.wait()
        except TimeoutError:
            left = len(self._pending) + len(self._in_flight)
            raise LedgerError(f"{left} ownership records not written within {timeout_s:g} s") from None

    async def close(self, timeout_s: float = 1.0) -> None:
        """Write what is left, for `timeout_s` at most; the rest is dropped and counted."""
        with self._lock:
            self._closed = True
        try:
            await self.flush(timeout_s)
        except LedgerError as error:
            log.warning("ownership_log_closed", error=str(error))
        self._task.cancel()
        await asyncio.wait([self._task])
        self.counters.dropped += len(self._pending) + len(self._in_flight)
        self._pending, self._in_flight = {}, []


def _later(old: Write, new: Write) -> Write:
    if (new.handoff.attempt, new.state) < (old.handoff.attempt, old.state):
        return old
    return replace(new, router_id=old.router_id) if new.handoff == old.handoff else new
