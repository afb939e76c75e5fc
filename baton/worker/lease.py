"""A worker's lease in the ledger, watched by its own clock too: one that has lapsed is never taken up again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from baton.errors import EngineFault, LedgerError
from baton.history import OFF, History

if TYPE_CHECKING:
    from baton.clock import Clock
    from baton.core import WorkerInfo
    from baton.ledger.ledger import Ledger

log = structlog.get_logger(__name__)


class Lease:
    """Counts from the start of the last call that renewed it, or found Redis away.

    A Redis that is back is asked whether somebody took the place meanwhile; one that forgot is told again, with the
    same incarnation, and with that begins its next epoch (`baton.ledger.ledger`).
    """

    def __init__(self, ledger: Ledger, info: WorkerInfo, lease_s: float, clock: Clock, history: History = OFF) -> None:
        self._ledger = ledger
        self._info = info
        self.lease_s = lease_s
        self._clock = clock
        self._history = history
        self._kept = clock.monotonic()

    @property
    def age_s(self) -> float:
        """Since it was last kept."""
        return self._clock.monotonic() - self._kept

    async def take(self) -> None:
        """Register. Raises LedgerError without Redis, EngineFault if a newer incarnation has the place."""
        self._kept = self._clock.monotonic()
        if not await self._ledger.register(self._info):
            self._lost()
            raise EngineFault(f"{self._info.ref.worker_id} is taken by another incarnation: this one is fenced")

    def check(self) -> None:
        """Raises LedgerError once the lease must have lapsed, whatever kept this process from renewing it."""
        elapsed = self.age_s
        if elapsed > self.lease_s:
            self._lost()
            text = f"no progress for {elapsed:.1f} s, the lease of {self.lease_s:g} s has lapsed: starting again"
            raise LedgerError(f"{self._info.ref}: {text}")

    def _lost(self) -> None:
        self._history.note("lease_lost")
        log.error("lease_lost", worker=self._info.ref)

    async def renew(self, progress: int) -> None:
        """Renew, or enter again what a restarted Redis forgot. Raises EngineFault if another one has the place.

        Without Redis the worker goes on: its streams are alive. A call may take so long that the next is in time.
        """
        self.check()
        asked = self._clock.monotonic()
        self._history.note("beat", progress=progress)
        try:
            async with asyncio.timeout(self.lease_s / 3):
                if not await self._ledger.renew(self._info.ref, progress):
                    await self.take()
        except (LedgerError, TimeoutError) as error:
            log.warning("ledger_away", error=str(error) or "no answer in time")
        self._kept = asked
