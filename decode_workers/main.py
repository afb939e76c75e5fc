"""Composition of a decode worker, for a plain process and for the Ray actor."""

from __future__ import annotations

from dataclasses import replace

from baton.core import Load
from baton.ledger.ownership import OwnershipLog
from baton.worker.role import RoleDeps, Transfers
from decode_workers.worker import DecodeWorker


class HostedDecode(DecodeWorker):
    """The role with its peer listener, the sender for fetched KV, and the writer of ownership records."""

    def __init__(self, parts: RoleDeps) -> None:
        self._log = OwnershipLog(parts.ledger, parts.info.ref)
        super().__init__(parts.info, parts.engine, parts.loop, self._log, parts.clock)
        self.counts = self.reservations.counts
        self._transfers = Transfers(parts, self.reservations, self.push_ended)
        self.attach(self._transfers.sender)

    @property
    def busy(self) -> bool:
        return False

    def load(self, load: Load) -> Load:
        return replace(load, channels=self._transfers.sender.channels(), draining=self.draining)

    async def close(self) -> None:
        await self._transfers.close()
        await self._log.close()
