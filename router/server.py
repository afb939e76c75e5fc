"""The router process: its listeners, the worker pool, and a graceful stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import grpc
import structlog
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.clock import Clock, SystemClock
from baton.control_plane import pool_size
from baton.core import Role
from baton.errors import ConfigError, LedgerError, NoWorker
from baton.ledger.control_state import ControlState, RouterReport
from baton.ledger.prefix_index import PrefixIndex
from baton.limits import http_waiting
from baton.metrics import MetricsServer
from baton.metrics.http import Target, target
from baton.rpc import channel
from baton.rpc.channel import PLAINTEXT
from baton.rpc.health import LOOK_S, Health
from baton.rpc.v1 import admin_pb2_grpc, inference_pb2_grpc
from baton.tokenizer import Tokenizer
from router.admin import Admin
from router.auth.interceptor import Guard
from router.context import RouterContext, RouterSettings, build_context
from router.openai.loopback import LoopbackListener
from router.placement.policy import POLICIES
from router.request.lifecycle import StreamSource
from router.service import Inference
from router.status import ENDINGS
from router.workers.pool import WorkerPool, WorkerSource

if TYPE_CHECKING:
    from router.openai.server import HttpServer


log = structlog.get_logger(__name__)

SERVICE = "baton.v1.Inference"
_CLOSING_S = 1.0
_WITHIN_S = 1.0  # maximum wait of a scrape for the ledger
_DEMAND_S = 1.0
_DEMAND_LEASE_S = 5.0


async def update_control_metrics(context: RouterContext, control_state: ControlState | None) -> None:
    """Update the controller's metrics before a scrape. Without the ledger, they keep their last values."""
    if control_state is None:
        return
    metrics = context.sinks.metrics.control
    with suppress(LedgerError, TimeoutError):
        async with asyncio.timeout(_WITHIN_S):
            report = await control_state.control()
        if report is None:
            metrics.clear()
            return
        slots = [(slot.role, slot.state, slot.restarts) for slot in report.slots]
        decisions = [(decision.at, decision.kind) for decision in report.decisions]
        metrics.update({role.value: pool_size(report.plan, role) for role in Role}, slots, decisions)


async def targets(
    context: RouterContext, control_state: ControlState | None, metrics_at: Callable[[], str]
) -> Sequence[Target]:
    """Return scrape targets: all routers of the ledger and this one at `metrics_at`, and this router's workers."""
    routers = {context.sinks.router_id: metrics_at()}
    if control_state is not None:
        with suppress(LedgerError, TimeoutError):
            async with asyncio.timeout(_WITHIN_S):
                reports = await control_state.routers()
                routers |= {report.router_id: report.metrics for report in reports if report.metrics}
    name = context.settings.name
    found = [target(address, name, "router", router_id) for router_id, address in sorted(routers.items())]
    return found + [
        target(address, name, "worker", worker_id) for worker_id, address in context.pool.metrics_addresses()
    ]


def current_demand(context: RouterContext, metrics_at: str) -> RouterReport:
    """Return the current load of the workers, the queue and the requests. `metrics_at` is the metrics' address."""
    report, queue = context.pool.expected(), context.admission
    running, outcomes = len(context.running), context.sinks.outcomes
    queue_s = max(queue.wait_s, queue.longest_s)
    return report.model_copy(
        update={
            "queued": queue.queued,
            "queued_tokens": queue.queued_tokens,
            "oldest_s": queue.longest_s,
            "queue_s": queue_s,
            "ttft_s": report.ttft_s and report.ttft_s + queue_s,
            "running": running,
            "arrived": running + sum(outcomes[outcome] for outcome in ENDINGS),
            "refused": outcomes["refused"],
            "metrics": metrics_at,
        }
    )


async def starting(pool: WorkerPool, control_state: ControlState) -> str:
    """Return the decode workers that the controller is starting, as text, if none can serve now. Raises LedgerError."""
    report = None if pool.can_serve() else await control_state.control()
    slots = () if report is None else report.slots
    return ", ".join(slot.worker_id for slot in slots if (slot.role, slot.state) == (Role.DECODE, "starting"))


