"""The host process of a worker: builds the engine, listens, registers, beats, and leaves in order.

The host knows no role. A `RoleFactory` gets the parts and returns the role and the services it adds.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import structlog

from baton.clock import Clock, SystemClock
from baton.core import Role, WorkerInfo, WorkerRef
from baton.engine.determinism import bits_fingerprint
from baton.errors import EngineFault, LedgerError
from baton.history import History
from baton.ledger.ledger import Ledger
from baton.load import Load
from baton.rpc import channel, reports
from baton.rpc.tls import IN_THE_CLEAR, Wire
from baton.rpc.v1 import worker_pb2_grpc
from baton.worker.build import build_engine, thinking_chunk
from baton.worker.lease import Lease
from baton.worker.loop import EngineLoop, Paces
from baton.worker.service import RoleBehaviour, WorkerService
from baton.worker.settings import WorkerSettings
from baton.worker.shapes import settled

if TYPE_CHECKING:
    import grpc

    from baton.engine.engine import Engine
    from baton.engine.outcome import StepResult

log = structlog.get_logger(__name__)
SHUTDOWN_GRACE_S = 2.0
LEAVE_S = 1.0
_LOOK_S = 0.01
_LONGEST_REASON = 1024  # that a record takes


class HostedRole(RoleBehaviour, Protocol):
    """A role as the host sees it."""

    def stepped(self, result: StepResult) -> None: ...

    def tick(self) -> None: ...

    def load(self, load: Load) -> Load:
        """Complete the engine's load report with what the role knows. On the engine thread."""

    def leave(self) -> None:
        """Take nothing new, and give back to routers what this worker will not end. On the engine thread."""

    @property
    def busy(self) -> bool:
        """Whether something is left that will end soon."""

    async def close(self) -> None:
        """Stop transfers and background writers."""


@dataclass(frozen=True, slots=True)
class HostParts:
    """What a role is built from."""

    settings: WorkerSettings
    info: WorkerInfo
    engine: Engine
    loop: EngineLoop
    ledger: Ledger
    server: grpc.aio.Server
    clock: Clock
    wire: Wire = IN_THE_CLEAR


RoleFactory = Callable[[HostParts], HostedRole]
Factories = Mapping[Role, RoleFactory]
Ready = Callable[[WorkerRef], None]


class _Stepping:
    """Passes steps to the role and keeps what is reported of its load, for the messages of sessions."""

    def __init__(self, engine: Engine, role: HostedRole, paces: Paces) -> None:
        self._engine = engine
        self._paces = paces
        self._role = role
        self.load = self._report()

    def stepped(self, result: StepResult) -> None:
        self.load = self._report()
        self._role.stepped(result)

    def tick(self) -> None:
        self._engine.backend.check()
        self._role.tick()
        self.load = self._report()

    def _report(self) -> Load:
        return self._paces.into(self._role.load(self._engine.load()))


async def serve(
    both: Mapping[Role, WorkerSettings], factories: Factories, role_now: Role, stop: asyncio.Event, ready: Ready
) -> None:
    """Run one worker until `stop` is set. Raises BatonError when it cannot start or must not go on."""
    clock = SystemClock()
    factory, settings = factories[role_now], await asyncio.to_thread(settled, both[role_now])
    engine = await asyncio.to_thread(build_engine, settings)
    ledger = await Ledger.connect(settings.redis_url, settings.ledger_prefix, settings.lease_s, clock)
    server, wire = channel.aio_server(), Wire.of(settings.tls)
    async with contextlib.AsyncExitStack() as leaving:
        leaving.callback(engine.backend.close)
        leaving.push_async_callback(ledger.close)
        address = channel.bind(server, settings.listen, wire.private)
        info = _info(settings, engine, WorkerRef(settings.worker_id, await ledger.mint(settings.worker_id), address))
        history = _history(settings, info.ref, clock)
        engine.pool.history = leaving.enter_context(history)
        loop = EngineLoop(engine, clock=clock)
        role = factory(HostParts(settings, info, engine, loop, ledger, server, clock, wire))
        stepping = _Stepping(engine, role, loop.paces)
        service = WorkerService(info, loop, role, lambda: reports.load_to_pb(stepping.load))
        worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
        loop.start(stepping)
        leaving.push_async_callback(role.close)  # last of these: what the engine thread still notes must get out
        leaving.push_async_callback(asyncio.to_thread, loop.stop)
        leaving.callback(service.close)
        await server.start()
        leaving.push_async_exit(partial(_stop_serving, server))
        lease = Lease(ledger, info, settings.lease_s, clock, history)
        await lease.take()
        history.note("registered")
        leaving.push_async_callback(_deregister, ledger, info.ref)
        log.info("worker_ready", worker=str(info.ref), address=info.ref.address, fingerprint=info.fingerprint)
        ready(info.ref)
        await _beat(lease, loop, service, stop, settings.heartbeat_s)
        await _deregister(ledger, info.ref)  # routers look elsewhere
        await _leave(loop, role)


