"""The rules of ownership records in memory."""

from dataclasses import replace

from baton.core import HandoffId, Incarnation, WorkerRef
from baton.errors import LedgerError
from baton.ledger.ownership import OwnershipRecord, OwnershipStore, RecordState, Write


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


async def write_record(
    store: OwnershipStore, handoff: HandoffId, owner: WorkerRef, router_id: str, state: RecordState
) -> bool:
    """Write one record. Return whether it was accepted. Raises LedgerError if the store returned one."""
    answer = (await store.write_many([Write(handoff, owner, router_id, state)]))[0]
    if isinstance(answer, LedgerError):
        raise answer
    return answer
