"""The Starlette application of the gateway: its paths and error handlers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import orjson
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.clock import SystemClock
from baton.config.schema import TlsConfig
from baton.errors import BatonError, EngineFault, UnknownModel
from baton.metrics import Metrics
from baton.metrics.http import render
from baton.rpc.v1 import inference_pb2 as pb
from baton.tracing.trace import TRACEPARENT
from router.dashboard.app import LivePaths, Shown
from router.openai.endpoints import chat_job, completion_job
from router.openai.errors import JSON, HttpError, http_problem, problem_of
from router.openai.job import Job, Json
from router.openai.logprobs import TokenTexts
from router.openai.metrics import Visit
from router.openai.parsing import read_body
from router.openai.responses import Answer, Answering, Patience
from router.openai.schema import ChatBody, CompletionBody
from router.openai.upstream import Metadata, Streams, Upstream, metadata_of

PLAIN = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of a gateway. `max_body` is in bytes.

    `registry` holds the metrics of the router in this process; `look` is awaited before they are read. `counts` are the
    gateway's own metrics, used without such a router. `tls` is used for HTTPS and towards the router; None means
    plaintext for both. `shown` is the data of the dashboard; None means that no router runs in this process.
    """

    version: str = ""
    max_body: int = 2**20
    patience: Patience = field(default_factory=Patience)
    registry: CollectorRegistry | None = None
    look: Callable[[], Awaitable[None]] | None = None
    counts: Metrics | None = None
    tls: TlsConfig | None = None
    shown: Shown | None = None


class Gateway:
    """HTTP endpoints of one router."""

    def __init__(self, upstream: Upstream, settings: GatewaySettings) -> None:
        self._upstream, self._settings = upstream, settings
        self._texts = TokenTexts(upstream)
        self._started = int(time.time())

    def app(self) -> Starlette:
        """Return the application with all paths and error handlers."""
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/version", self.version),
            *LivePaths(self._settings.shown, self._settings.patience.stall_s).routes(),
        ]
        handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
            BatonError: _on_error,
            HttpError: _on_http_error,
            HTTPException: _on_no_route,
            Exception: _on_bug,
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        with Visit(SystemClock(), self._settings.counts) as visit:
            body = await read_body(request, CompletionBody, self._settings.max_body)
            name = body.model or (await self._served(request)).id
            return self._answering(request, completion_job(body), name, visit)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        with Visit(SystemClock(), self._settings.counts) as visit:
            body = await read_body(request, ChatBody, self._settings.max_body)
            asks = body.offered or not body.model
            served = await self._served(request) if asks else pb.Model()
            return self._answering(request, chat_job(body, served.tool_form), body.model or served.id, visit)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        found = await self._upstream.models(_metadata(request))
        return _json({"object": "list", "data": [self._model(each) for each in found]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        found, name = await self._upstream.models(_metadata(request)), request.path_params["name"]
        for each in found:
            if each.id == name:
                return _json(self._model(each))
        raise UnknownModel(f"model {name[:128]!r} is not served; served: {', '.join(each.id for each in found)}")

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while this process responds."""
        return Response("ok\n", media_type=PLAIN)

    async def ready(self, request: Request) -> Response:
        """GET /ready: 200 if the router has a pair of workers for a request, else 503."""
        ready = await self._upstream.ready()
        return Response("ready\n" if ready else "not ready\n", 200 if ready else 503, media_type=PLAIN)

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: the metrics of the router in this process, or else those of the gateway."""
        counts = self._settings.counts
        registry = self._settings.registry or (counts.registry if counts else None)
        if registry is None:
            raise HttpError(404, "not_found", "this gateway exports no metrics")
        if self._settings.look is not None:
            await self._settings.look()
        content_type, body = render(registry, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def version(self, request: Request) -> Response:
        """GET /version."""
        return _json({"version": self._settings.version})

    async def _served(self, request: Request) -> pb.Model:
        """Return the served model. Raises BatonError."""
        return next(iter(await self._upstream.models(_metadata(request))), pb.Model())

    def _answering(self, request: Request, job: Job, model: str, visit: Visit) -> Response:
        metadata = _metadata(request)
        answer = Answer(job, self._texts, metadata, visit, model=model, created=int(time.time()))
        streams = Streams(self._upstream, job.requests, metadata, job.rename)
        return Answering(answer, streams, self._settings.patience, visit, stream=job.stream)

    def _model(self, model: pb.Model) -> Json:
        known = {"id": model.id, "object": "model", "created": self._started, "owned_by": "baton"}
        return known | {"max_model_len": model.max_model_len}


def _metadata(request: Request) -> Metadata:
    traceparents = request.headers.getlist(TRACEPARENT)
    return metadata_of(request.headers.get("authorization"), traceparents[0] if len(traceparents) == 1 else None)


def _json(value: Json) -> Response:
    return Response(orjson.dumps(value), media_type=JSON)


async def _on_error(request: Request, error: Exception) -> Response:
    return problem_of(error if isinstance(error, BatonError) else EngineFault("")).response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    return http_problem(error if isinstance(error, HttpError) else HttpError(500, "internal", "")).response()


async def _on_no_route(request: Request, error: Exception) -> Response:
    """Return 404 or 405 with the headers that Starlette sets (`Allow`)."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    what = "no such path" if status == 404 else "method not allowed"
    text = f"{what}: {request.method} {request.url.path[:128]}"
    answer = http_problem(HttpError(status, "not_found" if status == 404 else "method_not_allowed", text)).response()
    answer.headers.update((isinstance(error, HTTPException) and error.headers) or {})
    return answer


async def _on_bug(request: Request, error: Exception) -> Response:
    """Return 500. Starlette raises `error` again, so that it is logged."""
    return problem_of(EngineFault("internal error; see the server's log")).response()
