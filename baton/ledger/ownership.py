"""Ownership records: which decode worker holds a request's KV. One record per request, one script per write.

    attempt n     (none) ──> RESERVED ──> COMMITTED ──> ABORTED ──> RELEASED
    any state of attempt n ──> any state of attempt m > n, by any owner

A record only moves along the arrows. States may be skipped, because the writer coalesces; a repeated write changes
nothing. An earlier state or a lower attempt is rejected. So is every write by another worker or incarnation to the same
attempt, and by an incarnation that was replaced at its place. So one incarnation at most ever writes to an attempt.

RESERVED: the decode worker reserved blocks. COMMITTED: it decodes. ABORTED: it gave up the attempt before the end.
RELEASED: its blocks are free; the record stays for a while as a tombstone, because a late write of an older attempt
must not restore it.

In Redis, each with a TTL:
    PREFIX:req:REQUEST_ID   hash {attempt, state, worker, incarnation, router, updated (ms)}
    PREFIX:stream:NAME      the request id of the stream that its client calls NAME, if they differ

`OwnershipStore` has these rules in a script, and `OwnershipLog` is a decode worker's background writer.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from baton.core import HandoffId, Incarnation, WorkerRef
from baton.errors import LedgerError
from baton.ledger.background_writer import BackgroundWriter
from baton.ledger.redis_client import Arg, Connection, Script
from baton.ledger.registry import Ledger

log = structlog.get_logger(__name__)


class RecordState(enum.IntEnum):
    """The state of an attempt, in the order of the transitions."""

    RESERVED = 10
    COMMITTED = 30
    ABORTED = 40
    RELEASED = 50

    @classmethod
    def _missing_(cls, value: object) -> RecordState | None:
        """Map the values 1 to 4 of version 1. Old and new values never meet in one incarnation."""
        old = (cls.RESERVED, cls.COMMITTED, cls.ABORTED, cls.RELEASED)
        return old[value - 1] if isinstance(value, int) and 1 <= value <= len(old) else None


@dataclass(frozen=True, slots=True)
class OwnershipRecord:
    """The owner of a request's KV. `router_id`: the router that started the attempt; `updated_ms`: Redis's clock."""

    handoff: HandoffId
    state: RecordState
    worker_id: str
    incarnation: Incarnation
    router_id: str
    updated_ms: int = 0


# KEYS: record, place of the writer; optionally the stream. ARGV: attempt, state, worker id, incarnation, router id,
# TTL ms of this state, request id. Returns 1 if written, 0 if rejected, -1 if the key has another type, -2 if the place
# is that of another incarnation. A damaged record is overwritten.
_WRITE = Script("""
local place = redis.call('GET', KEYS[2])
if place and place ~= ARGV[4] then return -2 end
local now = redis.pcall('HMGET', KEYS[1], 'attempt', 'state', 'worker', 'incarnation')
if now.err then return -1 end
local attempt, state = tonumber(ARGV[1]), tonumber(ARGV[2])
local last, reached = tonumber(now[1] or ''), tonumber(now[2] or '')
if last and reached then
  if last > attempt then return 0 end
  local mine = now[3] == ARGV[3] and now[4] == ARGV[4]
  if last == attempt and not (mine and reached <= state) then return 0 end
end
local time = redis.call('TIME')
local ms = time[1] .. string.format('%03d', math.floor(time[2] / 1000))
redis.call('HSET', KEYS[1], 'state', state, 'updated', ms)
if last ~= attempt or not reached then
  redis.call('HSET', KEYS[1], 'attempt', attempt, 'worker', ARGV[3], 'incarnation', ARGV[4], 'router', ARGV[5])
