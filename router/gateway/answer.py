"""The events of a request's calls, folded into one answer, or written as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

import orjson

from baton.errors import EngineFault
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from router.gateway.job import Job, Json
from router.gateway.texts import Scored, TokenTexts
from router.gateway.upstream import Metadata, Streams

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    offset: int = 0  # characters of all its tokens
    reason: str = ""
    opened: bool = False


@dataclass(frozen=True, slots=True)
class _Piece:
    """What an event added to a choice: text and tokens, or the reason of its end."""

    index: int
    text: str = ""
    scored: list[Scored] | None = None
    reason: str = ""


class Answer:
    """One answer."""

    def __init__(self, job: Job, texts: TokenTexts, metadata: Metadata, model: str, created: int) -> None:
        self._job, self._texts, self._metadata = job, texts, metadata
        self._model, self._created = model, created
        self._choices = [_Choice() for _ in range(len(job.requests) * job.n)]
        self._usage = pb.Usage()
        self._id = ""

    async def whole(self, streams: Streams) -> bytes:
        """The answer as one JSON object. Raises BatonError."""
        async for piece in self._pieces(streams, None):
            if piece is not None:
                choice = self._choices[piece.index]
                choice.text.append(piece.text)
                choice.scored.extend(piece.scored or ())
        choices = [
            self._job.shape.choice(index, "".join(each.text), each.scored if self._job.logprobs else None, each.reason)
            for index, each in enumerate(self._choices)
        ]
        return orjson.dumps(self._object(self._job.shape.whole, choices) | {"usage": self._spent()})

    async def events(self, streams: Streams, keep_alive_s: float) -> AsyncGenerator[bytes]:
        """Server-sent events, each as soon as it is known; a comment after each `keep_alive_s` of silence.

        Raises BatonError.
        """
        async for piece in self._pieces(streams, keep_alive_s):
            if piece is None:
                yield KEEP_ALIVE
                continue
            for choice in self._written(piece):
                yield self._event([choice], None)
        if self._job.include_usage:
            yield self._event([], self._spent())
        yield DONE

    def _written(self, piece: _Piece) -> list[Json]:
        shape, choice = self._job.shape, self._choices[piece.index]
        written = [] if choice.opened else [shape.opening(piece.index)]
        choice.opened = True
        if piece.text or piece.scored:
            written.append(shape.piece(piece.index, piece.text, piece.scored, choice.offset))
            choice.offset += sum(len(each.text) for each in piece.scored or ())
        if piece.reason:
            written.append(shape.ending(piece.index, piece.reason))
        return [each for each in written if each is not None]

    async def _pieces(self, streams: Streams, keep_alive_s: float | None) -> AsyncIterator[_Piece | None]:
        """None: nothing has come for `keep_alive_s`. Raises BatonError, also for an answer that is not complete."""
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
            raise EngineFault("the router's stream ended before each choice did")

    async def _piece(self, number: int, event: pb.GenerateEvent) -> _Piece | None:
        match event.WhichOneof("event"):
            case "tokens":
                scored = await self._texts.scored(event.tokens, self._metadata) if self._job.logprobs else None
                return _Piece(self._index(number, event.tokens.choice), event.tokens.text, scored)
            case "finished":
                index = self._index(number, event.finished.choice)
                self._choices[index].reason = _reason(event.finished)
                return _Piece(index, reason=self._choices[index].reason)
            case "completed":
                self._spend(event.completed.usage)
        return None

    def _index(self, number: int, choice: int) -> int:
        if choice >= self._job.n:
            raise EngineFault(f"the router sent choice {choice} of {self._job.n}")
        return number * self._job.n + choice

    def _spend(self, usage: pb.Usage) -> None:
        self._usage.prompt_tokens += usage.prompt_tokens
        self._usage.cached_tokens += usage.cached_tokens
        self._usage.completion_tokens += usage.completion_tokens

    def _spent(self) -> Json:
        usage = self._usage
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }

    def _event(self, choices: list[Json], usage: Json | None) -> bytes:
        chunk = self._object(self._job.shape.chunk, choices)
        if self._job.include_usage:
            chunk["usage"] = usage
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _object(self, kind: str, choices: list[Json]) -> Json:
        name = self._job.shape.prefix + self._id
        return {"id": name, "object": kind, "created": self._created, "model": self._model, "choices": choices}


def _reason(finished: pb.Finished) -> str:
    return "length" if finished.reason == common_pb2.FINISH_REASON_LENGTH else "stop"
