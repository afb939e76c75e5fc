"""One incarnation of a worker: it listens, registers, renews its lease, obeys commands, and leaves in order.

  register ──> beat ──order──> drain ──nothing left, or its grace is over──> deregister ──> leave
                 └────────────SIGTERM────────────┴────────────────────────────────^

Read `run_incarnation` first, then `Beats` (heartbeat, orders, drain) and `Lease`. The lease is also measured by the
worker's own clock; a lapsed lease is never renewed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType

import grpc
import structlog
from grpc_health.v1 import health_pb2_grpc

from baton import __version__
from baton.clock import Clock, SystemClock
from baton.core import Incarnation, Load, WorkerInfo, WorkerRef
from baton.engine.determinism.checks import bits_fingerprint
from baton.engine.engine import Engine
from baton.engine.step_result import StepResult
from baton.errors import EngineFault, LedgerError
from baton.event_journal import OFF, History
from baton.ledger.control_state import ControlState, WorkerCommand
from baton.ledger.registry import MAX_REASON_CHARS, Ledger
from baton.metrics.http import MetricsServer
from baton.metrics.worker import Watched, WorkerMetrics
from baton.network import reachable_address
from baton.rpc import channel, convert
from baton.rpc.channel import Wire
from baton.rpc.health import Health
from baton.rpc.v1 import worker_pb2_grpc
from baton.worker.engine_factory import level_of, served_by, thinking_chunk, weight_format
from baton.worker.engine_loop import EngineLoop, Paces
from baton.worker.role import RoleDeps, RoleFactory, WorkerRole
from baton.worker.service import WorkerService
from baton.worker.settings import WorkerSettings

log = structlog.get_logger(__name__)


class Lease:
    """A worker's lease. Its age counts from the start of the last call that renewed it or could not reach Redis.

    When Redis is back, renewing fails if another incarnation took the place. If Redis lost its data, the worker
    registers again with the same incarnation; that begins the next epoch of the store (`baton.ledger.registry`).
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
        return self._clock.monotonic() - self._kept

    async def take(self) -> None:
        """Register. Raises LedgerError without Redis, EngineFault if a newer incarnation has the place."""
        self._kept = self._clock.monotonic()
        if not await self._ledger.register(self._info):
            self._lost()
            raise EngineFault(f"{self._info.ref.worker_id} is taken by another incarnation: this one is fenced")

    def check(self) -> None:
        """Raise LedgerError if the lease has lapsed by this process's clock, for whatever reason."""
        elapsed = self.age_s
        if elapsed > self.lease_s:
            self._lost()
            text = f"no progress for {elapsed:.1f} s, the lease of {self.lease_s:g} s has lapsed: the worker restarts"
            raise LedgerError(f"{self._info.ref}: {text}")

    def _lost(self) -> None:
        self._history.note("lease_lost")
        log.error("lease_lost", worker=self._info.ref)

    async def renew(self, progress: int) -> None:
        """Renew, or register again if Redis lost its data. Raises EngineFault if another incarnation has the place.
        Without Redis the worker goes on, because its streams are alive. A call times out after a third of the lease.
        """
        self.check()
        called_at = self._clock.monotonic()
        self._history.note("beat", progress=progress)
        try:
            async with asyncio.timeout(self.lease_s / 3):
                if not await self._ledger.renew(self._info.ref, progress):
                    await self.take()
        except (LedgerError, TimeoutError) as error:
            log.warning("ledger_away", error=str(error) or "no answer in time")
        self._kept = called_at


async def measured(settings: WorkerSettings, leaving: AsyncExitStack) -> tuple[WorkerMetrics, str]:
    """Serve metrics until `leaving` ends. Returns them and their address, "" if not served. Raises ConfigError."""
    metrics = WorkerMetrics(settings.cluster, __version__)
    if settings.metrics is None:
        return metrics, ""
    server = MetricsServer(metrics.registry, metrics.ready, trouble=metrics.trouble)
    bound = await server.start(settings.metrics, f"{settings.role.value}.metrics")
    leaving.push_async_callback(server.stop)
    key = f"{settings.role.value}.interface"
    return metrics, reachable_address(bound, settings.advertise, settings.interface, settings.redis_url, key)


def watched(info: WorkerInfo, lease: Lease, stepping: _Stepping, service: WorkerService, role: WorkerRole) -> Watched:
    """Return the view of an incarnation that its metrics read."""
    return Watched(
        info,
        lease.lease_s,
        load=lambda: stepping.load,
        preemptions=lambda: stepping.preemptions,
        lease_age_s=lambda: lease.age_s,
        routers=lambda: len(service.sessions),
        counts=role.counts,
    )


