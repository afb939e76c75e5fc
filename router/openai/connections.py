"""Limits of HTTP connections before a request is read: their number, and the time for its headers. uvicorn has neither.

A connection costs an open file. If clients could take all of them, gRPC and Redis would stop too.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from baton.limits import MAX_HTTP_CONNECTIONS, MAX_HTTP_HEADER_SECONDS
from baton.network import open_files
from router.openai.errors import HttpError, Problem, http_problem

_SHARE = 2  # the listener may use one of so many open files
_LATE = http_problem(HttpError(408, "request_timeout", f"headers: must arrive within {MAX_HTTP_HEADER_SECONDS} s"))
_FULL = Problem(
    503,
    "overloaded_error",
    "overloaded",
    "too many connections are open",
    headers={"retry-after": "1", "retry-after-ms": "1000", "x-should-retry": "true", "connection": "close"},
)


class BoundedProtocol(H11Protocol):
    """A connection with these limits. A client beyond them gets 503 or 408, and the connection ends."""

    most = MAX_HTTP_CONNECTIONS
    headers_s = float(MAX_HTTP_HEADER_SECONDS)
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if len(self.connections) > min(self.most, open_files() // _SHARE):
            self._end(_FULL)
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Limit the time while headers are awaited: from the connect on, or from their first byte on. This includes the
        rest of a body that was not read before the answer.
        """
        last: RequestResponseCycle | None = self.cycle  # None before the first request
        # Between requests, uvicorn limits the time until their first byte, and stops its timer at any byte.
        calm = last is not None and not (last.response_complete and self.timeout_keep_alive_task is None)
        if calm or self.transport.is_closing():
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.headers_s, self._end, _LATE)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, problem: Problem) -> None:
        body = problem.body()
        head = {"content-type": "application/json", "content-length": str(len(body)), **problem.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        self.transport.write(f"HTTP/1.1 {problem.status} \r\n{lines}\r\n".encode() + body)
        self.transport.close()
