"""The router behind, over its public gRPC API: what the gateway asks of it, and its streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

import structlog
from grpc import aio
from grpc_health.v1 import health_pb2

from baton.errors import BatonError, EngineFault, InvalidRequest, Unauthenticated, Violation
from baton.rpc.channel import IN_THE_CLEAR, Wire
from baton.rpc.status import from_rpc_error, request_id_of
from baton.rpc.v1 import inference_pb2 as pb
from baton.rpc.v1.inference_pb2_grpc import InferenceStub
from baton.tracing.trace import TRACEPARENT, TraceContext

UNARY_S = 10.0
AT_ONCE = 16  # prompts of one HTTP request: a long list must not fill the router's queue
_WAITING = 64  # events that nobody has taken yet; then the router is told to wait
_SERVICE = "baton.v1.Inference"

Metadata: TypeAlias = tuple[tuple[str, str], ...]
Rename: TypeAlias = Callable[[int, str], str]
Event: TypeAlias = tuple[int, pb.GenerateEvent]
T = TypeVar("T")

log = structlog.get_logger(__name__)


def metadata_of(authorization: str | None, traceparent: str | None = None) -> Metadata:
    """The credential, passed on as it came, and the trace, if it is one. Raises Unauthenticated for a credential that
    no gRPC header can carry.
    """
    traced = traceparent is not None and TraceContext.parse(traceparent) is not None
    trace = ((TRACEPARENT, traceparent or ""),) if traced else ()
    if authorization is None:
        return trace
    if not (authorization.isascii() and authorization.isprintable()):
        raise Unauthenticated("the Authorization header must be printable ASCII")
    return (("authorization", authorization), *trace)


class Upstream:
    """One router at "host:port", reached by `wire`. Make it in the loop that uses it."""

    def __init__(self, target: str, wire: Wire = IN_THE_CLEAR) -> None:
        self.target = target
        self._channel = wire.aio(target)
        self.stub = InferenceStub(self._channel)
        self._check = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    async def models(self, metadata: Metadata) -> Sequence[pb.Model]:
        """Raises BatonError."""
        reply = await self._answer(self.stub.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=UNARY_S))
        return reply.models

    async def decode(self, ids: Sequence[int], metadata: Metadata) -> str:
        """The text of these tokens. Raises BatonError."""
        request = pb.DetokenizeRequest(ids=ids)
        return (await self._answer(self.stub.Detokenize(request, metadata=metadata, timeout=UNARY_S))).text

    async def ready(self) -> bool:
        """Whether the router is there, and a pair of workers behind it."""
        request = health_pb2.HealthCheckRequest(service=_SERVICE)
        try:
            reply = await self._check(request, timeout=UNARY_S)
        except aio.AioRpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Ends what still runs."""
        await self._channel.close()

    async def _answer(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except aio.AioRpcError as error:
            raise from_rpc_error(error, self.target) from error


class Streams:
    """Several Generate calls as one stream of (number of the call, event). Leaving the context cancels what runs.

    Field names in errors are those of the HTTP request, through `rename(number, name)`.
    """

    def __init__(
        self, upstream: Upstream, requests: Sequence[pb.GenerateRequest], metadata: Metadata, rename: Rename
    ) -> None:
        self._upstream, self._requests, self._metadata, self._rename = upstream, requests, metadata, rename
        self._events: asyncio.Queue[Event | BatonError | None] = asyncio.Queue(_WAITING)
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._tasks: list[asyncio.Task[None]] = []
        self._left = len(requests)
        self.request_id = ""  # the router's name of the first call, from when the router has said it

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run(i, each)) for i, each in enumerate(self._requests)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self, within_s: float | None) -> Event | None:
        """The next event; None when all calls have ended. Raises TimeoutError after `within_s`, and BatonError."""
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
        except Exception as error:  # the task's boundary: whoever waits for events must hear of it
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
            raise from_rpc_error(error, self._upstream.target, connected=seen) from error
        finally:
            call.cancel()
        if last != "completed":
            raise EngineFault("the router's stream ended before its answer did")

    def _name(self, number: int, found: str | bytes | None) -> None:
        if number == 0 and found:
            self.request_id = str(found)

    def _renamed(self, number: int, error: BatonError) -> BatonError:
        if not isinstance(error, InvalidRequest):
            return error
        return InvalidRequest(*(Violation(self._rename(number, v.field), v.description) for v in error.violations))
