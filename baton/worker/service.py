"""The gRPC face of a worker: service `Worker`, one bidirectional stream per router, the same for both roles.

Which attempt of each request a worker saw last: a late message of an old one is refused wherever it arrives.

What both roles need to read a router's commands, of which any field may be wrong.

One router's stream into this worker: events gather here and leave as one message per engine step.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import structlog

from baton.core import PROTOCOL_VERSION, HandoffId, WorkerInfo
from baton.errors import BatonError, InvalidRequest, StaleAttempt
from baton.rpc import convert
from baton.rpc.status import abort
from baton.rpc.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from baton.worker import block_census
from baton.worker.block_census import Holding
from baton.worker.engine_loop import EngineLoop

if TYPE_CHECKING:
    from baton.clock import Clock


REMEMBERED = 65536


class Attempts:
    """The highest attempt of each of the last `limit` requests. Used by one thread."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._last: OrderedDict[str, int] = OrderedDict()

    def check_new(self, handoff: HandoffId) -> None:
        """Raises StaleAttempt if this attempt, or a later one, was seen here."""
        last = self._last.get(handoff.request_id, 0)
        if handoff.attempt <= last:
            raise StaleAttempt(f"{handoff}: attempt {last} was seen here already")

    def saw(self, handoff: HandoffId) -> None:
        """From now on neither this attempt nor an older one is new."""
        last = self._last.pop(handoff.request_id, 0)
        self._last[handoff.request_id] = max(last, handoff.attempt)
        if len(self._last) > self._limit:
            self._last.popitem(last=False)


def deadline_after(seconds: float, clock: Clock, field: str = "deadline_s") -> float | None:
    """The moment `seconds` from now; 0 is none. Raises InvalidRequest for what no clock would ever reach."""
    if not 0 <= seconds < math.inf:  # a NaN is in no range
        raise InvalidRequest.of(field, f"must be finite and at least 0, got {seconds}")
    return clock.monotonic() + seconds if seconds else None


def not_taken(command: worker_pb2.RouterCommand, detail: str) -> list[worker_pb2.WorkerEvent]:
    """The answer to a malformed command, under the very id it came with; a Release is never answered."""
    match command.WhichOneof("command"):
        case "reserve":
            handoff = command.reserve.handoff
        case "prefill":
            handoff = command.prefill.handoff
        case "repush":
            handoff = command.repush.handoff
        case "fence":
            handoff = command.fence.handoff
        case "attach":
            handoff = command.attach.handoff
        case _:
            return []
    refused = worker_pb2.Refused(reason=worker_pb2.REFUSAL_REASON_INVALID, detail=detail)
    return [worker_pb2.WorkerEvent(handoff=handoff, refused=refused)]


LoadSource = Callable[[], common_pb2.Load]


class Session:
    """Events for one router. `emit` may be called from any thread and never blocks."""

    def __init__(self, router_id: str, loop: asyncio.AbstractEventLoop, load: LoadSource) -> None:
        self.router_id = router_id
        self.handoffs: set[HandoffId] = set()  # what this router has here; engine thread only
        self._loop = loop
        self._load = load
        self._lock = threading.Lock()
        self._pending: list[worker_pb2.WorkerEvent] = []
        self._wake = asyncio.Event()
        self._closed = False
        self._finishing = False

    def emit(self, events: Iterable[worker_pb2.WorkerEvent]) -> None:
        """Queue events; all of one call leave in one message, as do those of calls that come before it is sent."""
        with self._lock:
            if self._closed:
                return
            idle = not self._pending
            self._pending.extend(events)
        if idle:
            self._signal()

    def beat(self) -> None:
        """Send a load report even if nothing happened. On the asyncio thread."""
        self._wake.set()

    async def next_message(self) -> worker_pb2.WorkerMessage | None:
        """The next message for the router; None once the session is closed."""
        await self._wake.wait()
        self._wake.clear()
        with self._lock:
            if self._closed or (self._finishing and not self._pending):
                return None
            events, self._pending = self._pending, []
        if self._finishing:
            self._wake.set()
        return worker_pb2.WorkerMessage(events=events, load=self._load())

    def finish(self) -> None:
        """Let `next_message` return what is pending, and then None. On the asyncio thread."""
        self._finishing = True
        self._wake.set()

    def close(self) -> None:
        """Drop what is pending and let `next_message` return None. From any thread."""
        with self._lock:
            self._closed = True
            self._pending = []
        self._signal()

    def _signal(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            self._closed = True  # the process is going down: its event loop is closed already


log = structlog.get_logger(__name__)


class RoleBehaviour(Protocol):
    """What makes a worker a prefill or a decode worker. All methods run on the engine thread."""

    def command(self, session: Session, command: worker_pb2.RouterCommand) -> None:
        """Obey. Raises InvalidRequest for a command that is malformed or for another role; nothing was done then."""

    def gone(self, session: Session) -> None:
        """The router's stream ended: what it had here is released."""

    def holdings(self) -> Iterable[Holding]:
        """Who holds which blocks, by the tables of those who should."""


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Accepts routers, hands their commands to the role on the engine thread, and streams events back."""

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
        self,
        request_iterator: AsyncIterator[worker_pb2.RouterMessage],
        context: grpc.aio.ServicerContext[Any, Any],
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
        self,
        requests: AsyncIterator[worker_pb2.RouterMessage],
        context: grpc.aio.ServicerContext[Any, Any],
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
            text = f"protocol_version: {hello.protocol_version} is not spoken here, but {PROTOCOL_VERSION}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        if convert.incarnation_from_pb(hello.worker) != self._info.ref.incarnation:
            text = f"this is {self._info.ref}, not the worker you mean"
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
        except Exception:  # the task's boundary: bytes that are no message, say
            log.exception("router_unreadable", router=session.router_id)
        finally:
            session.close()  # nobody is served whose commands are not read

    def _obey(self, session: Session, command: worker_pb2.RouterCommand) -> None:
        """On the engine thread. A malformed command costs its sender that command, and nobody else anything."""
        try:
            self._role.command(session, command)
        except InvalidRequest as error:
            kind = command.WhichOneof("command")
            log.warning("command_refused", kind=kind, router=session.router_id, error=str(error))
            session.emit(not_taken(command, str(error)))

    def _leave(self, session: Session) -> None:
        """Once per session: by the end of its stream, or by `close`."""
        if session in self.sessions:
            self.sessions.remove(session)
            session.close()
            self._engine_loop.submit(partial(self._role.gone, session))
            log.info("router_gone", router=session.router_id)

    async def finish(self, within_s: float) -> None:
        """End all streams, each when its router was told all that there is to say; or when `within_s` are over."""
        for session in self.sessions:
            session.finish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.sessions:  # noqa: ASYNC110  (each leaves the set by itself)
                    await asyncio.sleep(0.01)

    def close(self) -> None:
        """No router is here any more. The server's stop does not wait until the calls that it cancels have ended."""
        for session in list(self.sessions):
            self._leave(session)

    def beat(self) -> None:
        """A load report to every router, even when idle."""
        for session in self.sessions:
            session.beat()
