"""Composition of a prefill worker, for a plain process and for the Ray actor."""

from __future__ import annotations

from dataclasses import replace

from baton.core import HandoffId, Load
from baton.errors import HandoffError, StaleAttempt
from baton.metrics.worker import Counts
from baton.worker.role import RoleDeps, Transfers
from kvtransfer.handoff import PushResult
from prefill_workers.worker import PrefillWorker


class HostedPrefill(PrefillWorker):
    """The role with its sender, and with the listener for KV that it fetches."""

    def __init__(self, parts: RoleDeps) -> None:
        self.counts = Counts()
        transfer = parts.settings.transfer
        less, fetch_s = transfer.coalesce_below, transfer.frame_deadline_s
        super().__init__(parts.info, parts.engine, parts.loop, parts.clock, coalesce_below=less, fetch_s=fetch_s)
        self._transfers = Transfers(parts, self.fetches, self.push_ended, self.fetch_ended)
        self.attach(self._transfers.sender)

    def push_ended(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        if isinstance(outcome, PushResult):
            self.counts.ended("pushed")
            self.counts.moved("sent", outcome.transport, outcome.nbytes, outcome.frames, outcome.exposed_s)
        else:
            self.counts.ended("aborted" if isinstance(outcome, StaleAttempt) else "failed")
        super().push_ended(handoff, outcome)

    @property
    def busy(self) -> bool:
        """See `WorkerRole.busy`: whether KV is being pushed."""
        return any(not work.waits for work in list(self._work.values()))

    def load(self, load: Load) -> Load:
        return replace(
            load,
            transfer_bytes=self.transfer_bytes,
            transport=self.transport,
            fetched_tokens=self.fetches.fetched_tokens,
            channels=self._transfers.sender.channels(),
            draining=self.draining,
        )

    async def close(self) -> None:
        await self._transfers.close()
