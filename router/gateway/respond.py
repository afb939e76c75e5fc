"""An answer on its way to a client: whole or streamed, and given up as soon as the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError, Cancelled
from router.gateway.answer import Answer
from router.gateway.errors import JSON, problem_of
from router.gateway.upstream import Streams
from router.gateway.visit import Visit

EVENT_STREAM = "text/event-stream; charset=utf-8"
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: of silence until a comment is sent; that a client may take to read what was written."""

    keep_alive_s: float = 15.0
    stall_s: float = 60.0


class _Stalled(Exception):
    """The client has read nothing for too long."""


class Answering(Response):
    """Runs the calls and writes their answer. Errors before the first byte are raised, later ones are an event."""

    def __init__(self, answer: Answer, streams: Streams, patience: Patience, visit: Visit, *, stream: bool) -> None:
        super().__init__()
        self._answer, self._streams, self._patience, self._stream = answer, streams, patience, stream
        self._visit = visit
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_left(receive, self._run(scope, receive, send))
        except BatonError as error:
            problem = problem_of(error)
            await Response(problem.body(), problem.status, problem.headers | self._named(), JSON)(scope, receive, send)

    def _named(self) -> dict[str, str]:
        return {"x-request-id": self._streams.request_id} if self._streams.request_id else {}

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._visit:
            async with self._streams:
                if self._stream:
                    await self._events(send)
                    return
                body = await self._answer.whole(self._streams)
            await Response(body, headers=self._named(), media_type=JSON)(scope, receive, send)
            self._visit.finished()

    async def _events(self, send: Send) -> None:
        try:
            await self._each_event(send)
        except _Stalled:
            log.info("gateway_client_stalled", request_id=self._streams.request_id)
            self._visit.failed(Cancelled("the client reads nothing"))
            return
        await self._write(send, b"", more=False)
        self._visit.finished()

    async def _each_event(self, send: Send) -> None:
        try:
            async with aclosing(self._answer.events(self._streams, self._patience.keep_alive_s)) as events:
                async for event in events:
                    await self._write(send, event)
        except BatonError as error:
            if not self._started:
                raise
            self._visit.failed(error)
            await self._write(send, b"data: " + problem_of(error).body() + b"\n\n")

    async def _write(self, send: Send, data: bytes, *, more: bool = True) -> None:
        try:
            async with asyncio.timeout(self._patience.stall_s):
                await self._start(send)
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise _Stalled from None

    async def _start(self, send: Send) -> None:
        if self._started:
            return
        self._started = True
        headers = {"content-type": EVENT_STREAM, "cache-control": "no-cache", "x-accel-buffering": "no"}
        raw = [(name.encode(), value.encode()) for name, value in (headers | self._named()).items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})


async def unless_left(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`, until it is done or the client is gone; then it is cancelled. Raises what `work` raises."""
    tasks = (asyncio.ensure_future(work), asyncio.ensure_future(_left(receive)))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not tasks[0].cancelled():
        tasks[0].result()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
