"""The rules of ownership records, without Redis: what `ownership.py` does by a script, and is tested against.

One record per request. Its attempt and state only move along the arrows, and never back:

    attempt n     (none) ──> RESERVED ──> COMMITTED ──> ABORTED ──> RELEASED
    any state of attempt n ──> any state of attempt m > n, by any owner

A state may be skipped (the writer coalesces), a repeat is accepted and changes nothing. Refused are: a lower attempt,
an earlier state of the same attempt, the same attempt from anyone but the worker and incarnation that wrote it first,
and any write of an incarnation whose place was given to another one. So at most one worker ever writes to an attempt.

RESERVED: the decode worker keeps room. COMMITTED: the KV is there, it decodes. ABORTED: it gave the attempt up before
the end. RELEASED: its blocks are back. RELEASED is kept for a while as a tombstone, so that a late write of an older
attempt does not bring the record back; every state expires at last.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from baton.core import HandoffId, Incarnation, WorkerRef


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