end
redis.call('PEXPIRE', KEYS[1], ARGV[6])
if KEYS[3] then redis.call('SET', KEYS[3], ARGV[7], 'PX', ARGV[6]) end
return 1
""")
_FOREIGN, _REPLACED = -1, -2
_DECODED = (RecordState.COMMITTED, RecordState.RELEASED)
_FIELDS = ("attempt", "state", "worker", "incarnation", "router", "updated")


@dataclass(frozen=True, slots=True)
class Write:
    """One transition that a decode worker records."""

    handoff: HandoffId
    owner: WorkerRef
    router_id: str
    state: RecordState
    stream: str = ""  # the client's name; empty if not resumable


class OwnershipStore:
    """Reads and writes records. `live_s`: TTL of a live record after its last write; `released_s`: of a tombstone."""

    def __init__(self, connection: Connection, *, live_s: float = 3600, released_s: float = 300) -> None:
        self._connection = connection
        self._live_ms = round(live_s * 1000)
        self._released_ms = round(released_s * 1000)

    async def write_many(self, writes: Sequence[Write]) -> list[bool | LedgerError]:
        """Write records in one round trip; answers in order, False for a rejected write. A LedgerError in the list:
        that write failed and may be retried. A place of another incarnation is such an error, because an older copy of
        Redis may hold one until the next heartbeat. Raises LedgerError if Redis cannot be reached; any of the writes
        may have been made.
        """
        answers = await self._connection.run_many(_WRITE, [self._call(write) for write in writes])
        return [self._answer(write, answer) for write, answer in zip(writes, answers, strict=True)]

    def _answer(self, write: Write, answer: int | LedgerError) -> bool | LedgerError:
        if answer == _REPLACED:
            return LedgerError(f"the place of {write.owner} belongs to another incarnation")
        if answer == _FOREIGN:
            log.warning("ownership_key_foreign", handoff=write.handoff)
        return answer if isinstance(answer, LedgerError) else answer > 0

    def _call(self, write: Write) -> tuple[Sequence[str], Sequence[Arg]]:
        key, owner = self._connection.key, write.owner
        request_id, attempt = write.handoff.request_id, write.handoff.attempt
        ttl_ms = self._released_ms if write.state is RecordState.RELEASED else self._live_ms
        keys = [key("req", request_id), key("place", owner.worker_id)]
        if write.stream not in {"", request_id}:
            keys.append(key("stream", write.stream))
        writer = (owner.worker_id, str(owner.incarnation), write.router_id)
        return keys, (attempt, int(write.state), *writer, ttl_ms, request_id)

    async def read(self, request_id: str) -> OwnershipRecord | None:
        """Return the record, tombstones included. None if missing or damaged (logged). Raises LedgerError."""
        row = await self._connection.call("HMGET", self._connection.key("req", request_id), *_FIELDS)
        if not isinstance(row, list) or row == [None] * len(_FIELDS):
            return None
        try:
            return _parse(request_id, row)
        except ValueError:
            log.warning("ownership_record_damaged", request_id=request_id)
            return None

    async def find(self, stream: str) -> OwnershipRecord | None:
        """Return the record of a stream that is or was decoded, by the client's name for it. Raises LedgerError."""
        found = await self._connection.call("GET", self._connection.key("stream", stream))
        record = await self.read(found.decode(errors="replace") if isinstance(found, bytes) else stream)
        return record if record is not None and record.state in _DECODED else None


def _parse(request_id: str, row: list[object]) -> OwnershipRecord:
    """Parse a record. Raises ValueError also for a missing field or one that is not UTF-8."""
    attempt, state, worker_id, incarnation, router_id, updated = (x.decode() for x in row if isinstance(x, bytes))
    return OwnershipRecord(
        handoff=HandoffId(request_id, int(attempt)),
        state=RecordState(int(state)),
        worker_id=worker_id,
        incarnation=Incarnation.parse(incarnation),
        router_id=router_id,
        updated_ms=int(updated),
    )


BATCH = 128
MOST_WRITES = 4  # per handoff; also its maximum of round trips.
REPEAT_S = 1200.0  # a third of the life of a record


