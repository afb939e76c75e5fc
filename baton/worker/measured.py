"""A worker's metrics: where they are served, and how they ask what it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from baton import __version__
from baton.addresses import called
from baton.telemetry.serve import MetricsServer
from baton.telemetry.worker import Watched, WorkerMetrics

if TYPE_CHECKING:
    from contextlib import AsyncExitStack

    from baton.core import WorkerInfo
    from baton.load import Load
    from baton.worker.hosted import HostedRole
    from baton.worker.lease import Lease
    from baton.worker.service import WorkerService
    from baton.worker.settings import WorkerSettings


class Stepping(Protocol):
    """The engine thread's last words."""

    load: Load

    @property
    def preemptions(self) -> int: ...


async def measured(settings: WorkerSettings, leaving: AsyncExitStack) -> tuple[WorkerMetrics, str]:
    """They are served until `leaving` ends, at the address that is returned; "": nowhere. Raises ConfigError."""
    metrics = WorkerMetrics(settings.cluster, __version__)
    if settings.metrics is None:
        return metrics, ""
    server = MetricsServer(metrics, metrics.ready, trouble=metrics.trouble)
    bound = await server.start(settings.metrics)
    leaving.push_async_callback(server.stop)
    key = f"{settings.role.value}.interface"
    return metrics, called(bound, settings.advertise, settings.interface, settings.redis_url, key)


def watched(info: WorkerInfo, lease: Lease, stepping: Stepping, service: WorkerService, role: HostedRole) -> Watched:
    """An incarnation, as its metrics are to see it."""
    return Watched(
        info,
        lease.lease_s,
        load=lambda: stepping.load,
        preemptions=lambda: stepping.preemptions,
        lease_age_s=lambda: lease.age_s,
        routers=lambda: len(service.sessions),
        counts=role.counts,
    )
