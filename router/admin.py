"""The operators' service, on a listener of its own."""

from __future__ import annotations

from typing import Any

from grpc import aio

from baton.clock import Clock
from baton.rpc import convert
from baton.rpc.v1 import admin_pb2
from baton.rpc.v1.admin_pb2_grpc import AdminServicer
from router.lifecycle import Floor
from router.requests import Identity, RequestTable
from router.workers import WorkerPool


class Admin(AdminServicer):
    """`baton.v1.Admin`: what this router is, and what it knows of the workers."""

    def __init__(
        self, floor: Floor, pool: WorkerPool, requests: RequestTable, identity: Identity, clock: Clock
    ) -> None:
        self._floor = floor
        self._pool = pool
        self._requests = requests
        self.identity = identity
        self._clock = clock
        self._started = clock.monotonic()

    async def Status(
        self, request: admin_pb2.StatusRequest, context: aio.ServicerContext[Any, Any]
    ) -> admin_pb2.StatusReply:
        outcomes, identity = self._requests.outcomes, self.identity
        workers = [
            admin_pb2.WorkerStatus(
                info=convert.info_to_pb(link.info),
                load=convert.load_to_pb(link.view.load),
                state=link.state,
                dispatched=link.view.dispatched,
            )
            for link in sorted(self._pool.links, key=lambda link: link.info.ref.worker_id)
        ]
        return admin_pb2.StatusReply(
            name=identity.name,
            router_id=identity.router_id,
            version=identity.version,
            model=identity.model,
            uptime_s=self._clock.monotonic() - self._started,
            running=len(self._requests.running),
            queued=self._floor.admission.waiting,
            accepted=self._requests.accepted,
            finished=outcomes["finished"],
            cancelled=outcomes["cancelled"],
            failed=outcomes["failed"],
            refused=outcomes["refused"],
            workers=workers,
        )
