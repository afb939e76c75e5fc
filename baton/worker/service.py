"""The gRPC service `Worker`, the same for both roles: one bidirectional stream per router.

`WorkerService` passes the commands of a router to the role on the engine thread. A `Session` collects the events for
one router; one message per engine step carries them, or several if they are large. `Attempts` makes a role reject late
messages of old attempts. Any field of a command may be wrong: `deadline_after` checks a deadline, `not_taken` builds
the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Any, Protocol

import grpc
import structlog

from baton.clock import Clock
from baton.core import PROTOCOL_VERSION, HandoffId, WorkerInfo
from baton.errors import BatonError, InvalidRequest, StaleAttempt
from baton.rpc import convert, message_size
from baton.rpc.status import abort
from baton.rpc.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.worker import block_census
from baton.worker.block_census import Holding
from baton.worker.engine_loop import EngineLoop

REMEMBERED = 65536


class Attempts:
    """The highest attempt of each of the last `limit` requests. Used by one thread."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._last: OrderedDict[str, int] = OrderedDict()

    def check_new(self, handoff: HandoffId) -> None:
        """Raise StaleAttempt if this attempt, or a later one, was seen here."""
        last = self._last.get(handoff.request_id, 0)
        if handoff.attempt <= last:
            raise StaleAttempt(f"{handoff}: attempt {last} was already seen here")

    def saw(self, handoff: HandoffId) -> None:
        """Record an attempt. From now on it and all older attempts of its request are stale."""
        last = self._last.pop(handoff.request_id, 0)
        self._last[handoff.request_id] = max(last, handoff.attempt)
        if len(self._last) > self._limit:
            self._last.popitem(last=False)


def deadline_after(seconds: float, clock: Clock, field: str = "deadline_s") -> float | None:
    """Return the monotonic time `seconds` from now; 0 means None. Raises InvalidRequest if negative or not finite."""
    if not 0 <= seconds < math.inf:  # also rejects NaN
        raise InvalidRequest.of(field, f"must be finite and at least 0, got {seconds}")
    return clock.monotonic() + seconds if seconds else None


ANSWERED = {"reserve", "prefill", "repush", "fence", "attach"}  # commands about one handoff


def not_taken(
    command: worker_pb2.RouterCommand,
    detail: str,
    reason: worker_pb2.RefusalReason.ValueType = worker_pb2.REFUSAL_REASON_INVALID,
) -> list[worker_pb2.WorkerEvent]:
    """Build the refusal of a command, with the handoff id of the command. A Release is never answered."""
    answered = [value for field, value in command.ListFields() if field.name in ANSWERED]
    refused = worker_pb2.Refused(reason=reason, detail=detail)
    return [worker_pb2.WorkerEvent(handoff=message.handoff, refused=refused) for message in answered]


LoadSource = Callable[[], common_pb2.Load]


