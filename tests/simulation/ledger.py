"""The cluster's registry with its leases."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from baton.errors import LedgerError
from baton.ledger.ownership import OwnershipRecord, RecordState
from tests.support.ownership_records import OwnershipTable

if TYPE_CHECKING:
    from baton.core import HandoffId, WorkerInfo, WorkerRef
    from tests.simulation.world import World


class SimLedger:
    """A ledger that is never away: the parts of `baton.ledger.registry.Ledger` that leases and worker pools use.

    It is the ownership log too. Records are visible immediately, unless the schedule loses them.
    """

    def __init__(self, world: World, lease_s: float) -> None:
        self._world, self._lease_s = world, lease_s
        self._entries: dict[str, tuple[WorkerInfo, float]] = {}
        self._owned = OwnershipTable()
        self._streams: dict[str, str] = {}
        self._rng = world.random_for("ledger")

    async def register(self, info: WorkerInfo) -> bool:
        """Register a worker. If two have the same id, the later minted one stays."""
        found = self._entries.get(info.ref.worker_id)
        if found is not None and found[0].ref.incarnation.counter > info.ref.incarnation.counter:
            return False
        self._entries[info.ref.worker_id] = (info, self._until())
        return True

    async def renew(self, ref: WorkerRef, progress: int) -> bool:
        """Renew a lease. Return False if the worker is not registered."""
        found = self._entries.get(ref.worker_id)
        if found is None or found[0].ref != ref or found[1] < self._world.loop.time():
            return False
        self._entries[ref.worker_id] = (found[0], self._until())
        return True

    async def workers(self) -> list[WorkerInfo]:
        return [info for info, until in self._entries.values() if until >= self._world.loop.time()]

    def note(self, handoff: HandoffId, owner: WorkerRef, router_id: str, state: RecordState, stream: str) -> None:
        self._owned.write(handoff, owner, router_id, state)
        if stream:
            self._streams[stream] = handoff.request_id

    async def find(self, stream: str) -> OwnershipRecord | None:
        """Find a record like `OwnershipStore.find`. Sometimes none is found, or Redis is away."""
        await asyncio.sleep(self._world.delay(self._rng))
        if self._rng.random() < 0.1:
            raise LedgerError("away")
        return self._owned.read(self._streams.get(stream, stream)) if self._rng.random() < 0.9 else None

    def _until(self) -> float:
        return self._world.loop.time() + self._lease_s
