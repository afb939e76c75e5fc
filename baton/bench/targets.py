"""The servers that `baton bench` measures: a router over gRPC, or any server with OpenAI's HTTP API."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Protocol

import httpx2
import orjson

from baton import errors
from baton.bench.requests import BenchRequest
from baton.bench.sample import Sample
from baton.client import AsyncClient, Model, Options
from baton.client._retry import seconds
from baton.clock import Clock
from baton.errors import BatonError, ConfigError

_BY_CODE: dict[str, type[BatonError]] = {  # codes that say more than the status, or come after it
    "no_worker": errors.NoWorker,
    "worker_lost": errors.WorkerLost,
    "overloaded": errors.Overloaded,
    "promise_refused": errors.PromiseRefused,
    "rate_limit_exceeded": errors.RateLimited,
    "deadline_exceeded": errors.DeadlineExceeded,
}
_BY_STATUS: dict[int, type[BatonError]] = {
    400: errors.InvalidRequest,
    401: errors.Unauthenticated,
    403: errors.PermissionDenied,
    404: errors.UnknownModel,
    422: errors.InvalidRequest,
    429: errors.Overloaded,
    499: errors.Cancelled,
    501: errors.Unsupported,
    503: errors.Overloaded,
    504: errors.DeadlineExceeded,
}


class HttpServer:
    """A `Server` over HTTP. `timeout` is for a whole answer, in seconds. `tls`: None for this machine's authorities."""

    def __init__(
        self, url: str, options: Options, clock: Clock, timeout: float, token: str | None, tls: ssl.SSLContext | None
    ) -> None:
        if token is not None and not (token.isascii() and token.isprintable()):  # as over gRPC
            raise ConfigError("token: must be printable ASCII without line breaks")
        limit = self._timeout = seconds(timeout)
        base = url.rstrip("/").removesuffix("/v1") + "/v1/"
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            self._http = httpx2.AsyncClient(
                base_url=base, headers=headers, limits=limits, timeout=limit, verify=tls or True, trust_env=False
            )
        except httpx2.InvalidURL as error:
            raise errors.InvalidRequest.of("--http", f"must be a URL, got {url!r}: {error}") from error
        self._body = {name: value for name, value in options.items() if value not in {None, ""}}
        self._clock = clock

    async def models(self) -> list[Model]:
        try:
            reply = await self._http.get("models")
            if reply.is_error:
                raise _refused(reply.status_code, reply.content, reply.headers)
            entries = reply.json()["data"]
            found = [Model(each["id"], each.get("max_model_len") or 0, each.get("vocab_size") or 0) for each in entries]
            for model in found[:1]:  # it is measured if none is named, and other servers need a name
                self._body.setdefault("model", model.id)
            return found
        except httpx2.HTTPError as error:
            raise _lost(error) from error
        except (ValueError, KeyError, TypeError) as error:
            raise errors.EngineFault(f"{self._http.base_url}models: not a list of models: {error!r}") from error

    async def send(self, request: BenchRequest, sample: Sample) -> None:
        body = {**self._body, "prompt": request.prompt, "max_tokens": request.max_tokens, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if request.deterministic:
            body["deterministic"] = True
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._http.stream("POST", "completions", content=orjson.dumps(body)) as reply,
            ):
                if reply.is_error:
                    raise _refused(reply.status_code, await reply.aread(), reply.headers)
                await self._read(reply, sample)
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise errors.DeadlineExceeded(f"no answer within {self._timeout:g} s") from error
        except orjson.JSONEncodeError as error:
            raise errors.InvalidRequest.of("prompt", f"must be JSON: {error}") from error
        except httpx2.HTTPError as error:
            raise _lost(error) from error

    async def _read(self, reply: httpx2.Response, sample: Sample) -> None:
        """Read the stream to its end, so that the connection can be reused."""
        done = False
        async for event in httpx2.EventSource(reply):
            if done := event.data == "[DONE]":
                continue
            now, chunk = self._clock.monotonic(), _parsed(event.data)
            if "error" in chunk:
                raise _refused(500, event.data.encode(), httpx2.Headers())
            try:
                _note(chunk, now, sample)
            except (AttributeError, KeyError, TypeError) as error:
                raise errors.EngineFault(f"invalid event: {error!r} in {event.data[:80]!r}") from error
        if not done:
            raise errors.WorkerLost("the stream ended without [DONE]")
        sample.tokens = sample.tokens or len(sample.times)  # without usage: at least one per message

    async def close(self) -> None:
        await self._http.aclose()