async def _leave(loop: EngineLoop, role: HostedRole) -> None:
    """Hand over what is under way, and let what is nearly done be done."""
    left: Future[None] = Future()
    loop.submit(lambda: left.set_result(role.leave()))  # type: ignore[func-returns-value]  # None, once it has left
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LEAVE_S):
            await asyncio.wrap_future(left)
            while role.busy:  # noqa: ASYNC110  (the engine thread tells nobody)
                await asyncio.sleep(_LOOK_S)


async def _beat(
    lease: Lease, loop: EngineLoop, service: WorkerService, stop: asyncio.Event, heartbeat_s: float
) -> None:
    """Renew the lease while the engine thread makes progress; a process without it, or frozen too long, must not."""
    seen = -1
    while not stop.is_set():
        if loop.failure is not None:
            raise EngineFault(f"the engine thread failed: {type(loop.failure).__name__}") from loop.failure
        lease.check()
        service.beat()
        if loop.iterations != seen:
            seen = loop.iterations
            await lease.renew(seen)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), heartbeat_s)


async def _stop_serving(
    server: grpc.aio.Server, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
) -> None:
    """Who leaves in peace lets running calls end; who is fenced, or broken, says nothing more."""
    await server.stop(None if error else SHUTDOWN_GRACE_S)


async def _deregister(ledger: Ledger, ref: WorkerRef) -> None:
    with contextlib.suppress(LedgerError):
        await ledger.deregister(ref)


def _history(settings: WorkerSettings, ref: WorkerRef, clock: Clock) -> History:
    return History.open(settings.history, clock, settings.role.value, ref.worker_id, str(ref.incarnation))


def _info(settings: WorkerSettings, engine: Engine, ref: WorkerRef) -> WorkerInfo:
    port = ref.address.rpartition(":")[2]
    advertised = replace(ref, address=f"{settings.advertise}:{port}") if settings.advertise else ref
    why_not = engine.backend.nondeterminism
    return WorkerInfo(
        ref=advertised,
        role=settings.role,
        fingerprint=engine.backend.fingerprint,
        model=settings.model_name,
        max_model_len=engine.max_model_len,
        total_blocks=engine.pool.total,
        layout=engine.layout,
        pid=os.getpid(),
        host=socket.gethostname(),
        determinism="" if why_not else bits_fingerprint(engine.backend, settings.shapes),
        nondeterminism=why_not[:_LONGEST_REASON],
        thinking_chunk=thinking_chunk(engine.backend),
    )


def run_worker(
    settings: Mapping[Role, WorkerSettings], factories: Factories, role: Role, stop: threading.Event, ready: Ready
) -> None:
    """`serve` on an event loop of its own, until `stop` is set from any thread. Blocks."""

    async def main() -> None:
        leave = asyncio.Event()
        loop = asyncio.get_running_loop()
        waiter = threading.Thread(target=_forward, args=(stop, loop, leave), daemon=True)
        waiter.start()
        await serve(settings, factories, role, leave, ready)

    asyncio.run(main())


def _forward(stop: threading.Event, loop: asyncio.AbstractEventLoop, leave: asyncio.Event) -> None:
    stop.wait()
    with contextlib.suppress(RuntimeError):  # the loop has ended already
        loop.call_soon_threadsafe(leave.set)
