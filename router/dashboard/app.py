"""The dashboard's paths: `/`, `/page/FILE`, `/live`, `/live/trace/REQUEST`.

Its data is for operators. If tokens are configured, an admin's is needed. If not, `router.openai.guard` rejects
requests of other sites' pages, which would use up a watcher's slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from importlib.resources import files

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from baton.clock import SystemClock
from baton.errors import InvalidRequest, Unauthenticated
from baton.rpc.v1 import admin_pb2
from router.auth.interceptor import check
from router.auth.tokens import TokenFile
from router.openai.errors import JSON, HttpError
from router.openai.responses import EVENT_STREAM, EventWriter, Stalled, as_json, run_until_disconnect
from router.status import RouterStatus, SingleFlight

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_EVENT_HEADERS = {"content-type": EVENT_STREAM, "cache-control": "no-store", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class LiveData:
    """Data of this process's router. `tokens` None means open access; `trace` returns None for an unknown request."""

    live: RouterStatus
    tokens: TokenFile | None
    trace: Callable[[str], admin_pb2.TraceReply | None]


class LivePaths:
    """Paths of the dashboard. Without a router in this process `/live` returns 404 and the page shows that."""

    def __init__(self, data: LiveData | None, stall_s: float) -> None:
        self._data, self._stall_s = data, stall_s
        self._files = {file.name: file.read_bytes() for file in (files("router.dashboard") / "static").iterdir()}
        self._text = None if data is None else SingleFlight(data.live.views.get, partial(_encode, data), SystemClock())

    def routes(self) -> list[Route]:
        return [
            Route("/", self.file),
            Route("/page/{name}", self.file),
            Route("/live", self.live),
            Route("/live/trace/{request_id}", self.trace),
        ]

    async def file(self, request: Request) -> Response:
        """Return a file of the dashboard."""
        name = request.path_params.get("name", "index.html")
        content, kind = self._files.get(name), _TYPES.get(f".{name.rpartition('.')[2]}")
        if content is None or kind is None:
            raise HttpError(404, "not_found", "no such file")
        return Response(content, headers=PAGE_HEADERS, media_type=kind)

    async def live(self, request: Request) -> Response:
        """Return a stream with an event for each view of `RouterStatus`, every `interval_s` seconds."""
        data = self._allowed(request, "Watch")
        if request.method == "HEAD":  # the stream is endless, and HEAD needs no body
            return Response(headers=_EVENT_HEADERS)
        tokens, confirm = data.tokens, None
        if tokens is not None:
            confirm = partial(tokens.confirm, tokens.grant(request.headers.get("authorization")))
        views = data.live.watch(_interval(request), confirm)
        return _Events(self._events(views), self._stall_s)

    async def trace(self, request: Request) -> Response:
        """Return the spans of a recent request."""
        found = self._allowed(request, "Trace").trace(request.path_params["request_id"])
        if found is None:
            raise HttpError(404, "not_found", "this router has no trace of this request")
        return Response(orjson.dumps(as_json(found)), headers={"cache-control": "no-store"}, media_type=JSON)

    def _allowed(self, request: Request, method: str) -> LiveData:
        """Return the data if the caller may see it. Raises HttpError, Unauthenticated or PermissionDenied."""
        if self._data is None:
            raise HttpError(404, "no_live", "this gateway has no router in its process; open the page of a router")
        if self._data.tokens is not None:
            check(f"/baton.v1.Admin/{method}", self._data.tokens.grant(request.headers.get("authorization")))
        return self._data

    async def _events(
        self, views: AsyncGenerator[tuple[admin_pb2.Live, list[admin_pb2.Happening]], None]
    ) -> AsyncGenerator[bytes, None]:
        assert self._text is not None
        async with aclosing(views):
            with suppress(Unauthenticated):  # the token was revoked; the client's next request is rejected
                async for _, happenings in views:
                    text, events = await self._text.get(), orjson.dumps([as_json(one) for one in happenings])
                    yield b"data: " + text[:-1] + b',"happenings":' + events + b"}\n\n"


async def _encode(data: LiveData) -> bytes:
    """Encode a view in a thread, because thousands of workers take a while."""
    view = await data.live.views.get()
    return await asyncio.to_thread(lambda: orjson.dumps(as_json(view)))


class _Events(Response):
    """Response that streams events until the client disconnects or has read nothing for `stall_s` seconds."""

    def __init__(self, events: AsyncGenerator[bytes, None], stall_s: float) -> None:
        super().__init__()
        self._events, self._stall_s = events, stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await run_until_disconnect(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        writer = EventWriter(send, lambda: _EVENT_HEADERS, self._stall_s)
        async with aclosing(self._events) as events:
            with suppress(Stalled):
                async for event in events:
                    await writer.write(event)
                await writer.write(b"", more=False)


def _interval(request: Request) -> float:
    given = request.query_params.get("interval_s", "0")
    try:
        return float(given)
    except ValueError:
        raise InvalidRequest.of("interval_s", f"must be a number of seconds, got {given[:32]!r}") from None
