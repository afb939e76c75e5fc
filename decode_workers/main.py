"""Composition of a decode worker, for a plain process and for the Ray actor alike."""

from __future__ import annotations

import threading

from baton.core import Load, Role
from baton.ledger.ownership import OwnershipLog
from baton.rpc.v1 import peer_pb2_grpc
from baton.worker.host import HostParts, Ready, run_worker
from baton.worker.settings import WorkerSettings
from decode_workers.role import DecodeRole
from kvtransfer.receiver import PeerService


class HostedDecode(DecodeRole):
    """The role with the listener for its peers and the writer of its records."""

    def __init__(self, parts: HostParts) -> None:
        self._log = OwnershipLog(parts.ledger, parts.info.ref)
        super().__init__(parts.info, parts.engine, parts.loop, self._log, parts.clock)
        info = parts.info
        transfer = parts.settings.transfer
        self._peers = PeerService(parts.engine.kv, info.ref, info.fingerprint, transfer, self.reservations)
        peer_pb2_grpc.add_PeerServicer_to_server(self._peers, parts.server)

    def load(self, load: Load) -> Load:
        return load

    async def close(self) -> None:
        await self._peers.close()
        await self._log.close()


def run(settings: WorkerSettings, stop: threading.Event, ready: Ready) -> None:
    """Run a decode worker until `stop` is set. Raises BatonError when it cannot start."""
    if settings.role is not Role.DECODE:
        raise ValueError(f"{settings.worker_id} is a {settings.role} worker")
    run_worker(settings, HostedDecode, stop, ready)
