"""Turns a request's events into one HTTP answer: `Answer` formats them, `Answering` runs the calls and writes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import orjson
import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError, Cancelled, EngineFault
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from router.audit_digest import joined
from router.openai.errors import JSON, problem_of
from router.openai.job import InStream, Job, Json, as_json
from router.openai.logprobs import Scored, TokenTexts
from router.openai.metrics import Visit
from router.openai.upstream import Metadata, Streams

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    thoughts: list[Json] = field(default_factory=list)
    offset: int = 0  # characters of all its tokens
    tokens: int = 0
    reason: str = ""
    opened: bool = False


@dataclass(frozen=True, slots=True)
class _Piece:
    """The addition of one event to a choice: text and tokens, a thought, or its finish reason."""

    index: int
    text: str = ""
    scored: list[Scored] | None = None
    reason: str = ""
    tokens: int = 0  # of the choice including this piece; 0 means unchanged
    thought: Json | None = None


class Answer:
    """Accumulator of one answer."""

    def __init__(
        self, job: Job, texts: TokenTexts, metadata: Metadata, visit: Visit, *, model: str, created: int
    ) -> None:
        self._job, self._texts, self._metadata, self._visit = job, texts, metadata, visit
        self._model, self._created = model, created
        self._choices = [_Choice() for _ in range(len(job.requests) * job.n)]
        self._usage = pb.Usage()
        self._prompts = [0] * len(job.requests)  # tokens
        self._id = ""
        self._fingerprints: dict[int, str] = {}  # by call
        self._digests = [""] * len(job.requests)

    async def whole(self, streams: Streams) -> bytes:
        """Return the answer as one JSON object. Raises BatonError."""
        async for piece in self._pieces(streams, None):
            if piece is not None:
                choice = self._choices[piece.index]
                choice.text.append(piece.text)
                choice.scored.extend(piece.scored or ())
                choice.thoughts += [piece.thought] if piece.thought else []
        choices = [self._choice(index, each) for index, each in enumerate(self._choices)]
        return orjson.dumps(self._object(self._job.shape.whole, choices) | self._account())

    def _choice(self, index: int, whole: _Choice) -> Json:
        scored = whole.scored if self._job.logprobs else None
        shown = self._job.shape.choice(index, "".join(whole.text), scored, whole.reason)
        return shown | ({"thoughts": whole.thoughts} if self._job.thoughts else {})

    async def events(self, streams: Streams, keep_alive_s: float) -> AsyncGenerator[bytes]:
        """Yield server-sent events; a comment after `keep_alive_s` seconds of silence. Raises BatonError."""
        time = asyncio.get_running_loop().time
        quiet_since = time()
        async for piece in self._pieces(streams, keep_alive_s):
            written = self._written(piece) if piece else []
            if not written and piece and time() - quiet_since < keep_alive_s:
                continue
            quiet_since = time()
            for event in written:
                yield event
            if not written:
                yield KEEP_ALIVE
        if self._job.usage is not InStream.NOWHERE:
            yield self._event([], **self._account())
        yield DONE

    def _written(self, piece: _Piece) -> list[bytes]:
        """Return the events for this piece; a shape may hold text back for later pieces."""
        shape, choice, index = self._job.shape, self._choices[piece.index], piece.index
        opening = None if choice.opened else shape.opening(index)
        opened = [self._event([opening], usage=self._so_far(index))] if opening else []
        choice.opened = True
        choice.tokens = piece.tokens or choice.tokens
        choices: list[Json] = [shape.thought(index, piece.thought)] if piece.thought else []
        if piece.text or piece.scored:
            choices += shape.piece(index, piece.text, piece.scored, choice.offset)
            choice.offset += sum(len(each.text) for each in piece.scored or ())
        if piece.reason:
            choices += shape.ending(index, piece.reason)
        return opened + [self._event([each], usage=self._so_far(index)) for each in choices]

    async def _pieces(self, streams: Streams, keep_alive_s: float | None) -> AsyncIterator[_Piece | None]:
        """Yield pieces; None after `keep_alive_s` of silence. Raises BatonError, also for an incomplete answer."""
        while True:
            try:
                found = await streams.next(keep_alive_s)
            except TimeoutError:
                yield None
                continue
            if found is None:
                break
            self._id = self._id or streams.request_id or found[1].request_id
            piece = await self._piece(*found)
            if piece is not None:
                yield piece
        if not all(choice.reason for choice in self._choices):
            raise EngineFault("the router's stream ended before all choices were complete")

    async def _piece(self, number: int, event: pb.GenerateEvent) -> _Piece | None:
        match event.WhichOneof("event"):
            case "accepted":
                self._prompts[number] = event.accepted.prompt_tokens
                self._fingerprints[number] = event.accepted.system_fingerprint
            case "tokens":
                found, index = event.tokens, self._index(number, event.tokens.choice)
                self._visit.tokens(index, len(found.ids))
                scored = await self._texts.scored(found, self._metadata) if self._job.logprobs else None
                start: int = getattr(found, "from")  # a keyword in Python
                return _Piece(index, found.text, scored, tokens=start + len(found.ids))
            case "thought":
                said = event.thought
                shown = {"chunk": said.chunk, "text": said.text, "token_ids": list(said.ids)}
                return _Piece(self._index(number, said.choice), thought=shown)
            case "finished":
                index = self._index(number, event.finished.choice)
                self._choices[index].reason = _reason(event.finished)
                return _Piece(index, reason=self._choices[index].reason)
            case "completed":
                self._spend(event.completed.usage)
                self._digests[number] = event.completed.usage.audit_digest
                self._fingerprints[number] = event.completed.system_fingerprint
                self._visit.completed(event.completed.timings)
        return None

    def _index(self, number: int, choice: int) -> int:
        if choice >= self._job.n:
            raise EngineFault(f"the router sent choice {choice}, but n is {self._job.n}")
        return number * self._job.n + choice

    def _spend(self, usage: pb.Usage) -> None:
        self._usage.prompt_tokens += usage.prompt_tokens
        self._usage.cached_tokens += usage.cached_tokens
        self._usage.completion_tokens += usage.completion_tokens
        self._usage.thinking_tokens += usage.thinking_tokens

    def _account(self) -> Json:
        """Return token usage, and the stage times in seconds of the longest call."""
        return {"usage": self._spent(), "timings": as_json(self._visit.parts)}

    def _spent(self) -> Json:
        usage = self._usage
        more: Json = {"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}
        if audit := joined(self._digests):
            more["audit_digest"] = audit
        if usage.thinking_tokens:
            more["thinking_tokens"] = usage.thinking_tokens
        return _counted(usage.prompt_tokens, usage.completion_tokens) | more

    def _so_far(self, index: int) -> Json | None:
        """Return the usage of a choice so far, without cached tokens, which are known only at the end."""
        if self._job.usage is not InStream.THROUGHOUT:
            return None
        return _counted(self._prompts[index // self._job.n], self._choices[index].tokens)

    def _event(self, choices: list[Json], **account: Json | None) -> bytes:
        chunk = self._object(self._job.shape.chunk, choices)
        if self._job.usage is not InStream.NOWHERE:
            chunk |= account
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _object(self, kind: str, choices: list[Json]) -> Json:
        name = self._job.shape.prefix + self._id
        found = {"id": name, "object": kind, "created": self._created, "model": self._model, "choices": choices}
        said = set(self._fingerprints.values())
        return found | {"system_fingerprint": said.pop()} if len(said) == 1 and all(said) else found


def _counted(prompt: int, completion: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _reason(finished: pb.Finished) -> str:
    return "length" if finished.reason == common_pb2.FINISH_REASON_LENGTH else "stop"


EVENT_STREAM = "text/event-stream; charset=utf-8"
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """Timeouts in seconds: silence before a comment is sent, and the longest wait for the client to read a write."""

    keep_alive_s: float = 15.0
    stall_s: float = 60.0


class _Stalled(Exception):
    """The client has not read for `stall_s` seconds."""


class Answering(Response):
    """HTTP response that runs the calls. Errors before the first byte are raised, later ones are sent as an event."""

    def __init__(self, answer: Answer, streams: Streams, patience: Patience, visit: Visit, *, stream: bool) -> None:
        super().__init__()
        self._answer, self._streams, self._patience, self._stream = answer, streams, patience, stream
        self._visit = visit
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_left(receive, self._run(scope, receive, send))
        except BatonError as error:
            problem = problem_of(error)
            await Response(problem.body(), problem.status, problem.headers | self._named(), JSON)(scope, receive, send)

    def _named(self) -> dict[str, str]:
        return {"x-request-id": self._streams.request_id} if self._streams.request_id else {}

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._visit:
            async with self._streams:
                if self._stream:
                    await self._events(send)
                    return
                body = await self._answer.whole(self._streams)
            await Response(body, headers=self._named(), media_type=JSON)(scope, receive, send)
            self._visit.finished()

    async def _events(self, send: Send) -> None:
        try:
            await self._each_event(send)
        except _Stalled:
            log.info("gateway_client_stalled", request_id=self._streams.request_id)
            self._visit.failed(Cancelled(f"the client read nothing for {self._patience.stall_s:g} s"))
            return
        await self._write(send, b"", more=False)
        self._visit.finished()

    async def _each_event(self, send: Send) -> None:
        try:
            async with aclosing(self._answer.events(self._streams, self._patience.keep_alive_s)) as events:
                async for event in events:
                    await self._write(send, event)
        except BatonError as error:
            if not self._started:
                raise
            self._visit.failed(error)
            await self._write(send, b"data: " + problem_of(error).body() + b"\n\n")

    async def _write(self, send: Send, data: bytes, *, more: bool = True) -> None:
        try:
            async with asyncio.timeout(self._patience.stall_s):
                await self._start(send)
                await send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise _Stalled from None

    async def _start(self, send: Send) -> None:
        if self._started:
            return
        self._started = True
        headers = {"content-type": EVENT_STREAM, "cache-control": "no-cache", "x-accel-buffering": "no"}
        raw = [(name.encode(), value.encode()) for name, value in (headers | self._named()).items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})


async def unless_left(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it if the client disconnects first. Raises any error of `work`."""
    tasks = (asyncio.ensure_future(work), asyncio.ensure_future(_left(receive)))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not tasks[0].cancelled():
        tasks[0].result()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
