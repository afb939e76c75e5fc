"""Client of the router's public gRPC API: single calls, and several Generate calls as one stream."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, TypeVar

import structlog
from google.protobuf.message import Message
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client._retry import KEEPS, RESUMABLE, RESUMABLE_S, Attempts, Recovery
from baton.clock import Clock, SystemClock
from baton.errors import (
    BatonError,
    EngineFault,
    InvalidRequest,
    NoWorker,
    Overloaded,
    Unauthenticated,
    Violation,
    for_client,
)
from baton.limits import MAX_TOKEN_CHARS
from baton.rpc.channel import PLAINTEXT, Wire
from baton.rpc.status import from_rpc_error, request_id_of
from baton.rpc.v1 import common_pb2, inference_pb2_grpc
from baton.rpc.v1 import inference_pb2 as pb
from baton.tracing.trace import TRACEPARENT, TraceContext

_UNARY_S = 60.0  # In a burst, the router takes a while to take a call.
_HEALTH_S = 10.0
_FRESH_S = 5.0  # Age from which the served model is asked for again.
PROMPTS = 16  # Concurrent prompts of one HTTP request; a long list must not fill the router's queue.
_WAITING = 64  # Buffered events; beyond that flow control stops the router.
_RETRIES = 2  # of a call before its first event, as in the SDK
_RESUMES = 10  # without a new token; 16 s on average, about half of the time for which a worker continues a stream
_KEPT_ID = (
    f"no worker keeps this stream; allowed is an id of a stream whose router was lost in the last {RESUMABLE_S:.0f} s, "
    "with the same body and API key"
)
_CREDENTIAL = 4 * MAX_TOKEN_CHARS  # gRPC rejects metadata of more than 8 KiB, but not always
_SERVICE = "baton.v1.Inference"
_SHOWN = 128  # characters of a wrong id
PEER = "the router"

Metadata: TypeAlias = tuple[tuple[str, str], ...]
Rename: TypeAlias = Callable[[int, str], str]
Event: TypeAlias = tuple[int, pb.GenerateEvent]
T = TypeVar("T")
Stub: TypeAlias = "inference_pb2_grpc.InferenceAsyncStub"
Call: TypeAlias = "aio.UnaryStreamCall[Any, pb.GenerateEvent]"
Method: TypeAlias = Callable[[Stub], Callable[..., Awaitable[T]]]
LAST_EVENT_ID = "last-event-id"

log = structlog.get_logger(__name__)


def metadata_of(authorization: str | None, traceparent: str | None = None) -> Metadata:
    """Return the credential and a valid trace as metadata. Raises Unauthenticated if gRPC cannot carry it."""
    traced = traceparent is not None and TraceContext.parse(traceparent) is not None
    trace = ((TRACEPARENT, traceparent or ""),) if traced else ()
    if authorization is None:
        return trace
    if not (authorization.isascii() and authorization.isprintable()):
        raise Unauthenticated("authorization: the header must be printable ASCII")
    if len(authorization) > _CREDENTIAL:
        raise Unauthenticated(f"authorization: at most {_CREDENTIAL} characters, got {len(authorization)}")
    return (("authorization", authorization), *trace)


class Upstream:
    """The routers at `targets`, each "host:port", reached over `wire`. All calls go to one of them, until it fails.
    Create it in the loop that uses it. Errors name no address, because clients see them. If it `retries`, a call that
    loses its router continues at the next one.
    """

    def __init__(self, targets: Sequence[str], wire: Wire = PLAINTEXT, *, retries: bool = False) -> None:
        self._channels = [wire.aio(target) for target in targets]
        self._stubs: list[Stub] = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]
        self._at, self._retries = 0, retries

    @property
    def stub(self) -> Stub:
        return self._stubs[self._at]

    def attempts(self, most: int) -> Attempts:
        return Attempts(most if self._retries else 0, None, SystemClock(), random.random)

    def recovery(self) -> Recovery:
        return Recovery(len(self._stubs))

    def leave(self, stub: Stub) -> None:
        """Send later calls to the next router, unless a call did so before."""
        if stub is self.stub:
            self._at = (self._at + 1) % len(self._stubs)

    async def models(self, metadata: Metadata) -> Sequence[pb.Model]:
        request = pb.ListModelsRequest()
        return (await self._answer(lambda stub: stub.ListModels, request, metadata, _RETRIES)).models

    async def detokenize(self, request: pb.DetokenizeRequest, metadata: Metadata) -> pb.DetokenizeReply:
        return await self._answer(lambda stub: stub.Detokenize, request, metadata, _RESUMES)

    async def encode(self, request: pb.TokenizeRequest, metadata: Metadata) -> Sequence[int]:
        return (await self._answer(lambda stub: stub.Tokenize, request, metadata, _RETRIES)).ids

    async def ready(self) -> bool:
        """Return True if a router responds and has a pair of workers. Later calls go to the first such router."""
        request, first = health_pb2.HealthCheckRequest(service=_SERVICE), self._at
        for at in (*range(first, len(self._channels)), *range(first)):
            health: Any = health_pb2_grpc.HealthStub(self._channels[at])
            with suppress(aio.AioRpcError):
                reply = await health.Check(request, timeout=_HEALTH_S)
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    self._at = at
                    return True
        return False

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _answer(self, method: Method[T], request: Message, metadata: Metadata, most: int) -> T:
        attempts = self.attempts(most)
        while True:
            stub = self.stub
            try:
                return await method(stub)(request, metadata=metadata, timeout=_UNARY_S)
            except aio.AioRpcError as failure:
                error = from_rpc_error(failure, PEER)
                wait_s = attempts.wait_after(error, started=not isinstance(error, NoWorker))
            self.leave(stub)
            await asyncio.sleep(wait_s)


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
class EventId:
    """The place of an event in a stream. `answer` is the id of the answer. `names` are the router's ids of its calls,
    or "" for a call without an event so far. `counts` are the numbers of events so far: of each choice, perhaps each
    followed by that of its thoughts, and of the end.
    """

    answer: str
    names: tuple[str, ...]
    counts: tuple[int, ...]

    def __str__(self) -> str:
        more = "".join(f"+{name}" for name in self.names) if self.names[1:] else ""
        return f"{self.answer}{more}:{'.'.join(map(str, self.counts))}"

    def begun(self, call: int) -> bool:
        """Return whether a call had events."""
        slots = (len(self.counts) - 1) // len(self.names)
        return any(self.counts[call * slots : (call + 1) * slots])

    def known(self) -> list[str]:
        """Return the names without those of calls that had no event."""
        return [name if self.begun(i) else "" for i, name in enumerate(self.names)]

    def lacks_name(self, call: int) -> bool:
        return self.begun(call) and not self.names[call]


def wrong_id(value: str, allowed: str) -> Violation:
    """Return the mistake of a request with this header."""
    return Violation(LAST_EVENT_ID, f"got {value[:_SHOWN]!r}, but {allowed}")


class _Received:
    """The part of an answer that has arrived, and so the messages that continue it."""

    def __init__(self, request: pb.GenerateRequest, repeats: str, upstream: Upstream) -> None:
        self._request, self._repeats, self._upstream = request, repeats, upstream
        self.attempts = upstream.attempts(_RETRIES)
        self.recovery = upstream.recovery()
        self.name = ""  # the request id; set by the first event
        self._fingerprint, self._defaults = "", common_pb2.Sampling()
        self._ids = defaultdict[int, list[int]](list)  # by choice
        self._scored = 0  # prompt tokens with log-probabilities
        self._once = set[tuple[str, int, int]]()  # events without tokens: kind, choice, chunk

    def call(self, stub: Stub, metadata: Metadata) -> Call:
        """Return the call for the missing part: all of a new stream, of a recorded one, or the rest."""
        name = self.name or self._repeats
        if not name:
            return stub.Generate(self._request, metadata=metadata)
        message = pb.ResumeRequest(request_id=name, request=self._request, system_fingerprint=self._fingerprint)
        message.request.sampling.MergeFrom(self._defaults)
        message.exact, message.prompt_logprobs_received = not self.name, self._scored
        message.received.extend(common_pb2.TokenIds(ids=self._ids[i]) for i in range(self._request.n or 1))
        return stub.Resume(message, metadata=metadata)

    def wait_after(self, failure: aio.AioRpcError, *, answered: bool) -> float:
        """Return the seconds until another call. Raises the final error. A call without an event is sent again if no
        router took it up, or if that router is stopping. `answered` means that the failed call had events.
        """
        error = from_rpc_error(failure, PEER, connected=answered)
        if self.name:
            return self.recovery.wait_after(error, self.attempts, answered=answered)
        return self.attempts.wait_after(error, started=not isinstance(error, NoWorker) or bool(request_id_of(failure)))

    def is_new(self, event: pb.GenerateEvent) -> bool:
        """Note an event. Return False for one that a resumed stream repeats."""
        if not self.name:
            self.name, self.attempts = event.request_id, self._upstream.attempts(_RESUMES)
        kind = event.WhichOneof("event")
        choice = chunk = 0
        match kind:
            case "tokens" if event.tokens.ids:
                self._ids[event.tokens.choice].extend(event.tokens.ids)
                self.attempts.progressed()
                self.recovery.progressed()
                return True
            case "tokens":
                choice = event.tokens.choice  # the text that a stop string held back
            case "prompt_logprobs":
                self._scored += len(event.prompt_logprobs.ids)
                return True
            case "accepted":
                self._fingerprint = event.accepted.system_fingerprint
                self._defaults.MergeFrom(event.accepted.defaults)  # a Resume has the earlier ones
            case "thought":
                choice, chunk = event.thought.choice, event.thought.chunk
            case "finished":
                choice = event.finished.choice
            case _:
                return True
        known = len(self._once)
        self._once.add((kind, choice, chunk))
        return len(self._once) > known


class Waiting:
    """Count of HTTP requests that the router has not accepted yet, at most `most`. They wait for their turn on the
    processor too, which the queue of the router does not see. `refused` is called with each refusal.
    """

    def __init__(self, most: int, refused: Callable[[BatonError], None]) -> None:
        self._most, self._refused, self._count = most, refused, 0

    def check(self) -> None:
        """Raise Overloaded if no more requests may wait."""
        if self._count >= self._most:
            error = Overloaded(f"{self._count} requests wait already, no more are accepted")
            self._refused(error)
            raise error

    @contextmanager
    def entered(self) -> Generator[Callable[[], None]]:
        """Count a request with its whole body, until the given function is called or the context fails. So slow bodies
        take no place, and the requests of a burst are counted before the first one waits. Raises Overloaded.
        """
        self.check()
        self._count += 1
        place = ExitStack()
        place.callback(self._leave)
        with ExitStack() as failing:
            failing.enter_context(place)
            yield place.close
            failing.pop_all()

    def _leave(self) -> None:
        self._count -= 1


class Streams:
    """Several Generate calls as one stream of (call number, event). Leaving the context cancels running calls. Calls
    that had begun at `after` repeat their streams instead. `rename(number, name)` maps field names in errors to those
    of the HTTP request. `leave` is called after the first event, and perhaps again. If it `keeps`, workers keep the
    streams of complete calls until the context is left.
    """

    def __init__(
        self,
        upstream: Upstream,
        requests: Sequence[pb.GenerateRequest],
        metadata: Metadata,
        rename: Rename,
        after: EventId | None = None,
        leave: Callable[[], None] = lambda: None,
        *,
        keeps: bool = False,
    ) -> None:
        self._upstream, self._requests, self._rename = upstream, requests, rename
        self._keeps, self._metadata = keeps, (*metadata, (KEEPS, "1")) if keeps else metadata
        self._complete: list[Call] = []
        self._after, self.leave = after, leave
        self._events: asyncio.Queue[Event | BatonError | None] = asyncio.Queue(_WAITING)
        self._slots = asyncio.Semaphore(PROMPTS)
        self._tasks: list[asyncio.Task[None]] = []
        self._left = len(requests)
        self.names = [""] * len(requests) if after is None else after.known()  # the router's ids of the calls
        self._named = asyncio.Event()  # set with the first name; no event comes before, because all contain it

    @property
    def request_id(self) -> str:
        return self.names[0]

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run(i, each)) for i, each in enumerate(self._requests)]
        return self

    async def __aexit__(self, *exception: object) -> None:
        for task in self._tasks:
            task.cancel()
        for call in self._complete:
            call.cancel()
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
            await self._events.put(for_client(error))
        else:
            await self._events.put(None)
        finally:
            if number == 0:
                self._named.set()

    async def _pump(self, number: int, request: pb.GenerateRequest) -> None:
        received = _Received(request, self.names[number], self._upstream)
        while not await self._read(number, received):
            pass

    async def _read(self, number: int, received: _Received) -> bool:
        """Read one call. Return whether it was the last one: not if its router is lost, and the next can continue."""
        stub, last = self._upstream.stub, ""
        call = received.call(stub, self._metadata)
        try:
            headers = dict(await call.initial_metadata())
            self._name(number, headers.get("baton-request-id"))
            received.recovery.resumable |= headers.get(RESUMABLE) == "1"
            async for event in call:
                last = event.WhichOneof("event") or ""
                self.leave()
                if received.is_new(event):
                    await self._named.wait()
                    await self._events.put((number, event))
                if self._keeps and last == "completed":
                    self._complete.append(call)
                    return True
        except aio.AioRpcError as failure:
            if last == "completed":
                return True
            self._name(number, request_id_of(failure))
            wait_s = received.wait_after(failure, answered=bool(last))
        else:
            if last != "completed":
                raise EngineFault("the router's stream ended before the answer was complete")
            return True
        finally:
            if call not in self._complete:
                call.cancel()
        self._upstream.leave(stub)
        await asyncio.sleep(wait_s)
        return False

    def _name(self, number: int, found: str | bytes | None) -> None:
        if found:
            self.names[number] = str(found)
        if number == 0 and found:
            self._named.set()

    def _renamed(self, number: int, error: BatonError) -> BatonError:
        if not isinstance(error, InvalidRequest):
            return error
        if self._after is not None and "request_id" in {each.field for each in error.violations}:
            return InvalidRequest(wrong_id(str(self._after), _KEPT_ID))
        return InvalidRequest(*(Violation(self._rename(number, v.field), v.description) for v in error.violations))
