"""HTTP server of the gateway: its paths and error handlers as a Starlette application, and its listener in uvicorn."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import orjson
import uvicorn
from google.protobuf.json_format import MessageToDict
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from starlette import status
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.client._retry import targets_of
from baton.clock import SystemClock
from baton.config.schema import TlsConfig
from baton.config.values import is_loopback
from baton.errors import BatonError, ConfigError, UnknownModel, Unsupported, for_client
from baton.limits import MAX_HTTP_HEADER_BYTES, MAX_HTTP_WAITING
from baton.metrics import Metrics
from baton.metrics.http import render
from baton.rpc.channel import Wire, from_here
from baton.rpc.v1 import inference_pb2 as pb
from baton.tracing.trace import TRACEPARENT
from router.dashboard.app import PAGE_HEADERS, LiveData, LivePaths
from router.openai.connections import BoundedProtocol, TlsListener
from router.openai.errors import JSON, RETRY_SOON, HttpError, Json, Problem, http_problem, problem_of
from router.openai.guard import guarded
from router.openai.job import TOKENIZED, Job, chat_job, completion_job, event_id, http_names, tokenize_call
from router.openai.logprobs.tokens import TokenTexts
from router.openai.messages_api.answer import MESSAGES, MessagesProblem
from router.openai.messages_api.chat import count_body, field_names, messages_job
from router.openai.messages_api.schema import CountBody, MessagesBody
from router.openai.openapi.page import page
from router.openai.openapi.spec import openapi
from router.openai.parsing import NEUTRAL_FIELDS, B, read_body
from router.openai.responses import EVENTS, Answer, AnswerResponse, RequestMetrics
from router.openai.responses_api.chat import responses_job
from router.openai.responses_api.schema import ResponsesBody
from router.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from router.openai.upstream import (
    LAST_EVENT_ID,
    Metadata,
    ServedModel,
    Streams,
    Upstream,
    Waiting,
    metadata_of,
)

C = TypeVar("C", ChatBody, MessagesBody, ResponsesBody)
_EMBEDDINGS = (
    "embeddings are not supported: they need a checkpoint that was trained for them, workers that return the hidden"
    " states of a prompt, and a pooling step"
)
_FAILED = {
    "body_incomplete",
    "cancelled",
    "deadline_exceeded",
    "engine_fault",
    "worker_lost",
}  # codes that reject nothing
_PAGE = ("/live", "/page")  # the page calls these itself
_PLAIN = "text/plain; charset=utf-8"
_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that the client closes first and loses no request
_BACKLOG = 2048
_STALL_MARGIN_S = 5.0
BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    MESSAGES: MessagesBody,
    f"{MESSAGES}/count_tokens": CountBody,
    "/v1/responses": ResponsesBody,
}


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of a gateway. `look` is awaited before the metrics of `registry` are read. `counts` is used without a
    router in this process.
    """

    version: str = ""
    max_body: int = 2**20  # bytes
    keep_alive_s: float = 15.0  # silence after which a stream gets a comment
    stall_s: float = 60.0  # time without a read after which a client is disconnected
    registry: CollectorRegistry | None = None  # metrics of the router in this process
    look: Callable[[], Awaitable[None]] | None = None
    counts: Metrics | None = None  # the gateway's own metrics
    tls: TlsConfig | None = None  # for HTTPS and towards the router; None means plaintext for both
    live: LiveData | None = None  # data of the dashboard; None means that no router runs in this process
    waiting: int = MAX_HTTP_WAITING  # requests that the router has not accepted yet
    refused: Callable[[BatonError], None] = lambda _: None  # counts a request beyond them in the router of this process
    rejected: Callable[[str], None] = lambda _: None  # records a rejection that the router does not see, by its reason
    names: tuple[str, ...] | None = ()  # for a loopback listener without tokens; None means that there are tokens
    origins: tuple[str, ...] = ()  # sites whose pages may call it; "*" means all
    ignores_unknown: bool = False  # fields that are unknown or not supported; otherwise they are rejected


