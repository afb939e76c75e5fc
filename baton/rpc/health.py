"""The gRPC health service (grpc.health.v1) of routers and workers."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

LOOK_S = 0.1

Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """The status of each service, where "" is the process. A watching client that does not read holds up nothing. In
    grpcio-health-checking 1.85 it blocks `set`, because a lock is held during the write.
    """

    def __init__(self) -> None:
        self._serving = {"": True}

    def set(self, service: str, *, serving: bool) -> None:
        self._serving[service] = serving

    def stop(self) -> None:
        """Report that no service is served any more."""
        self._serving = dict.fromkeys(self._serving, False)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Status:
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return self._status(request.service)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Send the status, and then each change of it, until the call ends."""
        last = None
        while True:
            if (status := self._status(request.service)) != last:
                await context.write(status)
                last = status
            await asyncio.sleep(LOOK_S)

    def _status(self, service: str) -> Status:
        if (serving := self._serving.get(service)) is None:
            return Status(status=Status.SERVICE_UNKNOWN)
        return Status(status=Status.SERVING if serving else Status.NOT_SERVING)
