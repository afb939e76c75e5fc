"""One HTTP answer of the events of a request: `Answer` formats it, `AnswerResponse` runs the calls and writes it."""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import orjson
import structlog
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton import errors
from baton.clock import Clock
from baton.errors import BatonError, Cancelled, EngineFault
from baton.metrics import Metrics
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.stages import Stage, timings_of
from router.audit_digest import joined
from router.openai.errors import JSON, Json, problem_of
from router.openai.job import Job
from router.openai.logprobs.prompt import ReturnedPrompt
from router.openai.logprobs.tokens import Scored, TokenTexts, in_thread
from router.openai.upstream import EventId, Metadata, Streams

EVENTS = "text/event-stream"
EVENT_STREAM = f"{EVENTS}; charset=utf-8"
_KEEP_ALIVE = b": waiting\n"
_DAY = 86_400  # s
_REFUSALS = (
    errors.InvalidRequest,
    errors.UnknownModel,
    errors.Unauthenticated,
    errors.PermissionDenied,
    errors.Unsupported,
    errors.Overloaded,
    errors.NoWorker,
)
log = structlog.get_logger(__name__)


def as_json(message: Message) -> Json:
    """Return a dict that includes default-valued fields, so clients need not know the defaults."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


class RequestMetrics(AbstractContextManager["RequestMetrics"]):
    """Metrics of one request of a standalone gateway (in a router process, the router counts). An error that leaves the
    context ends it; it ends only once. Times are measured here, except for stages that only the router can measure.
    """

    def __init__(self, clock: Clock, metrics: Metrics | None) -> None:
        self._metrics, self._clock = metrics, clock
        self._arrived = self._clock.monotonic()
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self.parts = common_pb2.Timings()  # of the longest call

    def tokens(self, choice: int, count: int) -> None:
        now = self._clock.monotonic()
        self._first = now if self._first is None else self._first
        if self._metrics is not None and count:
            if choice in self._last:
                self._metrics.gap(now - self._last[choice], count)
            else:
                self._metrics.first(count)
        self._last[choice] = now

    def completed(self, timings: common_pb2.Timings) -> None:
        """Record the router's timings of a call; those of the longest call are kept."""
        if timings.e2e_s >= self.parts.e2e_s:
            self.parts = timings

    def finished(self) -> None:
        if self._metrics is None:
            return
        queue, prefill = self.parts.queue_s, self.parts.prefill_s
        rest = max(0.0, self._clock.monotonic() - self._arrived - queue - prefill)
        ttft = 0.0 if self._first is None else self._first - self._arrived
        timings = timings_of({Stage.QUEUE: queue, Stage.PREFILL: prefill, Stage.DECODE: rest}, ttft)
        self._metrics.ended("finished", timings, staged=False)
        self._metrics = None

    def failed(self, error: BatonError) -> None:
        if self._metrics is None:
            return
        refused = isinstance(error, _REFUSALS) and self._first is None
        self._metrics.ended("refused" if refused else "cancelled" if isinstance(error, Cancelled) else "failed")
        if refused:
            self._metrics.refused(error)
        self._metrics = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, BatonError):
            self.failed(error)
        elif isinstance(error, asyncio.CancelledError):
            self.failed(Cancelled("the client disconnected"))


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    thoughts: list[Json] = field(default_factory=list)
    offset: int = 0  # length of its text so far
    tokens: int = 0
    reason: str = ""
    recorded: bool | None = None  # whether its decode worker can repeat it; None before its second token


@dataclass(frozen=True, slots=True)
class _Piece:
    """The addition to a choice: one token with its text, text without a token, a thought, or the finish reason."""

    index: int
    text: str = ""
    scored: list[Scored] | None = None
    reason: str = ""
    tokens: int = 0  # of the choice including this piece; 0 means unchanged
    thought: Json | None = None


class _Turns:
    """The pieces of all choices in an order that does not depend on time: token by token, and for each the choices in
    turn. So the id of one event is the place in all choices.
    """

    def __init__(self, choices: int) -> None:
        self._waiting = [deque[_Piece]() for _ in range(choices)]
        self._running = list(range(choices))
        self._at = 0  # in `_running`

    def ordered(self, piece: _Piece) -> Iterator[_Piece]:
        """Yield the pieces whose turn it is, now that this one has come."""
        self._waiting[piece.index].append(piece)
        while self._running and (waiting := self._waiting[self._running[self._at]]):
            yield (found := waiting.popleft())
            if found.reason:
                del self._running[self._at]
            elif found.tokens:
                self._at += 1
            self._at = 0 if self._at >= len(self._running) else self._at