Ready = Callable[[WorkerRef], None]
SHUTDOWN_GRACE_S = 2.0
LEAVE_S = 1.0  # after a signal, for pushes that are nearly done
MOVE_S = 10.0  # after an order to drain or to change the role, for routers to find other workers
AHEAD, AHEAD_S = 256, 2.0  # tokens, and seconds, that a moving sequence decodes while its KV is sent
_POLL_S = 0.01
_DRAIN_POLL_S = 0.1


class _Stepping:
    """Passes steps to the role and keeps the last load report. `drained`: draining, and nothing is left."""

    def __init__(self, engine: Engine, role: WorkerRole, paces: Paces) -> None:
        self._engine = engine
        self._paces = paces
        self._role = role
        self.load = self._report()
        self.drained = False

    @property
    def preemptions(self) -> int:
        return self._engine.counters.preemptions

    def stepped(self, result: StepResult) -> None:
        self.load = self._report()
        for _, thoughts in result.thoughts:
            self._role.counts.thought(thoughts)
        self._role.stepped(result)

    def tick(self) -> None:
        self._engine.backend.check()
        self._role.tick()
        self.load = self._report()
        self.drained = self.load.draining and self._role.idle

    def _report(self) -> Load:
        return self._paces.into(self._role.load(self._engine.load()))


async def run_incarnation(
    settings: WorkerSettings, engine: Engine, factory: RoleFactory, stop: asyncio.Event, ready: Ready
) -> WorkerCommand | None:
    """Run until `stop` is set (returns None), or until an ordered drain has ended (returns the order). Raises
    BatonError if it cannot register or must not go on. When it returns, only `engine` is left.
    """
    clock = SystemClock()
    ledger = await Ledger.connect(settings.redis_url, settings.ledger_prefix, settings.lease_s, clock)
    server, wire = channel.aio_server(), Wire.of(settings.tls)
    async with contextlib.AsyncExitStack() as leaving:
        leaving.push_async_callback(ledger.close)
        address = channel.bind(server, settings.listen, wire.private, key=f"{settings.role.value}.listen")
        metrics, metrics_address = await measured(settings, leaving)
        incarnation = await ledger.mint(settings.worker_id)
        info = _info(settings, engine, incarnation, address, metrics_address)
        history = History.open(settings.history, clock, settings.role.value, settings.worker_id, str(incarnation))
        engine.pool.history = leaving.enter_context(history)
        loop = EngineLoop(engine, clock=clock)
        role = factory(RoleDeps(settings, info, engine, loop, ledger, server, clock, wire))
        stepping = _Stepping(engine, role, loop.paces)
        service = WorkerService(info, loop, role, lambda: convert.load_to_pb(stepping.load))
        health = _Health(server, metrics)
        worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
        loop.start(stepping)
        leaving.push_async_callback(role.close)  # after loop.stop, to write the last records
        leaving.push_async_callback(asyncio.to_thread, loop.stop)
        leaving.callback(service.close)
        health.report(serving=False)
        await server.start()
        leaving.push_async_exit(partial(_stop_serving, server))
        lease = Lease(ledger, info, settings.lease_s, clock, history)
        metrics.watch(watched(info, lease, stepping, service, role))
        await lease.take()
        history.note("registered")
        leaving.push_async_callback(_deregister, ledger, info.ref)
        leaving.callback(log.info, "worker_stops", worker=info.ref)
        log.info("worker_ready", worker=info.ref, role=info.role.value, address=address, fingerprint=info.fingerprint)
        health.report(serving=True)
        ready(info.ref)
        beats = Beats(info, lease, loop, service, ControlState(ledger.connection), settings, clock)
        order = await beats.run(stop)
        if order is not None:
            health.report(serving=False)
            await beats.drain(stop, order.grace_s, role, lambda: stepping.drained)
        await _deregister(ledger, info.ref)  # routers stop choosing it
        await _leave(loop, role, service, stop, ordered=order is not None)
        if stop.is_set() or order is None:
            return None
        await service.finish(LEAVE_S)
        return order


class _Health:
    """The grpc.health.v1 status of the process (service "" only) and of `/ready`."""

    def __init__(self, server: grpc.aio.Server, metrics: WorkerMetrics) -> None:
        self._metrics = metrics
        self._servicer = Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def report(self, *, serving: bool) -> None:
        self._metrics.serving = serving
        self._servicer.set("", serving=serving)