def _parsed(data: str) -> dict[str, Any]:
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        chunk = None
    if not isinstance(chunk, dict):
        raise errors.EngineFault(f"event is not a JSON object: {data[:80]!r}")
    return chunk


def _note(chunk: dict[str, Any], now: float, sample: Sample) -> None:
    if any(choice.get("text") for choice in chunk.get("choices", ())):
        sample.record(now, 1)  # a chunk has no token count; one without text shows nothing
    if usage := chunk.get("usage"):
        sample.prompt_tokens, sample.tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        sample.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _lost(error: httpx2.HTTPError) -> BatonError:
    """Convert a transport error: NoWorker if no connection was made, otherwise WorkerLost."""
    kind = errors.NoWorker if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout) else errors.WorkerLost
    return kind(f"{type(error).__name__}: {error}")


def _refused(status: int, body: bytes, headers: httpx2.Headers) -> BatonError:
    """Return the error of an answer: by its code if that is one of Baton's, otherwise by the status."""
    details: Any = {}
    try:
        parsed = orjson.loads(body)
        details = parsed["error"] if isinstance(parsed, dict) and isinstance(parsed.get("error"), dict) else {}
    except orjson.JSONDecodeError:
        pass
    message = f"{status}: {details.get('message') or body[:200].decode(errors='replace')}"
    kind = _BY_CODE.get(str(details.get("code"))) or _BY_STATUS.get(status, errors.EngineFault)
    if kind is errors.InvalidRequest:
        return errors.InvalidRequest.of(str(details.get("param") or "request"), message)
    if issubclass(kind, errors.Overloaded):
        return kind(message, _retry_after_s(headers))
    return kind(message)


def _retry_after_s(headers: httpx2.Headers) -> float:
    try:
        return float(headers.get("retry-after-ms") or 1000 * float(headers.get("retry-after", 1))) / 1000
    except ValueError:
        return 1.0


class Server(Protocol):
    """A server that accepts requests. All methods raise BatonError."""

    async def models(self) -> list[Model]:
        """Return the served models. A length or size is 0 if the server does not report it."""

    async def send(self, request: BenchRequest, sample: Sample) -> None:
        """Wait for the whole answer, and record in `sample` when its parts came."""

    async def close(self) -> None: ...


class GrpcServer:
    """A `Server` that is a Baton router, used through the SDK."""

    def __init__(self, client: AsyncClient, options: Options, clock: Clock) -> None:
        self._client = client
        self._options = options
        self._clock = clock

    async def models(self) -> list[Model]:
        return await self._client.models()

    async def send(self, request: BenchRequest, sample: Sample) -> None:
        options: Options = {**self._options, "max_tokens": request.max_tokens}
        options["deterministic"] = request.deterministic or None
        async with self._client.stream(request.prompt, **options) as stream:
            async for delta in stream:
                if delta.tokens:
                    sample.record(self._clock.monotonic(), len(delta.tokens))
            done = await stream.collect()
        sample.prompt_tokens = done.usage.prompt_tokens
        sample.tokens, sample.cached_tokens = done.usage.completion_tokens, done.usage.cached_tokens
        sample.kv_bytes = done.placement.kv_bytes
        sample.prefill_worker, sample.decode_worker = done.placement.prefill_worker, done.placement.decode_worker

    async def close(self) -> None:
        await self._client.close()
