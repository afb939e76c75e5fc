"""Composition of a prefill worker, for a plain process and for the Ray actor alike."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

from baton.core import Load, Role
from baton.worker.host import HostParts, Ready, run_worker
from baton.worker.settings import WorkerSettings
from kvtransfer.sender import Sender
from prefill_workers.role import PrefillRole


class HostedPrefill(PrefillRole):
    """The role with its sender."""

    def __init__(self, parts: HostParts) -> None:
        super().__init__(parts.info, parts.engine, parts.loop, parts.clock)
        transfer = parts.settings.transfer
        info = parts.info
        self._sender = Sender(parts.engine.kv, info.ref, info.fingerprint, transfer, self.push_ended)
        self.attach(self._sender)

    def load(self, load: Load) -> Load:
        return replace(load, transfer_bytes=self.transfer_bytes, transport=self.transport)

    async def close(self) -> None:
        await asyncio.to_thread(self._sender.close)


def run(settings: WorkerSettings, stop: threading.Event, ready: Ready) -> None:
    """Run a prefill worker until `stop` is set. Raises BatonError when it cannot start."""
    if settings.role is not Role.PREFILL:
        raise ValueError(f"{settings.worker_id} is a {settings.role} worker")
    run_worker(settings, HostedPrefill, stop, ready)