class Gateway:
    """HTTP endpoints of one router."""

    def __init__(self, upstream: Upstream, settings: GatewaySettings) -> None:
        self._upstream, self._settings = upstream, settings
        self._texts, self._served = TokenTexts(upstream), ServedModel(upstream, SystemClock())
        self._spec: Json = {}  # of the API
        self._started, self._waiting = int(time.time()), Waiting(settings.waiting, settings.refused)

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/models/", self.models, include_in_schema=False),
            Route("/v1/models/{name:path}", self.model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route(MESSAGES, self.messages, methods=["POST"]),
            Route(f"{MESSAGES}/count_tokens", self.count_tokens, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/version", self.version),
            Route("/openapi.json", self.openapi),
            Route("/docs", self.docs),
            *LivePaths(self._settings.live, self._settings.stall_s).routes(),
        ]
        self._spec = openapi(routes, BODIES, NEUTRAL_FIELDS, self._settings.version)
        handled = (BatonError, HttpError, HTTPException, Exception)
        return Starlette(routes=routes, exception_handlers=dict.fromkeys(handled, self._on_exception))

    async def _on_exception(self, request: Request, error: Exception) -> Response:
        """Return the error response. Starlette raises an unexpected exception again, so that it is logged."""
        problem = _problem(request, error)
        if problem.code not in _FAILED and not request.scope["path"].startswith(_PAGE):
            self._settings.rejected(problem.rejection)
        return MessagesProblem.at(request.scope["path"], problem).response()

    async def openapi(self, request: Request) -> Response:
        """Return this description."""
        return Response(json.dumps(self._spec), media_type=JSON)  # orjson has no integers of more than 64 bits

    async def docs(self, request: Request) -> Response:
        """Return this description as a page."""
        return Response(page(self._spec), headers=PAGE_HEADERS, media_type="text/html")

    async def completions(self, request: Request) -> Response:
        """Complete prompts, as in OpenAI's API."""
        with RequestMetrics(SystemClock(), self._settings.counts) as measured:
            self._waiting.check()  # before the body costs anything
            body = await self._read(request, CompletionBody)
            with self._waiting.entered() as leave:
                name = body.model or (await self._served.get(self._metadata(request))).id
                return self._answering(request, completion_job(body), name, measured, leave)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation, as in OpenAI's API."""
        return await self._chat(request, ChatBody, chat_job)

    async def _chat(self, request: Request, kind: type[C], job_of: Callable[[C, str, str], Job]) -> Response:
        """Answer a body of chat, or of an API that is translated to it."""
        with RequestMetrics(SystemClock(), self._settings.counts) as measured:
            self._waiting.check()
            body = await self._read(request, kind)
            with self._waiting.entered() as leave:
                served = await self._served.get(self._metadata(request))
                job = job_of(body, served.tool_form, served.reasoning_form)
                return self._answering(request, job, body.model or served.id, measured, leave)

    async def messages(self, request: Request) -> Response:
        """Answer a conversation, as in Anthropic's API."""
        return await self._chat(request, MessagesBody, messages_job)

    async def responses(self, request: Request) -> Response:
        """Answer a conversation, as in OpenAI's Responses API."""
        return await self._chat(request, ResponsesBody, responses_job)

    async def embeddings(self, request: Request) -> Response:
        """Reject the request with the missing parts."""
        raise Unsupported(_EMBEDDINGS)

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens of the prompt of a Messages body."""
        self._waiting.check()
        body = await self._read(request, CountBody)
        with http_names(field_names(body)), http_names(TOKENIZED):
            ids = await self._upstream.encode(tokenize_call(count_body(body)), self._metadata(request))
        return _json({"input_tokens": len(ids)})

    async def models(self, request: Request) -> Response:
        """Return the served models, as in OpenAI's API."""
        found = await self._upstream.models(self._metadata(request))
        return _json(
            {"object": "list", "data": [self._model(each, name) for each in found for name in (each.id, *each.aliases)]}
        )

    async def model(self, request: Request) -> Response:
        """Return one model."""
        found, name = await self._upstream.models(self._metadata(request)), request.path_params["name"]
        for each in found:
            if name in {each.id, *each.aliases}:
                return _json(self._model(each, name))
        served = ", ".join(known for each in found for known in (each.id, *each.aliases))
        raise UnknownModel(f"model {name[:128]!r} is not served; served: {served}")

    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or a chat, as vLLM does."""
        self._waiting.check()
        body, metadata = await self._read(request, TokenizeBody), self._metadata(request)
        served = await self._served.get(metadata)
        with http_names(TOKENIZED):
            ids = await self._upstream.encode(tokenize_call(body), metadata)
        known = {"count": len(ids), "max_model_len": served.max_model_len, "tokens": list(ids)}
        texts = await self._texts.of(set(ids), metadata) if body.return_token_strs else {}
        return _json(known | {"token_strs": [texts[i].text for i in ids] if body.return_token_strs else None})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, as vLLM does."""
        self._waiting.check()
        body = await self._read(request, DetokenizeBody)
        call = pb.DetokenizeRequest(model=body.model or "", ids=body.tokens)
        with http_names(TOKENIZED):
            reply = await self._upstream.detokenize(call, self._metadata(request))
        return _json({"prompt": reply.text})

    async def health(self, request: Request) -> Response:
        """Return 200 while the process runs."""
        return Response("ok\n", media_type=_PLAIN)

    async def ready(self, request: Request) -> Response:
        """Return 200 if the router has a pair of workers for a request, else 503."""
        ready = await self._upstream.ready()
        if ready:
            return Response("ready\n", media_type=_PLAIN)
        return Response("not ready\n", 503, RETRY_SOON, _PLAIN)

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of the router in this process, or else those of the gateway."""
        counts = self._settings.counts
        registry = self._settings.registry or (counts.registry if counts else None)
        if registry is None:
            raise HttpError(404, "not_found", "this gateway exports no metrics")
        if self._settings.look is not None:
            await self._settings.look()
        # Exemplars name running requests of all tenants, and this listener gives metrics without a token.
        accept = "" if self._settings.names is None else request.headers.get("accept", "")
        content_type, body = render(registry, accept)
        return Response(body, headers={"content-type": content_type})

    async def version(self, request: Request) -> Response:
        """Return the release."""
        return _json({"version": self._settings.version})

    async def _read(self, request: Request, kind: type[B]) -> B:
        settings = self._settings
        return await read_body(request, kind, settings.max_body, ignores_unknown=settings.ignores_unknown)

    def _metadata(self, request: Request) -> Metadata:
        """Return the trace, and the credential unless the router in this process has no tokens."""
        traceparents, settings = request.headers.getlist(TRACEPARENT), self._settings
        key = request.headers.get("x-api-key")  # of Anthropic's clients
        authorization = request.headers.get("authorization") or (f"Bearer {key}" if key else None)
        needed = settings.live is None or settings.names is None
        return metadata_of(authorization if needed else None, traceparents[0] if len(traceparents) == 1 else None)

    def _answering(
        self, request: Request, job: Job, model: str, measured: RequestMetrics, leave: Callable[[], None]
    ) -> Response:
        metadata, given = self._metadata(request), request.headers.getlist(LAST_EVENT_ID)
        after = event_id(job, ",".join(given)) if given else None
        ids = after is not None or EVENTS in request.headers.get("accept", "").lower()
        answer = Answer(job, self._texts, metadata, measured, model=model, after=after, ids=ids)
        streams = Streams(self._upstream, job.requests, metadata, job.rename, after, leave, keeps=ids and job.has_ids)
        settings = self._settings
        return AnswerResponse(answer, streams, keep_alive_s=settings.keep_alive_s, stall_s=settings.stall_s)

    def _model(self, model: pb.Model, name: str) -> Json:
        known = {"id": name, "object": "model", "created": self._started, "owned_by": "baton"}
        defaults = MessageToDict(model.defaults, preserving_proto_field_name=True)
        return known | {"max_model_len": model.max_model_len, "generation_defaults": defaults}


def _json(value: Json) -> Response:
    return Response(orjson.dumps(value), media_type=JSON)


def _problem(request: Request, error: Exception) -> Problem:
    match error:
        case BatonError():
            return problem_of(error)
        case HttpError():
            return http_problem(error)
        case HTTPException():
            where = f"{request.method} {request.scope['path'][:128]}"
            if error.status_code == status.HTTP_404_NOT_FOUND:
                return http_problem(HttpError(404, "not_found", f"no such path: {where}"))
            text, headers = f"method not allowed: {where}", error.headers  # `Allow`
            return http_problem(HttpError(error.status_code, "method_not_allowed", text, headers=headers))
    return problem_of(for_client(error))


class _Embedded(uvicorn.Server):
    """A uvicorn server that leaves signals to the process."""

    def __init__(self, config: uvicorn.Config, unread_s: float, rejected: Callable[[str], None]) -> None:
        super().__init__(config)
        self._unread_s, self._rejected = unread_s, rejected
        self.listening = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        def made(**options: Any) -> BoundedProtocol:
            bounded = BoundedProtocol(**options)
            bounded.unread_s, bounded.rejected = self._unread_s, self._rejected
            return bounded

        self.config.http_protocol_class = made  # type: ignore[assignment]  # uvicorn calls it only
        if self.config.ssl is None:
            await super().startup(sockets)
        else:
            options = {"config": self.config, "server_state": self.server_state, "app_state": {}}
            listeners = [TlsListener(one, self.config.ssl, partial(made, **options)) for one in sockets or []]
            self.servers, self.started = listeners, True  # type: ignore[assignment]  # uvicorn closes them only
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
        """Serve for the router at `target`, over `wire`, or for several, separated by commas, over the settings' TLS.
        Then streams outlive their router. Return when it listens.
        """
        tls = self._settings.tls
        if wire is None:
            self._upstream = Upstream([from_here(each) for each in targets_of(target)], Wire.of(tls), retries=True)
        else:
            self._upstream = Upstream([target], wire)
        settings = self._settings
        app = Gateway(self._upstream, settings).app()
        here = is_loopback(self.address)
        config = uvicorn.Config(
            guarded(app, settings.names, loopback=here, origins=settings.origins, rejected=settings.rejected),
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
        self._server = _Embedded(config, settings.stall_s + _STALL_MARGIN_S, settings.rejected)
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


def _bind(address: str, share_port: bool) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family, backlog=_BACKLOG, reuse_port=share_port)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"router.http: cannot listen on {address!r}: {error}") from error
