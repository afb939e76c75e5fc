"""The HTTP listener of a process: `/metrics`, `/health`, `/ready`, and at a router `/targets`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from baton.errors import ConfigError
from baton.limits import MAX_METRICS_CONNECTIONS, MAX_METRICS_REQUEST_BYTES, MAX_METRICS_SECONDS

_PLAIN = "text/plain; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text"
Target = dict[str, list[str] | dict[str, str]]


def target(address: str, cluster: str, component: str, process: str) -> Target:
    """Return a process to scrape, in the format of Prometheus' HTTP service discovery."""
    return {"targets": [address], "labels": {"baton": cluster, "component": component, "process": process}}


def render(registry: CollectorRegistry, accept: str) -> tuple[str, bytes]:
    """Return content type and body: OpenMetrics with exemplars if accepted, else Prometheus' text format."""
    if _OPENMETRICS in accept:
        # Any other escaping turns `vllm:` into `vllm_`. All names are valid without escaping.
        return openmetrics.CONTENT_TYPE_LATEST, openmetrics.generate_latest(registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
    return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(registry)


class MetricsServer:
    """Serves `/metrics`, `/health` (the process answers) and `/ready` (it can take a request), in the process's own
    loop.

    Sharing the loop is deliberate: a scrape reads its data without a lock, and a stuck loop does not look healthy.
    `trouble`: a problem outside the loop, or ""; `look`: awaited before a scrape; `targets`: the cluster's processes.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        ready: Callable[[], bool] = lambda: True,
        *,
        trouble: Callable[[], str] = lambda: "",
        look: Callable[[], Awaitable[None]] | None = None,
        targets: Callable[[], Awaitable[Sequence[Target]]] | None = None,
    ) -> None:
        self._registry = registry
        self._ready, self._trouble = ready, trouble
        self._look, self._targets = look, targets
        self._server: asyncio.Server | None = None
        self._connections = 0

    async def start(self, address: str, key: str = "metrics") -> str:
        """Listen on "host:port" (port 0: any free one). Returns the bound address. Raises ConfigError naming `key`."""
        host, _, port = address.rpartition(":")
        try:
            self._server = await asyncio.start_server(
                self._answer, host.strip("[]"), int(port), limit=MAX_METRICS_REQUEST_BYTES
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key}: cannot listen on {address!r}: {error}") from error
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections >= MAX_METRICS_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections += 1
        try:
            async with asyncio.timeout(MAX_METRICS_SECONDS):
                line, *headers = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                status, content_type, body = await self._respond(line, _accepted(headers))
                head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
                writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            writer.transport.abort()  # the scraper left, sent no request or does not read: `close` would wait for it
        finally:
            self._connections -= 1
            writer.close()

    async def _respond(self, line: str, accept: str) -> tuple[HTTPStatus, str, bytes]:
        method, _, rest = line.partition(" ")
        path = rest.split(" ")[0].split("?")[0]
        if method != "GET":
            return HTTPStatus.METHOD_NOT_ALLOWED, _PLAIN, b"GET only\n"
        if path == "/metrics":
            if self._look is not None:
                await self._look()
            return HTTPStatus.OK, *render(self._registry, accept)
        if path == "/health":
            return _state(self._trouble(), "ok")
        if path == "/ready":
            return _state("" if self._ready() else "not ready", "ready")
        if path == "/targets" and self._targets is not None:
            return HTTPStatus.OK, "application/json", json.dumps(await self._targets()).encode()
        served = "/metrics, /health and /ready" + (", and /targets" if self._targets else "")
        return HTTPStatus.NOT_FOUND, _PLAIN, f"{served} are served here\n".encode()


def _state(problem: str, fine: str) -> tuple[HTTPStatus, str, bytes]:
    status = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
    return status, _PLAIN, f"{problem or fine}\n".encode()


def _accepted(headers: Sequence[str]) -> str:
    pairs = (header.partition(":") for header in headers)
    return ",".join(value for name, _, value in pairs if name.strip().lower() == "accept")