class Answer:
    """Accumulator of one answer. Its stream begins with the event after `after`, if that is set. Events
    have an id if the job allows it and `ids` asks for it.
    """

    def __init__(
        self,
        job: Job,
        texts: TokenTexts,
        metadata: Metadata,
        measured: RequestMetrics,
        *,
        model: str,
        after: EventId | None = None,
        ids: bool = False,
    ) -> None:
        self.job, self._texts, self._metadata, self.measured = job, texts, metadata, measured
        self._model, self._created, self._after = model, int(time.time()), after
        one = len(job.requests) == 1 and not job.thoughts
        self._has_ids = ids and job.has_ids
        self._turns = _Turns(job.n) if self._has_ids and one else None  # then the rest has the same order, too
        # An empty line ends a comment. Some parsers (httpx-sse) take it for an event without data after an id.
        self._keep_alive = _KEEP_ALIVE if self._has_ids else _KEEP_ALIVE + b"\n"
        self._counts = [0] * job.slots  # events: see `EventId`
        self._received = after.counts if after is not None else tuple(self._counts)  # by the client before
        self._names: Sequence[str] = ()
        self._choices = [_Choice() for _ in range(len(job.requests) * job.n)]
        self._opened = 0  # choices that have begun: openai's stream helper expects them in order
        self._usage = pb.Usage()
        self._prompts = [0] * len(job.requests)  # tokens
        self._returned = [ReturnedPrompt(request, texts, metadata) for request in job.requests]
        self._id = ""
        self._fingerprints: dict[int, str] = {}  # by call
        self._digests = [""] * len(job.requests)
        self._signed = [""] * len(job.requests)  # receipts
        self._reasoned = 0  # tokens

    async def whole(self, streams: Streams) -> bytes:
        """Return the answer as one JSON object. Raises BatonError."""
        async for pieces in self._pieces(streams, lambda: None):
            for piece in pieces:
                choice = self._choices[piece.index]
                choice.text.append(piece.text)
                with self._reading(piece):
                    self.job.format.read(piece.index, piece.text)
                choice.scored.extend(piece.scored or ())
                choice.thoughts += [piece.thought] if piece.thought else []
        top = self.job.returns.vllm_top
        prompts = [] if top is None else [await prompt.vllm(top) for prompt in self._returned]
        size = sum(map(len, self._returned)) + sum(len(choice.scored) for choice in self._choices)
        return await in_thread(size, lambda: self._complete(prompts))

    def _complete(self, prompts: Sequence[object]) -> bytes:
        choices = []
        for index, choice in enumerate(self._choices):
            scored = choice.scored if self.job.logprobs else None
            shown = self.job.format.choice(index, "".join(choice.text), scored, choice.reason)
            choices.append(shown | ({"thoughts": choice.thoughts} if self.job.thoughts else {}))
        answer = self._object(self.job.format.whole, choices) | self._account()
        if prompts:
            self.job.format.add_prompts(answer, prompts)
        return orjson.dumps(self.job.wire.whole(answer))

    async def events(self, streams: Streams, keep_alive_s: float) -> AsyncGenerator[bytes]:
        """Yield server-sent events; a comment after `keep_alive_s` seconds of silence. Raises BatonError."""
        now = asyncio.get_running_loop().time
        due = now() + keep_alive_s  # of the next comment, whatever comes from the router
        messages = self._pieces(streams, lambda: due - now())
        async for pieces in messages:
            events = await in_thread(sum(len(each.scored or ()) for each in pieces), partial(self._joined, pieces))
            if events or now() >= due:
                yield events or self._keep_alive
                due = now() + keep_alive_s
        if self.job.usage and (usage := self._numbered(-1, self._event([], **self._account()))):
            yield usage
        done = self.job.wire.done()
        yield self._numbered(-1, done) or done

    def _joined(self, pieces: Sequence[_Piece]) -> bytes:
        """Return the events of one message, which leave in one write."""
        return b"".join(event for piece in pieces for event in self._in_turn(piece))

    def _in_turn(self, piece: _Piece) -> Iterator[bytes]:
        for found in [piece] if self._turns is None else self._turns.ordered(piece):
            yield from (self._numbered(slot, event) for slot, event in self._written(found))

    def _numbered(self, slot: int, event: bytes) -> bytes:
        """Return an event of `_counts[slot]` with its id, or nothing if the client has it. Events without an id follow
        when the stream cannot be repeated any more; the first one then withdraws the last id.
        """
        self._counts[slot] += 1
        if self._counts[slot] <= self._received[slot]:
            return b""
        if not self._has_ids:
            return event
        self._has_ids = all(choice.recorded is not False for choice in self._choices)
        return (f"id: {self._place()}\n" if self._has_ids else "id:\n").encode() + event

    def _place(self) -> EventId:
        """Return the place after the events so far."""
        place = EventId(self._id, tuple(self._names), tuple(map(max, self._counts, self._received)))
        return replace(place, names=tuple(place.known()))

    def _written(self, piece: _Piece) -> list[tuple[int, bytes]]:
        """Return the events for this piece, each with its slot; the format may hold text back for later pieces. Tokens
        and thoughts of a choice have no common order.
        """
        form, index = self.job.format, piece.index
        slot, choices, found = index * (1 + self.job.thoughts), list[Json](), self._openings(index)
        with self._reading(piece):
            choices += form.piece(index, piece.text, piece.scored) if piece.text or piece.scored else []
        if piece.reason:
            choices += form.ending(index, piece.reason)
        found += [(slot, self._event([each], usage=self._so_far(index))) for each in choices]
        if piece.thought:
            thought = self._event([form.thought(index, piece.thought)], usage=self._so_far(index))
            found.append((slot + 1, thought))
        return found

    def _openings(self, last: int) -> list[tuple[int, bytes]]:
        """Return the first events of choices up to `last` that have none yet."""
        begun = range(self._opened, last + 1)
        self._opened = max(self._opened, last + 1)
        deltas = ((index, self.job.format.opening(index)) for index in begun)
        return [
            (index * (1 + self.job.thoughts), self._event([delta], usage=self._so_far(index)))
            for index, delta in deltas
            if delta
        ]

    @contextmanager
    def _reading(self, piece: _Piece) -> Iterator[None]:
        """Count the tokens of `piece`, which the block reads: as reasoning if they are read inside of it."""
        form, choice = self.job.format, self._choices[piece.index]
        before, known = form.in_reasoning(piece.index), choice.tokens
        yield
        choice.tokens = piece.tokens or known
        if before or form.in_reasoning(piece.index):
            self._reasoned += choice.tokens - known

    async def _pieces(self, streams: Streams, within_s: Callable[[], float | None]) -> AsyncIterator[list[_Piece]]:
        """Yield the pieces of each message; none after `within_s()` of silence. Raises BatonError, also for an answer
        that is incomplete.
        """
        while True:
            try:
                found = await streams.next(within_s())
            except TimeoutError:
                yield []
                continue
            if found is None:
                break
            if not self._id:
                self._begin(self._after.answer if self._after else streams.request_id or found[1].request_id)
                self._names = streams.names
            yield await self._added(*found)
        if not all(choice.reason for choice in self._choices):
            raise EngineFault("the router's stream ended before all choices were complete")

    def _begin(self, request_id: str) -> None:
        """Take the time from the id, so that another router repeats it."""
        self._id = self.job.format.request_id = request_id
        if re.fullmatch("[0-9a-f]{32}", request_id) and abs((begun := int(request_id[:8], 16)) - self._created) < _DAY:
            self._created = begun

    async def _added(self, number: int, event: pb.GenerateEvent) -> list[_Piece]:
        match event.WhichOneof("event"):
            case "accepted":
                self._prompts[number] = event.accepted.prompt_tokens
                self.job.returns.check(sum(self._prompts), self.job.n)
                self._fingerprints[number] = event.accepted.system_fingerprint
                self.job.format.opened = event.accepted.in_reasoning
                return await self._echoed(number) if self.job.returns.echo_top is None else []
            case "prompt_logprobs":
                self._returned[number].add(event.prompt_logprobs)
                complete = len(self._returned[number]) == self._prompts[number]
                return await self._echoed(number) if complete and self.job.returns.echo_top is not None else []
            case "tokens":
                return await self._tokens(self._index(number, event.tokens.choice), event.tokens)
            case "thought":
                thought = event.thought
                shown = {"chunk": thought.chunk, "text": thought.text, "token_ids": list(thought.ids)}
                return [_Piece(self._index(number, thought.choice), thought=shown)]
            case "finished":
                index = self._index(number, event.finished.choice)
                reason = "length" if event.finished.reason == common_pb2.FINISH_REASON_LENGTH else "stop"
                choice = self._choices[index]
                choice.reason, choice.recorded = reason, bool(choice.recorded)
                if event.finished.reason == common_pb2.FINISH_REASON_STOP_STRING:
                    self.job.wire.matched_stop = event.finished.matched_stop
                    self.job.format.stopped(index, event.finished.matched_stop)
                return [*await self._end_token(index, event.finished), _Piece(index, reason=reason)]
            case "completed":
                self._spend(event.completed.usage)
                self._digests[number] = event.completed.usage.audit_digest
                self._signed[number] = event.completed.receipt
                self._fingerprints[number] = event.completed.system_fingerprint
                self.measured.completed(event.completed.timings)
        return []

    async def _echoed(self, number: int) -> list[_Piece]:
        """Return the prompt of a call as the beginning of each of its choices."""
        if not self.job.returns.echo:
            return []
        returned, top = self._returned[number], self.job.returns.echo_top
        text = await returned.text()
        scored = None if top is None else await returned.scored(text, top)
        places = range(number * self.job.n, (number + 1) * self.job.n)
        for index in places:
            self._choices[index].offset = len(text)
        return [_Piece(index, text, scored) for index in places]

    async def _end_token(self, index: int, finished: pb.Finished) -> list[_Piece]:
        """Return the token that ended a choice: with `echo`, tools expect one entry for each token that was drawn."""
        if not (self.job.returns.echo and self.job.logprobs and finished.HasField("logprobs")):
            return []
        scored = await self._texts.scored([int(finished.matched_stop)], [finished.logprobs], self._metadata)
        return [_Piece(index, "", [replace(each, offset=self._choices[index].offset) for each in scored])]

    async def _tokens(self, index: int, found: pb.Tokens) -> list[_Piece]:
        """Return a piece for each token, so that events do not depend on how tokens arrive together."""
        self.measured.tokens(index, len(found.ids))
        scored = await self._texts.scored(found.ids, found.logprobs, self._metadata) if self.job.logprobs else None
        ends = [0, *accumulate(found.lengths)] if len(found.lengths) == len(found.ids) else [0] * len(found.ids)
        if scored is not None:
            before = self._choices[index].offset
            scored = [replace(each, offset=before + end) for each, end in zip(scored, ends, strict=False)]
        self._choices[index].offset += len(found.text)
        start: int = getattr(found, "from")  # a keyword in Python
        if not found.ids:
            return [_Piece(index, found.text, scored)]
        total = start + len(found.ids)
        if found.recorded or total > 1:
            self._choices[index].recorded = found.recorded
        if len(found.lengths) != len(found.ids):
            return [_Piece(index, found.text, scored, tokens=total)]
        return [
            _Piece(index, found.text[ends[at] : ends[at + 1]], scored and scored[at : at + 1], tokens=start + at + 1)
            for at in range(len(found.ids))
        ]

    def _index(self, number: int, choice: int) -> int:
        if choice >= self.job.n:
            raise EngineFault(f"the router sent choice {choice}, but n is {self.job.n}")
        return number * self.job.n + choice

    def _spend(self, usage: pb.Usage) -> None:
        self._usage.prompt_tokens += usage.prompt_tokens
        self._usage.cached_tokens += usage.cached_tokens
        self._usage.completion_tokens += usage.completion_tokens
        self._usage.thinking_tokens += usage.thinking_tokens

    def _account(self) -> Json:
        """Return token usage, and the stage times in seconds of the longest call."""
        usage = _counted(self._usage.prompt_tokens, self._usage.completion_tokens)
        usage["prompt_tokens_details"] = {"cached_tokens": self._usage.cached_tokens}
        if self.job.format.reasons:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._reasoned}
        if audit := joined(self._digests):
            usage["audit_digest"] = audit
        if self._usage.thinking_tokens:
            usage["thinking_tokens"] = self._usage.thinking_tokens
        return {"usage": usage, "timings": as_json(self.measured.parts)} | self._receipt()

    def _receipt(self) -> Json:
        """Return the receipt of the answer, or the receipts of several prompts as a list."""
        found = [orjson.Fragment(each) for each in self._signed if each]
        return {"receipt": found if self._signed[1:] else found[0]} if found else {}

    def _so_far(self, index: int) -> Json | None:
        """Return the usage of a choice so far, without cached tokens, which are known only at the end."""
        if not self.job.running_usage:
            return None
        return _counted(self._prompts[index // self.job.n], self._choices[index].tokens)

    def _event(self, choices: list[Json], **account: Json | None) -> bytes:
        chunk = self._object(self.job.format.chunk, choices)
        if self.job.usage:
            chunk |= account
        return self.job.wire.event(chunk)

    def _object(self, kind: str, choices: list[Json]) -> Json:
        name = self.job.format.prefix + self._id
        found = {"id": name, "object": kind, "created": self._created, "model": self._model, "choices": choices}
        fingerprints = set(self._fingerprints.values())
        if len(fingerprints) == 1 and all(fingerprints):
            found["system_fingerprint"] = fingerprints.pop()
        return found


def _counted(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Stalled(Exception):
    """The client has read nothing for the allowed time."""


class EventWriter:
    """Writer of one stream of server-sent events. The first write calls `headers` and starts the response."""

    def __init__(self, send: Send, headers: Callable[[], Mapping[str, str]], stall_s: float) -> None:
        self._send, self._headers, self._stall_s = send, headers, stall_s
        self.started = False

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Write `data`; without `more` it is the end. Raises Stalled."""
        try:
            async with asyncio.timeout(self._stall_s):
                if not self.started:
                    self.started = True
                    raw = [(name.encode(), value.encode()) for name, value in self._headers().items()]
                    await self._send({"type": "http.response.start", "status": 200, "headers": raw})
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise Stalled from None


class AnswerResponse(Response):
    """HTTP response that runs the calls. Errors before the first byte are raised, later ones are sent as an event."""

    def __init__(self, answer: Answer, streams: Streams, *, keep_alive_s: float, stall_s: float) -> None:
        super().__init__()
        self._answer, self._streams = answer, streams
        self._keep_alive_s, self._stall_s = keep_alive_s, stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await run_until_disconnect(receive, self._run(scope, receive, send))
        except BatonError as error:
            problem = self._answer.job.wire.problem(problem_of(error))
            await Response(problem.body(), problem.status, problem.headers | self._named(), JSON)(scope, receive, send)
        finally:
            self._streams.leave()

    def _named(self) -> dict[str, str]:
        names = self._answer.job.wire.id_headers if self._streams.request_id else ()
        return dict.fromkeys(names, self._streams.request_id)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._answer.measured:
            async with self._streams:
                if self._answer.job.stream:
                    await self._events(send)
                    return
                body = await self._answer.whole(self._streams)
            await Response(body, headers=self._named(), media_type=JSON)(scope, receive, send)
            self._answer.measured.finished()

    async def _events(self, send: Send) -> None:
        headers = {"content-type": EVENT_STREAM, "cache-control": "no-cache", "x-accel-buffering": "no"}
        writer = EventWriter(send, lambda: headers | self._named(), self._stall_s)
        try:
            await self._each_event(writer)
            await writer.write(b"", more=False)
            self._answer.measured.finished()
        except Stalled:
            log.info("gateway_client_stalled", request_id=self._streams.request_id)
            self._answer.measured.failed(Cancelled(f"the client read nothing for {self._stall_s:g} s"))

    async def _each_event(self, writer: EventWriter) -> None:
        try:
            async with aclosing(self._answer.events(self._streams, self._keep_alive_s)) as events:
                async for event in events:
                    await writer.write(event)
        except BatonError as error:
            if not writer.started:
                raise
            self._answer.measured.failed(error)
            wire = self._answer.job.wire
            await writer.write(wire.failed(wire.problem(problem_of(error))))


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it if the client disconnects first. Raises any error of `work`."""
    tasks = (asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive)))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not tasks[0].cancelled():
        tasks[0].result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
