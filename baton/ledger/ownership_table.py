"""Ownership records: the rules, as a pure table, and the store in Redis, which decides the same by one script a write.

One record per request. Its attempt and state only move along the arrows, and never back:

    attempt n     (none) ──> RESERVED ──> COMMITTED ──> ABORTED ──> RELEASED
    any state of attempt n ──> any state of attempt m > n, by any owner

A state may be skipped (the writer coalesces), a repeat is accepted and changes nothing. Refused are: a lower attempt,
an earlier state of the same attempt, the same attempt from anyone but the worker and incarnation that wrote it first,
and any write of an incarnation whose place was given to another one. So at most one worker ever writes to an attempt.

RESERVED: the decode worker keeps room. COMMITTED: the KV is there, it decodes. ABORTED: it gave the attempt up before
the end. RELEASED: its blocks are back. RELEASED is kept for a while as a tombstone, so that a late write of an older
attempt does not bring the record back; every state expires at last.

In Redis, `PREFIX:req:REQUEST_ID` is a hash {attempt, state, worker, incarnation, router, updated (ms)}, with a TTL.
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

    RESERVED = 1
    COMMITTED = 2
    ABORTED = 3
    RELEASED = 4


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


# KEYS: record, place of the writer. ARGV: attempt, state, worker id, incarnation, router id, TTL ms.
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
redis.call('HSET', KEYS[1], 'state', state, 'updated', time[1] .. string.format('%03d', math.floor(time[2] / 1000)))
if last ~= attempt or not reached then
  redis.call('HSET', KEYS[1], 'attempt', attempt, 'worker', ARGV[3], 'incarnation', ARGV[4], 'router', ARGV[5])
end
redis.call('PEXPIRE', KEYS[1], ARGV[6])
return 1
""")
_FOREIGN = -1
_FIELDS = ("attempt", "state", "worker", "incarnation", "router", "updated")


@dataclass(frozen=True, slots=True)
class Write:
    """One transition that a decode worker wants recorded."""

    handoff: HandoffId
    owner: WorkerRef
    router_id: str
    state: RecordState


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
                log.warning("ownership_key_foreign", handoff=str(write.handoff))
        return [answer if isinstance(answer, LedgerError) else answer > 0 for answer in answers]

    def _call(self, write: Write) -> tuple[Sequence[str], Sequence[Arg]]:
        key, owner = self._connection.key, write.owner
        ttl_ms = self._released_ms if write.state is RecordState.RELEASED else self._live_ms
        who = (owner.worker_id, str(owner.incarnation), write.router_id)
        keys = (key("req", write.handoff.request_id), key("place", owner.worker_id))
        return keys, (write.handoff.attempt, int(write.state), *who, ttl_ms)

    async def read(self, request_id: str) -> OwnershipRecord | None:
        """The record, tombstones included; None: no record, or a damaged one (logged). Raises LedgerError."""
        row = await self._connection.call("HMGET", self._connection.key("req", request_id), *_FIELDS)
        if not isinstance(row, list) or row == [None] * len(_FIELDS):
            return None
        try:
            return _parse(request_id, row)
        except ValueError:
            log.warning("ownership_record_damaged", request=request_id)
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