class Beats:
    """Renews the lease only while the engine thread makes progress. Reads orders from the control state."""

    def __init__(
        self,
        info: WorkerInfo,
        lease: Lease,
        loop: EngineLoop,
        service: WorkerService,
        control: ControlState,
        settings: WorkerSettings,
        clock: Clock,
    ) -> None:
        self._info = info
        self._lease = lease
        self._loop = loop
        self._service = service
        self._control = control
        self._every_s, self._ask_s = settings.heartbeat_s, settings.lease_s / 6
        self._clock = clock
        self._seen = -1

    async def run(self, stop: asyncio.Event) -> WorkerCommand | None:
        """Beat until `stop` is set (returns None), or an order asks for a drain or another role."""
        while not stop.is_set():
            await self._beat()
            order = await self._order()
            if order is not None and not order.wish and (order.drain or order.role is not self._info.role):
                log.info("worker_ordered", worker=self._info.ref, drain=order.drain, role=order.role.value)
                return order
            await _wait(stop, self._every_s)
        return None

    async def drain(self, stop: asyncio.Event, grace_s: float, role: WorkerRole, drained: Callable[[], bool]) -> None:
        """Drain until `stop` is set, `grace_s` have passed, or nothing is left and routers have that report."""
        until, over = self._clock.monotonic() + grace_s, False
        self._loop.submit(role.drain)
        while not (stop.is_set() or over or self._clock.monotonic() >= until):
            over = drained()
            await self._beat()
            await _wait(stop, min(self._every_s, _DRAIN_POLL_S))

    async def _beat(self) -> None:
        if self._loop.failure is not None:
            raise EngineFault(f"the engine thread failed: {type(self._loop.failure).__name__}") from self._loop.failure
        self._lease.check()
        self._service.beat()
        if self._loop.iterations != self._seen:
            self._seen = self._loop.iterations
            await self._lease.renew(self._seen)

    async def _order(self) -> WorkerCommand | None:
        """Read the order. Returns None, too, after a timeout: a sixth of the lease, which must not lapse."""
        try:
            async with asyncio.timeout(self._ask_s):
                return await self._control.order(self._info.ref)
        except (LedgerError, TimeoutError) as error:
            log.warning("orders_unread", error=str(error) or "no answer in time")
            return None


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


async def _leave(
    loop: EngineLoop, role: WorkerRole, service: WorkerService, stop: asyncio.Event, *, ordered: bool
) -> None:
    """Hand over running work. Its pushes get at most MOVE_S if `ordered`, and LEAVE_S after `stop`. Routers get beats.
    Raises an error of the role.
    """
    pace, clock = loop.paces.decode, asyncio.get_running_loop().time
    most = int(AHEAD_S * pace.steps / pace.seconds) if pace.seconds else AHEAD
    left = asyncio.wrap_future(loop.call(partial(role.leave, min(most, AHEAD) if ordered else 0)))
    until = clock() + (MOVE_S if ordered else LEAVE_S)
    for turn in itertools.count():
        if (left.done() and not role.busy) or loop.failure is not None or clock() >= until:
            break  # a late engine thread still hands its work over
        if stop.is_set() and ordered:
            ordered, until = False, min(until, clock() + LEAVE_S)
        if turn % 10 == 0:
            service.beat()
        await asyncio.sleep(_POLL_S)
    if left.done():
        left.result()


async def _stop_serving(
    server: grpc.aio.Server, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
) -> None:
    """Let running calls end on a clean exit. After an error or a fence, cut them immediately."""
    await server.stop(None if error else SHUTDOWN_GRACE_S)


async def _deregister(ledger: Ledger, ref: WorkerRef) -> None:
    with contextlib.suppress(LedgerError):
        await ledger.deregister(ref)


def _info(settings: WorkerSettings, engine: Engine, incarnation: Incarnation, address: str, metrics: str) -> WorkerInfo:
    port = address.rpartition(":")[2]
    advertised = f"{settings.advertise}:{port}" if settings.advertise else address
    why_not = engine.backend.nondeterminism
    return WorkerInfo(
        ref=WorkerRef(settings.worker_id, incarnation, advertised),
        role=settings.role,
        fingerprint=engine.backend.fingerprint,
        model=settings.model_name,
        max_model_len=engine.max_model_len,
        total_blocks=engine.pool.total,
        layout=engine.layout,
        pid=os.getpid(),
        host=socket.gethostname(),
        determinism="" if why_not else bits_fingerprint(engine.backend, settings.shapes),
        nondeterminism=why_not[:MAX_REASON_CHARS],
        thinking_chunk=thinking_chunk(engine.backend),
        metrics=metrics,
        cpu_level=level_of(settings, engine.layout.dtype),
        quantize=weight_format(settings),
        backend=served_by(settings),
        tokenizer=engine.tokenizer.identity(),
    )
