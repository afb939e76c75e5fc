"""HTTP listener of the gateway: uvicorn in the running event loop, without its signal handlers."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Generator
from contextlib import contextmanager

import structlog
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import ConfigError
from baton.limits import MAX_HTTP_HEADER_BYTES
from baton.rpc.channel import Wire, from_here
from router.openai.app import Gateway, GatewaySettings
from router.openai.errors import HttpError, http_problem
from router.openai.upstream import Upstream

_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that the client closes first and loses no request
_BACKLOG = 2048
log = structlog.get_logger(__name__)


class _Embedded(uvicorn.Server):
    """A uvicorn server that leaves signals to the process."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


class HttpServer:
    """The gateway with its listener. `address` is the bound address."""

    def __init__(self, address: str, settings: GatewaySettings, *, share_port: bool = False) -> None:
        """Bind "host:port"; port 0 means any free port. Raises ConfigError, with the reason, if that fails."""
        self._settings = settings
        self._socket = _bind(address, share_port)
        self.address = f"{address.rpartition(':')[0]}:{self._socket.getsockname()[1]}"
        self._upstream: Upstream | None = None
        self._server: _Embedded | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, target: str, wire: Wire | None = None) -> None:
        """Serve for the router at `target`, over `wire` or else the settings' TLS; return when it listens."""
        tls = self._settings.tls
        self._upstream = Upstream(from_here(target), Wire.of(tls) if wire is None else wire)
        app = Gateway(self._upstream, self._settings).app()
        config = uvicorn.Config(
            bounded(app),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            h11_max_incomplete_event_size=MAX_HTTP_HEADER_BYTES,
            ssl_certfile=tls.cert if tls else None,
            ssl_keyfile=tls.key if tls else None,
        )
        self._server = _Embedded(config)
        self._task = asyncio.create_task(self._server.serve([self._socket]), name="http")
        await self._server.listening.wait()

    async def stop(self, grace_s: float) -> None:
        """Close the listener, wait up to `grace_s` for running requests, then cancel them. Idempotent."""
        try:
            if self._server is not None and self._task is not None:
                self._server.config.timeout_graceful_shutdown = max(1, math.ceil(grace_s))
                self._server.should_exit = True
                await asyncio.gather(self._task, return_exceptions=True)
        finally:
            self._socket.close()
            if self._upstream is not None:
                await self._upstream.close()


def bounded(app: ASGIApp) -> ASGIApp:
    """Wrap `app` to reject requests with too long headers: uvicorn limits only headers that arrive incomplete."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size <= MAX_HTTP_HEADER_BYTES:
            await app(scope, receive, send)
            return
        error = HttpError(
            431, "headers_too_large", f"headers: must be at most {MAX_HTTP_HEADER_BYTES} bytes, got {size}"
        )
        await http_problem(error).response()(scope, receive, send)

    return checked


def _bind(address: str, share_port: bool) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family, backlog=_BACKLOG, reuse_port=share_port)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"router.http: cannot listen on {address!r}: {error}") from error