@dataclass(slots=True)
class _Entry:
    """The latest state of one request, and the number of writes queued for its handoff."""

    write: Write
    queued: int = 0


class OwnershipLog(BackgroundWriter):
    """Writes one decode worker's records in the background, in order for each request. Create it on the event loop.

    One round trip at most is under way. The next carries all notes since: one write per request, its latest state. So a
    handoff costs at most `MOST_WRITES` round trips, usually three, far fewer under load. While Redis is away, at most
    `max_pending` requests are queued; the oldest are dropped. Unreleased ones are remembered, and are written again
    when Redis is back or has lost its data.
    """

    def __init__(self, ledger: Ledger, owner: WorkerRef, *, max_pending: int = 10_000) -> None:
        self._store = OwnershipStore(ledger.connection)
        self._owner = owner
        self._max_pending = max_pending
        self._entries: dict[str, _Entry] = {}  # held or queued
        self._pending: dict[str, None] = {}  # in write order
        self._in_flight: list[Write] = []
        self._missing = False  # a held request was dropped from the queue
        super().__init__(ledger, "ownership records", REPEAT_S)

    def note(self, handoff: HandoffId, router_id: str, state: RecordState, stream: str = "") -> None:
        """Queue a transition. From any thread; never blocks or raises. `stream`: as in `Write`, in any one state."""
        with self._lock:
            if not self._closed and self._update(Write(handoff, self._owner, router_id, state, stream)):
                self._enqueue(handoff.request_id)
                self._signal()

    def _update(self, new: Write) -> bool:
        """Merge a note. Returns False if no write is due: the note is late, or the next write must be the last."""
        entry = self._entries.get(new.handoff.request_id)
        if entry is None or entry.write.handoff.attempt < new.handoff.attempt:
            self._entries[new.handoff.request_id] = _Entry(new)
            return True
        if (new.handoff.attempt, new.state) < (entry.write.handoff.attempt, entry.write.state):
            return False
        entry.write = replace(new, router_id=entry.write.router_id, stream=new.stream or entry.write.stream)
        return entry.queued < MOST_WRITES - 1 or new.state is RecordState.RELEASED

    def _enqueue(self, request_id: str) -> None:
        if request_id not in self._pending:
            self._entries[request_id].queued += 1
            self._pending[request_id] = None
            self._bound()

    def _bound(self) -> None:
        while len(self._pending) > self._max_pending:
            request_id = next(iter(self._pending))
            del self._pending[request_id]
            self._missing = True
            if self._entries[request_id].write.state is RecordState.RELEASED:
                del self._entries[request_id]

    def _repeat(self) -> None:
        self._pending |= dict.fromkeys(self._entries)  # exceeds the limit: held requests use memory anyway

    def _left(self) -> int:
        return len(self._pending) + len(self._in_flight)

    async def _write(self) -> LedgerError | None:
        batch = self._take()
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
        """Forget decided writes, and requeue failed ones at the front. Returns the last error, if any."""
        error: LedgerError | None = None
        again: list[str] = []
        with self._lock:
            for write, answer in zip(batch, answers, strict=True):
                if not isinstance(answer, LedgerError):
                    self._decided(write, answer)
                    continue
                error = answer
                if write.handoff.request_id in self._entries:  # else a later note was dropped
                    again.append(write.handoff.request_id)
            self._in_flight = []
            self._pending = dict.fromkeys(again) | self._pending
            self._bound()
            if error is None and self._missing:
                self._missing = False
                self._repeat()
        return error

    def _decided(self, write: Write, accepted: bool) -> None:
        """Forget a released request, and one that another worker owns."""
        if not accepted:
            log.info("ownership_write_refused", handoff=write.handoff, state=write.state.name)
        request_id = write.handoff.request_id
        entry, over = self._entries.get(request_id), not accepted or write.state is RecordState.RELEASED
        if over and entry and entry.write == write and request_id not in self._pending:
            del self._entries[request_id]
