"""Limits of HTTP connections that uvicorn lacks: their number, and times of handshakes, headers and unread answers.

A connection costs an open file. If clients could take all of them, gRPC and Redis would stop too.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from baton.limits import MAX_HTTP_CONNECTIONS, MAX_HTTP_HEADER_BYTES, MAX_HTTP_HEADER_SECONDS
from baton.network import open_files
from router.openai.errors import RETRY_SOON, HttpError, Problem, http_problem

_PAUSE_S = 0.1  # after a connection that could not be accepted
_ACKED = 120  # offset in the kernel's `tcp_info`
_SHARE = 2  # the listener may use one of so many open files
_LATE = http_problem(HttpError(408, "request_timeout", f"headers: must arrive within {MAX_HTTP_HEADER_SECONDS} s"))
_LARGE = http_problem(HttpError(431, "headers_too_large", f"headers: must be at most {MAX_HTTP_HEADER_BYTES} bytes"))
_WRONG = http_problem(HttpError(400, "invalid_http", "the request is not valid HTTP/1.1"))
_FULL = Problem(
    503,
    "overloaded_error",
    "overloaded",
    "too many connections are open",
    headers={**RETRY_SOON, "x-should-retry": "true", "connection": "close"},
)


class BoundedProtocol(H11Protocol):
    """A connection with these limits. A client beyond them gets 503 or 408, and the connection ends."""

    most = MAX_HTTP_CONNECTIONS
    headers_s = float(MAX_HTTP_HEADER_SECONDS)
    unread_s = 60.0  # `router.slow_reader_s`, and a little more: a stream is ended first
    rejected: Callable[[str], None] = staticmethod(lambda _: None)  # records a connection beyond them, by its reason
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    @property
    def limit(self) -> int:
        return min(self.most, open_files() // _SHARE)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if len(self.connections) > self.limit:
            self.rejected(_FULL.rejection)
            self._end(_FULL)
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_unread()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._limit_unread()  # `close` waits until the client has read everything

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._read()
        self._unset_keepalive_if_required()  # uvicorn keeps the timer after an error, but the socket is closed
        super().connection_lost(exc)

    def _limit_unread(self) -> None:
        if self._unread is None:
            self._unread = self.loop.call_later(self.unread_s, self._check_unread, self._acknowledged())

    def _check_unread(self, before: int) -> None:
        self._unread = None
        if self._acknowledged() == before:
            self.transport.abort()
        else:
            self._limit_unread()

    def _acknowledged(self) -> int:
        """Return the bytes that the client has received: `tcpi_bytes_acked` of Linux. asyncio hides buffers of TLS."""
        info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED + 8)
        return int.from_bytes(info[_ACKED:], sys.byteorder)

    def _read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

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

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP. uvicorn calls this while it handles h11's error."""
        error = sys.exception()
        last: RequestResponseCycle | None = self.cycle
        if last is not None and last.response_started and not last.response_complete:
            self.transport.close()  # an answer is under way: the body of its request was wrong
            return
        large = isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == _LARGE.status
        self.rejected((_LARGE if large else _WRONG).rejection)
        self._end(_LARGE if large else _WRONG)

    def _end(self, problem: Problem) -> None:
        body = problem.body()
        head = {"content-type": "application/json", "content-length": str(len(body)), **problem.headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        self.transport.write(f"HTTP/1.1 {problem.status} \r\n{lines}\r\n".encode() + body)
        self.transport.close()


class TlsListener:
    """Accepts TLS connections, which count as open from then on and have the time of headers for their handshakes.
    asyncio's servers report a connection only after its handshake. `made` creates the protocol of a connection.
    """

    def __init__(self, listener: socket.socket, tls: ssl.SSLContext, made: Callable[[], BoundedProtocol]) -> None:
        listener.setblocking(False)
        self._listener, self._tls, self._made = listener, tls, made
        self.handshakes: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._accept(), name="accept")

    def close(self) -> None:
        for task in (self._task, *self.handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait, after `close`, until nothing is accepted any more. uvicorn calls this as that of asyncio's servers."""
        await asyncio.gather(self._task, *self.handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError:  # the client has left, or no file is free
                await asyncio.sleep(_PAUSE_S)
                continue
            protocol = self._made()
            if len(protocol.connections) + len(self.handshakes) >= protocol.limit:
                protocol.rejected(_FULL.rejection)
                client.close()
                continue
            task = loop.create_task(self._shake(client, protocol), name="handshake")
            self.handshakes.add(task)
            task.add_done_callback(self.handshakes.discard)

    async def _shake(self, client: socket.socket, protocol: BoundedProtocol) -> None:
        late = protocol.headers_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, client, ssl=self._tls, ssl_handshake_timeout=late
            )
        except OSError:  # includes TLS errors, and a client that is late or has left
            client.close()
