"""Client of the router's public gRPC API: single calls, texts of tokens, and several Generate calls as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, TypeVar

import structlog
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.clock import Clock
from baton.errors import BatonError, EngineFault, InvalidRequest, Unauthenticated, Violation
from baton.rpc.channel import PLAINTEXT, Wire
from baton.rpc.status import from_rpc_error, request_id_of
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.inference_pb2_grpc import InferenceStub
from baton.tracing.trace import TRACEPARENT, TraceContext

_UNARY_S = 60.0  # In a burst, the router takes a while to take a call.
_HEALTH_S = 10.0
_FRESH_S = 5.0  # Age from which the served model is asked for again.
_PROMPTS = 16  # Concurrent prompts of one HTTP request; a long list must not fill the router's queue.
_WAITING = 64  # Buffered events; beyond that flow control stops the router.
_SERVICE = "baton.v1.Inference"
_KEPT = 1 << 17  # Token texts in memory.
_LOOKUPS = 32  # Concurrent calls for token texts.
PEER = "the router"
_NO_TEXT = "\ufffd"  # For bytes that are only part of a character.

Metadata: TypeAlias = tuple[tuple[str, str], ...]
Rename: TypeAlias = Callable[[int, str], str]
Event: TypeAlias = tuple[int, pb.GenerateEvent]
T = TypeVar("T")

log = structlog.get_logger(__name__)


def metadata_of(authorization: str | None, traceparent: str | None = None) -> Metadata:
    """Return the credential and a valid trace as metadata. Raises Unauthenticated if gRPC cannot carry it."""
    traced = traceparent is not None and TraceContext.parse(traceparent) is not None
    trace = ((TRACEPARENT, traceparent or ""),) if traced else ()
    if authorization is None:
        return trace
    if not (authorization.isascii() and authorization.isprintable()):
        raise Unauthenticated("authorization: the header must be printable ASCII")
    return (("authorization", authorization), *trace)


class Upstream:
    """One router at "host:port", reached over `wire`. Create it in the loop that uses it. Errors do not name its
    address, because clients see them.
    """

    def __init__(self, target: str, wire: Wire = PLAINTEXT) -> None:
        self._channel = wire.aio(target)
        self.stub = InferenceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def models(self, metadata: Metadata) -> Sequence[pb.Model]:
        reply = await self._answer(self.stub.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=_UNARY_S))
        return reply.models

    async def decode(self, ids: Sequence[int], metadata: Metadata) -> str:
        request = pb.DetokenizeRequest(ids=ids)
        return (await self._answer(self.stub.Detokenize(request, metadata=metadata, timeout=_UNARY_S))).text

    async def ready(self) -> bool:
        """Return True if the router responds and has a pair of workers."""
        request = health_pb2.HealthCheckRequest(service=_SERVICE)
        try:
            reply = await self._health.Check(request, timeout=_HEALTH_S)
        except aio.AioRpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        await self._channel.close()

    async def _answer(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except aio.AioRpcError as error:
            raise from_rpc_error(error, PEER) from error


class ServedModel:
    """The served model, for requests that do not name it. Requests of one credential share a call, and a known model is
    used while it is asked for again, so a burst of requests costs the router one call.
    """

    def __init__(self, upstream: Upstream, clock: Clock) -> None:
        self._upstream, self._clock = upstream, clock
        self._known: pb.Model | None = None
        self._until = 0.0
        self._calls: dict[Metadata, asyncio.Task[pb.Model]] = {}

    async def get(self, metadata: Metadata) -> pb.Model:
        """Return the model; an empty message if the router serves none. Raises BatonError."""
        if self._known is not None and self._clock.monotonic() < self._until:
            return self._known
        credential = tuple(pair for pair in metadata if pair[0] != TRACEPARENT)
        call = self._calls.get(credential)
        if call is None:
            call = self._calls[credential] = asyncio.create_task(self._ask(credential))
            call.add_done_callback(lambda done: done.cancelled() or done.exception())  # an error is for those that wait
        return self._known if self._known is not None else await asyncio.shield(call)

    async def _ask(self, credential: Metadata) -> pb.Model:
        try:
            found = next(iter(await self._upstream.models(credential)), pb.Model())
        finally:
            del self._calls[credential]
        self._known, self._until = found, self._clock.monotonic() + _FRESH_S
        return found


@dataclass(frozen=True, slots=True)
class Scored:
    """A token as text with its log-probability, and the likeliest alternatives, best first."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