async def follow_control(current: Callable[[], RouterReport], pool: WorkerPool, control_state: ControlState) -> None:
    """Publish the `current` load and read which workers are starting, every second until cancelled. Errors of the
    ledger are only logged.
    """
    failed = False
    while True:
        try:
            await control_state.put_router(current(), _DEMAND_LEASE_S)
            pool.starting = await starting(pool, control_state)
            failed = False
        except LedgerError as error:
            pool.starting = ""
            if not failed:
                log.warning("demand_not_told", error=str(error))
            failed = True
        await asyncio.sleep(_DEMAND_S)


class Router:
    """A router. `grpc`, `admin`, `metrics` and `http` are its bound addresses; `http` is "" without a gateway.
    `metrics_at` is the address of the metrics for other hosts; the owner may set it.
    """

    def __init__(self, context: RouterContext, tokenizer: Tokenizer, control_state: ControlState | None = None) -> None:
        self.context = context
        self.grpc = self.admin = self.metrics = self.http = self.metrics_at = ""
        guards = [Guard(context.tokens)] if context.tokens else []
        share = context.settings.share_port
        self._public = channel.aio_server(link=channel.PUBLIC, interceptors=guards, share_port=share)
        self._private = channel.aio_server(link=channel.INTERNAL, interceptors=guards)
        self._inner = LoopbackListener(guards)
        self._look = partial(update_control_metrics, context, control_state)
        self._metrics = MetricsServer(
            context.sinks.metrics.registry,
            ready=lambda: context.running.accepting and context.pool.can_serve(),
            look=self._look,
            targets=partial(targets, context, control_state, lambda: self.metrics_at),
        )
        self._health = Health()
        self._gateway: HttpServer | None = None
        self._control_state = control_state
        self._watches: list[asyncio.Task[None]] = []
        inference = Inference(context, tokenizer)
        for server in (self._public, self._inner.server):
            inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        self._admin = Admin(context, control_state)
        admin_pb2_grpc.add_AdminServicer_to_server(self._admin, self._private)
        names = (SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._public)
        reflection.enable_server_reflection(("baton.v1.Admin", reflection.SERVICE_NAME), self._private)

    async def start(self) -> None:
        """Bind all listeners, connect to workers, and serve. Raises ConfigError, and then releases everything."""
        settings = self.context.settings
        try:
            self.grpc = channel.bind(self._public, settings.grpc, self.context.wire.public, key="router.grpc")
            self.admin = channel.bind(self._private, settings.admin, self.context.wire.private, key="router.admin")
            self.metrics = self.metrics_at = await self._metrics.start(settings.metrics, "router.metrics")
            self._gateway = _gateway(self.context, self._admin, self._look) if settings.http else None
            inner = self._inner.bind() if settings.http else ""
        except ConfigError as error:
            if self._gateway is not None:
                await self._gateway.stop(0)
            await asyncio.gather(*(server.stop(None) for server in self._servers), self._metrics.stop())
            if self.context.exporter is not None:
                self.context.exporter.close()
            self.context.sinks.history.close(error)
            raise
        await self.context.pool.start()
        await asyncio.gather(self._public.start(), self._private.start())
        if inner:
            await self._inner.server.start()
        watches = {"health": self._report_health(), "live": self._admin.live.run()}
        if self.context.tokens is not None:
            watches["tokens"] = self.context.tokens.watch()
        if self._control_state is not None:
            current = partial(current_demand, self.context)
            watches["control"] = follow_control(
                lambda: current(self.metrics_at), self.context.pool, self._control_state
            )
        self._watches += [asyncio.create_task(watch, name=name) for name, watch in watches.items()]
        if self._gateway is not None:
            self.http = self._gateway.address
            await self._gateway.start(inner, PLAINTEXT)
        bound = {"grpc": self.grpc, "admin": self.admin, "metrics": self.metrics, "http": self.http}
        log.info("router_started", router_id=self.context.sinks.router_id, **bound)

    async def stop(self, grace_s: float = 30.0) -> None:
        """Reject new requests, give running ones `grace_s`, end the rest with NoWorker, and close. Decode workers go on
        with resumable ones.
        """
        self.context.running.stop()
        # Closes the listener and sends GOAWAY, so that new calls go to another router.
        closing = asyncio.create_task(self._public.stop(grace_s + 2 * _CLOSING_S))
        for watch in self._watches:
            watch.cancel()
        self._health.stop()
        leaving = [asyncio.create_task(self._gateway.stop(grace_s + _CLOSING_S))] if self._gateway is not None else []
        if self.context.running:
            await asyncio.wait([call.task for call in self.context.running], timeout=grace_s)
        self.context.running.hand_over(NoWorker("this router is stopping"))
        self._admin.live.close()
        if leaving:  # HTTP answers end after their gRPC calls
            await asyncio.wait(leaving, timeout=_CLOSING_S)
            leaving[0].cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
        await asyncio.gather(closing, *(server.stop(_CLOSING_S) for server in self._servers))
        if self._control_state is not None:
            with suppress(LedgerError, TimeoutError):
                async with asyncio.timeout(_CLOSING_S):
                    await self._control_state.drop_router(self.context.sinks.router_id)
        await self.context.pool.stop()
        await self._metrics.stop()
        if self.context.exporter is not None:
            await asyncio.to_thread(self.context.exporter.close)
        self.context.sinks.history.close()
        log.info("router_stopped", router_id=self.context.sinks.router_id)

    @property
    def _servers(self) -> tuple[grpc.aio.Server | LoopbackListener, ...]:
        return self._public, self._inner, self._private

    async def _report_health(self) -> None:
        """Report gRPC health: "" while the process serves, Inference while a decode worker is connected."""
        while True:
            self._health.set(SERVICE, serving=self.context.pool.can_serve())
            await asyncio.sleep(LOOK_S)


