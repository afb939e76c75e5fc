"""The gRPC face of a worker: service `Worker`, one bidirectional stream per router, the same for both roles."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any, Protocol

import grpc
import structlog

from baton.core import PROTOCOL_VERSION, WorkerInfo
from baton.errors import BatonError, InvalidRequest
from baton.rpc import convert
from baton.rpc.status import abort
from baton.rpc.v1 import worker_pb2, worker_pb2_grpc
from baton.worker import census
from baton.worker.census import Holding
from baton.worker.commands import not_taken
from baton.worker.loop import EngineLoop
from baton.worker.session import LoadSource, Session

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
            return census.to_pb(await census.take(self._engine_loop, self._info.ref, self._role.holdings))
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
