"""The rules of ownership records in memory, and a reader of the records that a worker holds."""

from __future__ import annotations

from dataclasses import replace

from baton.core import HandoffId, Incarnation, WorkerRef
from baton.errors import LedgerError
from baton.ledger.ownership import _FIELDS, OwnershipRecord, RecordState, _parse_or_log
from baton.ledger.redis_client import Connection, Script


def owned_by(record: OwnershipRecord, owner: WorkerRef) -> bool:
    """Return whether this incarnation of the worker wrote the record."""
    return record.worker_id == owner.worker_id and record.incarnation == owner.incarnation


class OwnershipTable:
    """An in-memory store with the rules of the real one."""

    def __init__(self) -> None:
        self._records: dict[str, OwnershipRecord] = {}
        self._places: dict[str, Incarnation] = {}

    def register(self, owner: WorkerRef) -> bool:
        """Claim the worker id, as `Ledger.register` does: the most recently minted incarnation wins."""
        mine, last = owner.incarnation, self._places.get(owner.worker_id)
        if last is not None and (last.epoch, last.counter) > (mine.epoch, mine.counter):
            return False
        self._places[owner.worker_id] = mine
        return True

    def write(self, handoff: HandoffId, owner: WorkerRef, router_id: str, state: RecordState) -> bool:
        """Write a record. Returns False, without a change, if rejected."""
        if self._places.get(owner.worker_id, owner.incarnation) != owner.incarnation:
            return False
        now = self._records.get(handoff.request_id)
        if now is None or now.handoff.attempt < handoff.attempt:
            record = OwnershipRecord(handoff, state, owner.worker_id, owner.incarnation, router_id)
        elif now.handoff == handoff and owned_by(now, owner) and now.state <= state:
            record = replace(now, state=state)
        else:
            return False
        self._records[handoff.request_id] = record
        return True

    def read(self, request_id: str) -> OwnershipRecord | None:
        """Return the record, tombstones included."""
        return self._records.get(request_id)

    def expire(self, request_id: str) -> None:
        """Remove a record, as Redis does at the end of its TTL."""
        self._records.pop(request_id, None)


# KEYS: holds of a worker, grace. ARGV: prefix of records, worker id, incarnation, maximum count, fields of a record.
# Returns pairs (request id, record), or the ms of grace left. Removes entries that the worker does not hold.
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


async def records_of(connection: Connection, owner: WorkerRef, most: int = 10_000) -> list[OwnershipRecord]:
    """Read at most `most` records, oldest write first. Raises LedgerError also during the store's grace period."""
    key, incarnation = connection.key, str(owner.incarnation)
    args = (key("req", ""), owner.worker_id, incarnation, most, *_FIELDS)
    answer = await connection.run(_HOLDS, (key("holds", owner.worker_id, incarnation), key("grace")), args)
    if not isinstance(answer, list):
        raise LedgerError(f"the ledger lost its data: try again in {answer} ms, when workers have entered theirs")
    rows = (_parse_or_log(request_id.decode(errors="replace"), row) for request_id, row in answer)
    return [record for record in rows if record is not None]
