"""Ownership records: the rules, as a pure table, and the store in Redis, which decides the same by one script a write.

One record per request. Its attempt and state only move along the arrows, and never back:

    attempt n     (none) ──> RESERVED ──> PREPARED ──> COMMITTED ──> ABORTED ──> RELEASED
    any state of attempt n ──> any state of attempt m > n, by any owner

A state may be skipped (the writer coalesces), a repeat is accepted and changes nothing. Refused are: a lower attempt,
an earlier state of the same attempt, the same attempt from anyone but the worker and incarnation that wrote it first,
and any write of an incarnation whose place was given to another one. So at most one worker ever writes to an attempt.

RESERVED (the handoff is open): the decode worker keeps room. PREPARED: all KV is there, no commit was accepted yet.
COMMITTED: it decodes. ABORTED: it gave the attempt up before the end. RELEASED: its blocks are back. RELEASED is kept
for a while as a tombstone, so that a late write of an older attempt does not bring the record back.

In Redis, each with a TTL:
    PREFIX:req:REQUEST_ID             hash {attempt, state, worker, incarnation, router, updated (ms)}
    PREFIX:holds:WORKER:INCARNATION   sorted set, by time of the last write: requests that it holds KV of, or did lately
    PREFIX:stream:NAME                the request id by which workers know the stream that its client calls NAME
The others only say where to look: what they name is compared with the first. Of a stream whose name is its request id
there is none.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from baton.core import HandoffId, Incarnation, WorkerRef
from baton.errors import LedgerError
from baton.ledger.connection import Arg, Connection, Script

log = structlog.get_logger(__name__)


class RecordState(enum.IntEnum):
    """How far an attempt has come. The order is the order of the transitions."""

    RESERVED = 10
    PREPARED = 20
    COMMITTED = 30
    ABORTED = 40
    RELEASED = 50

    @classmethod
    def _missing_(cls, value: object) -> RecordState | None:
        """What version 1 wrote as 1 to 4 is still read. Nobody compares the two: an incarnation is of one version."""
        old = (cls.RESERVED, cls.COMMITTED, cls.ABORTED, cls.RELEASED)
        return old[value - 1] if isinstance(value, int) and 1 <= value <= len(old) else None


@dataclass(frozen=True, slots=True)
class OwnershipRecord:
    """Who holds a request's KV. `router_id` is the router that started the attempt. `updated_ms`: Redis's clock."""

    handoff: HandoffId
    state: RecordState
    worker_id: str
    incarnation: Incarnation
    router_id: str
    updated_ms: int = 0

    def owned_by(self, owner: WorkerRef) -> bool:
        """Whether that worker, in that life, wrote it."""
        return self.worker_id == owner.worker_id and self.incarnation == owner.incarnation


class OwnershipTable:
    """The same decisions as Redis makes. For tests and the simulator."""

    def __init__(self) -> None:
        self._records: dict[str, OwnershipRecord] = {}
        self._places: dict[str, Incarnation] = {}

    def register(self, owner: WorkerRef) -> bool:
        """As `Ledger.register`: the incarnation minted last gets the place."""
        mine, last = owner.incarnation, self._places.get(owner.worker_id)
        if last is not None and (last.epoch, last.counter) > (mine.epoch, mine.counter):
            return False
        self._places[owner.worker_id] = mine
        return True

    def write(self, handoff: HandoffId, owner: WorkerRef, router_id: str, state: RecordState) -> bool:
        """False: refused, nothing changed."""
        if self._places.get(owner.worker_id, owner.incarnation) != owner.incarnation:
            return False
        now = self._records.get(handoff.request_id)
        if now is None or now.handoff.attempt < handoff.attempt:
            record = OwnershipRecord(handoff, state, owner.worker_id, owner.incarnation, router_id)
        elif now.handoff == handoff and now.owned_by(owner) and now.state <= state:
            record = replace(now, state=state)
        else:
            return False
        self._records[handoff.request_id] = record
        return True

    def read(self, request_id: str) -> OwnershipRecord | None:
        """The record, tombstones included."""
        return self._records.get(request_id)

    def expire(self, request_id: str) -> None:
        """What Redis does when a record's time to live has passed."""
        self._records.pop(request_id, None)


# KEYS: record, place of the writer, what it holds. ARGV: attempt, state, worker id, incarnation, router id, TTL ms of
# this state, TTL ms of a live record, request id, 1 if its blocks are held in this state. KEYS 4, if there: its stream.
# Answers 1: done, 0: refused, -1: the key is foreign, it holds something else. A damaged record is overwritten.
_WRITE = Script("""
local place = redis.call('GET', KEYS[2])
if place and place ~= ARGV[4] then return 0 end
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
if ARGV[9] == '1' then redis.call('ZADD', KEYS[3], ms, ARGV[8]) else redis.call('ZREM', KEYS[3], ARGV[8]) end
if KEYS[4] then redis.call('SET', KEYS[4], ARGV[8], 'PX', ARGV[6]) end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', ms - ARGV[7])
redis.call('PEXPIRE', KEYS[3], ARGV[7])
return 1
""")
_FOREIGN = -1
_DECODED = (RecordState.COMMITTED, RecordState.RELEASED)
_FIELDS = ("attempt", "state", "worker", "incarnation", "router", "updated")