class Session:
    """The event queue of one router. `emit` may be called from any thread and never blocks."""

    def __init__(self, router_id: str, loop: asyncio.AbstractEventLoop, load: LoadSource) -> None:
        self.router_id = router_id
        self.handoffs: set[HandoffId] = set()  # of this router; engine thread only
        self._loop = loop
        self._load = load
        self._lock = threading.Lock()
        self._pending: list[list[worker_pb2.WorkerEvent]] = []  # one list per `emit`
        self._ready: list[worker_pb2.WorkerMessage] = []  # the next messages; used only by `next_message`
        self._wake = asyncio.Event()
        self._closed = False
        self._finishing = False

    def emit(self, events: Iterable[worker_pb2.WorkerEvent]) -> None:
        """Queue events for the next message. Those of one call share a message, unless they exceed its limit."""
        with self._lock:
            if self._closed:
                return
            idle = not self._pending
            self._pending.append(list(events))
        if idle:
            self._signal()

    def beat(self) -> None:
        """Send a load report even without events. On the asyncio thread."""
        self._wake.set()

    async def next_message(self) -> worker_pb2.WorkerMessage | None:
        """Wait for the next message to the router. Returns None once the session is closed."""
        if not self._ready:
            await self._wake.wait()
            self._wake.clear()
            with self._lock:
                batches, self._pending = self._pending, []
            if self._finishing:
                self._wake.set()
            if batches or not self._finishing:
                self._ready = [worker_pb2.WorkerMessage(events=part) for part in message_size.within(batches)]
        if self._closed or not self._ready:
            return None
        message = self._ready.pop(0)
        message.load.CopyFrom(self._load())
        return message

    def finish(self) -> None:
        """Make `next_message` return the pending events, and then None. On the asyncio thread."""
        self._finishing = True
        self._wake.set()

    def close(self) -> None:
        """Drop pending events and make `next_message` return None. From any thread."""
        with self._lock:
            self._closed = True
            self._pending = []
        self._signal()

    def _signal(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            self._closed = True  # the process is ending: its event loop is closed


log = structlog.get_logger(__name__)


class RoleBehaviour(Protocol):
    """The commands that a role, prefill or decode, implements. All methods run on the engine thread."""

    def command(self, session: Session, command: worker_pb2.RouterCommand) -> None:
        """Execute a command. Raises InvalidRequest, without side effects, if malformed or for the other role."""

    def gone(self, session: Session) -> None:
        """Release everything that this router has here, because its stream ended."""

    def holdings(self) -> Iterable[Holding]:
        """Return the blocks of each handoff, read from the tables of the role."""


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Accepts routers, submits their commands to the engine thread, and streams events back."""

    def __init__(
        self, info: WorkerInfo, loop: EngineLoop, role: RoleBehaviour, load: LoadSource, *, hello_s: float = 10.0
    ) -> None:
        self._info = info
        self._engine_loop = loop
        self._role = role
        self._load = load
        self._hello_s = hello_s
        self.sessions: set[Session] = set()

    async def Connect(
        self, request_iterator: AsyncIterator[worker_pb2.RouterMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        session = await self._greet(request_iterator, context)
        self.sessions.add(session)
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            session.emit([worker_pb2.WorkerEvent(welcome=convert.info_to_pb(self._info))])
            while (message := await session.next_message()) is not None:
                yield message
        finally:
            reader.cancel()
            self._leave(session)

    async def Census(
        self, request: worker_pb2.CensusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.CensusReply:
        try:
            return block_census.to_pb(await block_census.take(self._engine_loop, self._info.ref, self._role.holdings))
        except BatonError as error:
            await abort(context, error)

    async def _greet(
        self, requests: AsyncIterator[worker_pb2.RouterMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> Session:
        first = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._hello_s):
                first = await anext(aiter(requests), None)
        if first is None or len(first.commands) != 1 or not first.commands[0].HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be one RouterHello")
            raise AssertionError("abort raises")
        hello = first.commands[0].hello
        if hello.protocol_version != PROTOCOL_VERSION:
            text = f"protocol_version: {hello.protocol_version} is not supported, only {PROTOCOL_VERSION}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        if convert.incarnation_from_pb(hello.worker) != self._info.ref.incarnation:
            text = f"this is {self._info.ref}, not the requested worker"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        log.info("router_joined", router=hello.router_id)
        return Session(hello.router_id, asyncio.get_running_loop(), self._load)

    async def _read(self, session: Session, requests: AsyncIterator[worker_pb2.RouterMessage]) -> None:
        try:
            async for message in requests:
                for command in message.commands:
                    self._engine_loop.submit(partial(self._obey, session, command))
        except grpc.RpcError as error:
            log.info("router_lost", router=session.router_id, error=str(error))
        except Exception:  # task boundary, for example undecodable bytes
            log.exception("router_unreadable", router=session.router_id)
        finally:
            session.close()  # its commands are no longer read, so it gets no events

    def _obey(self, session: Session, command: worker_pb2.RouterCommand) -> None:
        """Execute a command on the engine thread. A malformed one is refused and affects no other command."""
        try:
            self._role.command(session, command)
        except InvalidRequest as error:
            kind = command.WhichOneof("command")
            log.warning("command_refused", kind=kind, router=session.router_id, error=str(error))
            session.emit(not_taken(command, str(error)))

    def _leave(self, session: Session) -> None:
        """End a session, once: when its stream ends, or on `close`."""
        if session in self.sessions:
            self.sessions.remove(session)
            session.close()
            self._engine_loop.submit(partial(self._role.gone, session))
            log.info("router_gone", router=session.router_id)

    async def finish(self, within_s: float) -> None:
        """End all streams after their pending events were sent, or after `within_s` seconds."""
        for session in self.sessions:
            session.finish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.sessions:  # noqa: ASYNC110  (each leaves the set by itself)
                    await asyncio.sleep(0.01)

    def close(self) -> None:
        """End all sessions. Needed because stopping the server does not wait for the calls that it cancels."""
        for session in list(self.sessions):
            self._leave(session)

    def beat(self) -> None:
        """Send a load report to every router, even when idle."""
        for session in self.sessions:
            session.beat()
