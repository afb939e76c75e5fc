"""The ownership table in Redis: one script per write, so that each decision is atomic. Its rules: `ownership_table`.

`PREFIX:req:REQUEST_ID` is a hash {attempt, state, worker, incarnation, router, updated (ms)}. It always has a TTL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from baton.core import HandoffId, Incarnation, WorkerRef
from baton.errors import LedgerError
from baton.ledger.connection import Arg, Connection, Script
from baton.ledger.ownership_table import OwnershipRecord, RecordState

log = structlog.get_logger(__name__)

# KEYS: record, place of the writer. ARGV: attempt, state, worker id, incarnation, router id, TTL ms.
# Answers 1: done, 0: refused, -1: the key holds something else. A damaged record is overwritten.
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
        return [self._decision(write, answer) for write, answer in zip(writes, answers, strict=True)]

    def _call(self, write: Write) -> tuple[Sequence[str], Sequence[Arg]]:
        key, owner = self._connection.key, write.owner
        ttl_ms = self._released_ms if write.state is RecordState.RELEASED else self._live_ms
        who = (owner.worker_id, str(owner.incarnation), write.router_id)
        keys = (key("req", write.handoff.request_id), key("place", owner.worker_id))
        return keys, (write.handoff.attempt, int(write.state), *who, ttl_ms)

    def _decision(self, write: Write, answer: int | LedgerError) -> bool | LedgerError:
        if isinstance(answer, LedgerError):
            return answer
        if answer < 0:
            log.warning("ownership_key_foreign", handoff=str(write.handoff))
        return answer > 0

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