# KEYS: what a worker holds, the store's grace. ARGV: prefix of records, worker id, incarnation, how many at most, the
# record's fields. Answers the records, each after its request id, or the ms of grace left. Forgets what is not held.
_HOLDS = Script("""
local wait = redis.call('PTTL', KEYS[2])
if wait > 0 then return wait end
local rows = {}
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, ARGV[4] - 1)) do
  local row = redis.pcall('HMGET', ARGV[1] .. id, unpack(ARGV, 5))
  if row.err or row[3] ~= ARGV[2] or row[4] ~= ARGV[3] then redis.call('ZREM', KEYS[1], id)
  else rows[#rows + 1] = {id, row} end
end
return rows
""")
MOST_RECORDS = 10_000


@dataclass(frozen=True, slots=True)
class Write:
    """One transition that a decode worker wants recorded."""

    handoff: HandoffId
    owner: WorkerRef
    router_id: str
    state: RecordState
    stream: str = ""  # its client's name for it; "": it cannot be resumed


class OwnershipStore:
    """Reads and writes records. `live_s`: longest life of a record without a write; `released_s`: of a tombstone."""

    def __init__(self, connection: Connection, *, live_s: float = 3600, released_s: float = 300) -> None:
        self._connection = connection
        self._live_ms = round(live_s * 1000)
        self._released_ms = round(released_s * 1000)

    async def write(self, handoff: HandoffId, owner: WorkerRef, router_id: str, state: RecordState) -> bool:
        """False: refused, nothing changed. Raises LedgerError."""
        answer = (await self.write_many([Write(handoff, owner, router_id, state)]))[0]
        if isinstance(answer, LedgerError):
            raise answer
        return answer

    async def write_many(self, writes: Sequence[Write]) -> list[bool | LedgerError]:
        """One round trip, answers in order. A LedgerError in the list: that write failed, and may be tried again.

        Raises LedgerError when Redis cannot be reached; any of them may have been done then.
        """
        answers = await self._connection.run_many(_WRITE, [self._call(write) for write in writes])
        for write, answer in zip(writes, answers, strict=True):
            if answer == _FOREIGN:
                log.warning("ownership_key_foreign", handoff=write.handoff)
        return [answer if isinstance(answer, LedgerError) else answer > 0 for answer in answers]

    def _call(self, write: Write) -> tuple[Sequence[str], Sequence[Arg]]:
        key, owner = self._connection.key, write.owner
        held = write.state is not RecordState.RELEASED
        ttl_ms = self._live_ms if held else self._released_ms
        who = (owner.worker_id, str(owner.incarnation), write.router_id)
        request_id, attempt = write.handoff.request_id, write.handoff.attempt
        keys = [key("req", request_id), key("place", owner.worker_id), self._holds(owner.worker_id, owner.incarnation)]
        if write.stream not in {"", request_id}:
            keys.append(key("stream", write.stream))
        return keys, (attempt, int(write.state), *who, ttl_ms, self._live_ms, request_id, int(held))

    def _holds(self, worker_id: str, incarnation: Incarnation) -> str:
        return self._connection.key("holds", worker_id, str(incarnation))

    async def read(self, request_id: str) -> OwnershipRecord | None:
        """The record, tombstones included; None: no record, or a damaged one (logged). Raises LedgerError."""
        row = await self._connection.call("HMGET", self._connection.key("req", request_id), *_FIELDS)
        return None if row == [None] * len(_FIELDS) else _parse_or_log(request_id, row)

    async def find(self, stream: str) -> OwnershipRecord | None:
        """Who decodes the stream that its client calls so, or did lately: it may remember what it said.

        None: nobody that the ledger knows. Raises LedgerError.
        """
        found = await self._connection.call("GET", self._connection.key("stream", stream))
        record = await self.read(found.decode(errors="replace") if isinstance(found, bytes) else stream)
        return record if record is not None and record.state in _DECODED else None

    async def records_of(
        self, worker_id: str, incarnation: Incarnation, most: int = MOST_RECORDS
    ) -> list[OwnershipRecord]:
        """What the ledger believes this incarnation holds now, of the `most` requests that it wrote of longest ago.

        One round trip, for arbiters: a reclaim, a census. Raises LedgerError while the store's grace lasts too: it may
        not have been told again of all that is held.
        """
        key = self._connection.key
        args = (key("req", ""), worker_id, str(incarnation), most, *_FIELDS)
        answer = await self._connection.run(_HOLDS, (self._holds(worker_id, incarnation), key("grace")), args)
        if not isinstance(answer, list):
            raise LedgerError(f"the ledger lost its data: try again in {answer} ms, when workers have entered theirs")
        rows = (_parse_or_log(request_id.decode(errors="replace"), row) for request_id, row in answer)
        return [record for record in rows if record is not None]


def _parse_or_log(request_id: str, row: object) -> OwnershipRecord | None:
    try:
        return _parse(request_id, row) if isinstance(row, list) else None
    except ValueError:
        log.warning("ownership_record_damaged", request_id=request_id)
        return None


def _parse(request_id: str, row: list[object]) -> OwnershipRecord:
    """Raises ValueError, also for a field that is missing or not UTF-8."""
    attempt, state, worker_id, incarnation, router_id, updated = (x.decode() for x in row if isinstance(x, bytes))
    return OwnershipRecord(
        handoff=HandoffId(request_id, int(attempt)),
        state=RecordState(int(state)),
        worker_id=worker_id,
        incarnation=Incarnation.parse(incarnation),
        router_id=router_id,
        updated_ms=int(updated),
    )
