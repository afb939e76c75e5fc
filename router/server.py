"""The router process, put together: listeners, the worker pool, and a stop that lets running requests finish."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

import structlog
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from baton.clock import Clock, SystemClock
from baton.errors import ConfigError, NoWorker
from baton.rpc import channel
from baton.rpc.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from baton.telemetry import Metrics, MetricsServer
from baton.tokenizer import Tokenizer
from router.admin import Admin
from router.admission import Admission
from router.lifecycle import Floor
from router.policy import POLICIES
from router.requests import Identity
from router.service import Inference
from router.workers import Claim, WorkerPool, WorkerSource

log = structlog.get_logger(__name__)

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """What a router is told. Addresses are "host:port", port 0 any free one. Times in seconds."""

    name: str  # of the cluster
    model: str  # as clients name it
    version: str = ""
    max_model_len: int | None = None  # None: what the workers say
    grpc: str = "127.0.0.1:50051"
    admin: str = "127.0.0.1:0"
    metrics: str = "127.0.0.1:9100"
    policy: str = "least_loaded"
    queue_max_requests: int = 256
    queue_max_wait_s: float = 10.0
    max_request_s: float = 3600.0  # the deadline of a request whose caller set none
    client_stall_s: float = 30.0  # a client that takes nothing for this long is given up
    worker_silence_s: float = 15.0  # a worker that says nothing for this long is lost; several of its heartbeats


@dataclass(slots=True)
class RouterHandle:
    """A router that runs. The addresses are those that were bound."""

    router_id: str
    grpc: str
    admin: str
    metrics: str
    inference: Inference
    pool: WorkerPool
    _servers: tuple[aio.Server, aio.Server]
    _metrics_server: MetricsServer
    _health: Health

    async def stop(self, grace_s: float = 30.0) -> None:
        """Take nothing new, let running requests finish for `grace_s`, end the rest with NoWorker, close."""
        requests = self.inference.requests
        requests.accepting = False
        await self._health.stop()
        try:
            async with asyncio.timeout(grace_s):
                await requests.idle()
        except TimeoutError:
            for running in list(requests.running.values()):
                running.end(NoWorker("this router is stopping"))
        await asyncio.gather(*(server.stop(1.0) for server in self._servers))
        await self.pool.stop()
        await self._metrics_server.stop()
        log.info("router_stopped", router_id=self.router_id)


class Health:
    """grpc.health.v1: "" while the process serves, the Inference service while a pair of workers is there."""

    def __init__(self, pool: WorkerPool) -> None:
        self.servicer = health_aio.HealthServicer()
        self._pool = pool
        self._changed = asyncio.Event()
        self._changed.set()
        self._task = asyncio.create_task(self._run(), name="health")

    def changed(self) -> None:
        """Workers may have come or gone."""
        self._changed.set()

    async def stop(self) -> None:
        """Say NOT_SERVING from now on."""
        self._task.cancel()
        await self.servicer.enter_graceful_shutdown()

    async def _run(self) -> None:
        await self.servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        while True:
            await self._changed.wait()
            self._changed.clear()
            status = "SERVING" if self._pool.has_pair() else "NOT_SERVING"
            await self.servicer.set(SERVICE, health_pb2.HealthCheckResponse.ServingStatus.Value(status))
            await asyncio.sleep(0.05)  # not at every step of every worker


async def serve(
    settings: RouterSettings, workers: WorkerSource, tokenizer: Tokenizer, clock: Clock | None = None
) -> RouterHandle:
    """Start a router; returns when its listeners are bound. Raises ConfigError naming what is wrong.

    `workers` says who is alive (`Ledger.workers`). Nothing is left behind when this raises.
    """
    if settings.policy not in POLICIES:
        raise ConfigError(f"router.policy: {settings.policy!r} is not one of {', '.join(sorted(POLICIES))}")
    clock = clock or SystemClock()
    identity = Identity(
        settings.name, f"router-{secrets.token_hex(4)}", settings.version, settings.model, settings.max_model_len
    )
    pool = WorkerPool(workers, POLICIES[settings.policy], identity.router_id, settings.worker_silence_s, clock)
    floor = Floor(_admission(settings, pool, clock), Metrics(settings.name, settings.version), clock)
    floor.metrics.watch_blocks(pool.blocks)
    inference = Inference(
        floor,
        pool,
        tokenizer,
        identity,
        max_request_s=settings.max_request_s,
        client_stall_s=settings.client_stall_s,
    )
    return await _start(settings, floor, pool, inference, Admin(floor, pool, inference.requests, identity, clock))


def _admission(settings: RouterSettings, pool: WorkerPool, clock: Clock) -> Admission[Claim]:
    return Admission(
        pool.claim,
        Claim.release,
        pool.has_pair,
        clock=clock,
        max_requests=settings.queue_max_requests,
        max_wait_s=settings.queue_max_wait_s,
    )


async def _start(
    settings: RouterSettings, floor: Floor, pool: WorkerPool, inference: Inference, admin: Admin
) -> RouterHandle:
    public, private = channel.aio_server(link=channel.PUBLIC), channel.aio_server(link=channel.INTERNAL)
    metrics_server = MetricsServer(floor.metrics, ready=pool.has_pair)
    try:
        grpc_address, admin_address = channel.bind(public, settings.grpc), channel.bind(private, settings.admin)
        metrics_address = await metrics_server.start(settings.metrics)
    except ConfigError:
        await asyncio.gather(public.stop(None), private.stop(None))
        raise
    health = Health(pool)

    def changed() -> None:
        floor.admission.changed()
        health.changed()

    pool.on_change = changed
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, public)
    admin_pb2_grpc.add_AdminServicer_to_server(admin, private)
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, public)
    reflection.enable_server_reflection((SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME), public)
    reflection.enable_server_reflection((_ADMIN, reflection.SERVICE_NAME), private)
    await pool.start()
    await asyncio.gather(public.start(), private.start())
    router_id = inference.identity.router_id
    log.info("router_started", router_id=router_id, grpc=grpc_address, admin=admin_address, metrics=metrics_address)
    return RouterHandle(
        router_id,
        grpc_address,
        admin_address,
        metrics_address,
        inference,
        pool,
        (public, private),
        metrics_server,
        health,
    )