def _gateway(context: RouterContext, admin: Admin, look: Callable[[], Awaitable[None]]) -> HttpServer:
    """Return the bound HTTP gateway. Raises ConfigError, also if its libraries are missing."""
    try:
        from router.dashboard.app import LiveData
        from router.openai.server import GatewaySettings, HttpServer
    except ModuleNotFoundError as error:
        text = f"{error.name} is not installed: pip install 'baton-serve[gateway]', or leave router.http out"
        raise ConfigError(f"router.http: {text}") from error
    settings = context.settings
    serving = GatewaySettings(
        settings.version,
        settings.http_body,
        stall_s=settings.client_stall_s,
        registry=context.sinks.metrics.registry,
        look=look,
        tls=settings.tls,
        live=LiveData(admin.live, context.tokens, admin.trace_of),
        refused=context.sinks.metrics.refused,
        rejected=context.sinks.rejected,
        waiting=http_waiting(settings.queue_max_requests),
        names=settings.http_names if context.tokens is None else None,
        origins=settings.http_origins,
        ignores_unknown=settings.http_ignores_unknown,
    )
    return HttpServer(settings.http or "", serving, share_port=settings.share_port)


async def serve(
    settings: RouterSettings,
    workers: WorkerSource,
    tokenizer: Tokenizer,
    clock: Clock | None = None,
    prefixes: PrefixIndex | None = None,
    streams: StreamSource | None = None,
    control_state: ControlState | None = None,
) -> Router:
    """Start a router and return it when its listeners are bound. Raises ConfigError, and then leaves nothing behind.
    `workers` lists the live workers (`Ledger.workers`), `prefixes` their cached blocks (from a `DirectoryView`).
    `streams` finds the decode worker of a stream (`OwnershipStore.find`). The controller also uses `control_state`.
    """
    if settings.policy not in POLICIES:
        raise ConfigError(f"router.policy: {settings.policy!r} is not one of {', '.join(sorted(POLICIES))}")
    context = build_context(settings, workers, clock or SystemClock(), prefixes, streams, tokenizer.identity())
    router = Router(context, tokenizer, control_state)
    await router.start()
    return router