class TokenTexts:
    """Cache of token texts, as spelled after another token so that a leading space stays."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._known: dict[int, str] = {}
        self._slots = asyncio.Semaphore(_LOOKUPS)

    async def scored(self, tokens: pb.Tokens, metadata: Metadata) -> list[Scored]:
        """Return one entry per token, or none if the router sent no logprobs. Raises BatonError."""
        entries: Sequence[common_pb2.TokenLogprobs] = tokens.logprobs
        if not entries:
            return []
        if len(entries) != len(tokens.ids):
            raise EngineFault(f"the router sent {len(entries)} logprobs for {len(tokens.ids)} tokens")
        texts = await self._texts({*tokens.ids, *(top.token_id for entry in entries for top in entry.top)}, metadata)
        return [
            Scored(texts[token_id], entry.logprob, tuple((texts[top.token_id], top.logprob) for top in entry.top))
            for token_id, entry in zip(tokens.ids, entries, strict=True)
        ]

    async def _texts(self, ids: Collection[int], metadata: Metadata) -> dict[int, str]:
        texts = {token_id: self._known[token_id] for token_id in ids if token_id in self._known}
        missing = [token_id for token_id in ids if token_id not in texts]
        spelled = await asyncio.gather(*(self._ask(token_id, metadata) for token_id in missing))
        found = dict(zip(missing, spelled, strict=True))
        self._known |= found
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]
        return texts | found

    async def _ask(self, token_id: int, metadata: Metadata) -> str:
        """Subtract one token's text from that of two, because some tokenizers drop a space at the start."""
        try:
            async with self._slots:
                once = await self._upstream.decode([token_id], metadata)
                twice = await self._upstream.decode([token_id, token_id], metadata)
        except InvalidRequest:  # models have more logits than their tokenizer has tokens
            return _NO_TEXT
        return twice.removeprefix(once) if twice.startswith(once) else once


def bytes_of(text: str) -> list[int] | None:
    """Return the UTF-8 bytes of a token's text, or None if the token is only part of a character."""
    return None if _NO_TEXT in text else list(text.encode())


class Streams:
    """Several Generate calls as one stream of (call number, event). Leaving the context cancels running calls.
    `rename(number, name)` maps field names in errors to those of the HTTP request.
    """

    def __init__(
        self, upstream: Upstream, requests: Sequence[pb.GenerateRequest], metadata: Metadata, rename: Rename
    ) -> None:
        self._upstream, self._requests, self._metadata, self._rename = upstream, requests, metadata, rename
        self._events: asyncio.Queue[Event | BatonError | None] = asyncio.Queue(_WAITING)
        self._slots = asyncio.Semaphore(_PROMPTS)
        self._tasks: list[asyncio.Task[None]] = []
        self._left = len(requests)
        self.request_id = ""  # the router's id of the first call, once received

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run(i, each)) for i, each in enumerate(self._requests)]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self, within_s: float | None) -> Event | None:
        """Return the next event; None after the end of all calls. Raises BatonError, or TimeoutError (`within_s`)."""
        while self._left:
            async with asyncio.timeout(within_s):
                found = await self._events.get()
            if isinstance(found, BatonError):
                raise found
            if found is not None:
                return found
            self._left -= 1
        return None

    async def _run(self, number: int, request: pb.GenerateRequest) -> None:
        try:
            async with self._slots:
                await self._pump(number, request)
        except BatonError as error:
            await self._events.put(self._renamed(number, error))
        except Exception as error:  # the task's boundary: the reader of events must receive the error
            log.exception("gateway_call_broke")
            await self._events.put(EngineFault(type(error).__name__))
        else:
            await self._events.put(None)

    async def _pump(self, number: int, request: pb.GenerateRequest) -> None:
        call, seen, last = self._upstream.stub.Generate(request, metadata=self._metadata), False, None
        try:
            self._name(number, dict(await call.initial_metadata()).get("baton-request-id"))
            async for event in call:
                seen, last = True, event.WhichOneof("event")
                await self._events.put((number, event))
        except aio.AioRpcError as error:
            self._name(number, request_id_of(error))
            raise from_rpc_error(error, PEER, connected=seen) from error
        finally:
            call.cancel()
        if last != "completed":
            raise EngineFault("the router's stream ended before the answer was complete")

    def _name(self, number: int, found: str | bytes | None) -> None:
        if number == 0 and found:
            self.request_id = str(found)

    def _renamed(self, number: int, error: BatonError) -> BatonError:
        if not isinstance(error, InvalidRequest):
            return error
        return InvalidRequest(*(Violation(self._rename(number, v.field), v.description) for v in error.violations))
