"""Answers and errors of chat in the form of Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields

import orjson

from router.openai.errors import Json, Problem
from router.openai.formats.calls import reject_constant
from router.openai.formats.wire import AnswerWire, receipt_of

MESSAGES = "/v1/messages"
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_OVERLOADED = 529
_SIGNATURE = "unsigned"  # clients send a thinking block back only if it has a signature
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class MessagesProblem(Problem):
    """An error in the form of this API."""

    @classmethod
    def of(cls, problem: Problem) -> MessagesProblem:
        """Translate an error. Overload has the status 529."""
        status = _OVERLOADED if problem.code == "overloaded" else problem.status
        kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        rest = {field.name: getattr(problem, field.name) for field in fields(problem)}
        return cls(**rest | {"status": status, "kind": kind})

    @classmethod
    def at(cls, path: str, problem: Problem) -> Problem:
        """Translate the error of a request to a path of this API."""
        return cls.of(problem) if path.startswith(MESSAGES) else problem

    def body(self) -> bytes:
        return orjson.dumps({"type": "error", "error": {"type": self.kind, "message": self.message}})


class MessagesWire(AnswerWire):
    """Translates the answer of one request."""

    resumable = False
    id_headers = ("x-request-id", "request-id")  # the second one is Anthropic's

    def __init__(self) -> None:
        self._kind = ""  # of the open block
        self._block = -1
        self._reason = "end_turn"

    def whole(self, answer: Json) -> Json:
        [choice] = answer["choices"]
        message, usage = choice["message"], answer["usage"]
        blocks = list[Json]()
        if thought := message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": thought, "signature": _SIGNATURE})
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            use = {"type": "tool_use", "id": call["id"], "name": function["name"]}
            blocks.append(use | {"input": _object(function["arguments"])})
        ended = {"stop_reason": self._stop_reason(choice["finish_reason"]), "stop_sequence": self.matched_stop or None}
        return _message(answer) | {"content": blocks, "usage": _usage(usage)} | ended | receipt_of(answer)

    def event(self, chunk: Json) -> bytes:
        return b"".join(_event(each) for each in self._events(chunk))

    def done(self) -> bytes:
        return b""

    def problem(self, problem: Problem) -> Problem:
        return MessagesProblem.of(problem)

    def failed(self, problem: Problem) -> bytes:
        return b"event: error\ndata: " + problem.body() + b"\n\n"

    def _events(self, chunk: Json) -> Iterator[Json]:
        if not chunk["choices"]:
            ended = {"stop_reason": self._reason, "stop_sequence": self.matched_stop or None}
            yield {"type": "message_delta", "delta": ended, "usage": _usage(chunk["usage"]), **receipt_of(chunk)}
            yield {"type": "message_stop"}
            return
        [choice] = chunk["choices"]
        delta = choice["delta"]
        if "role" in delta:
            start: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(chunk["usage"])}
            yield {"type": "message_start", "message": _message(chunk) | start}
            yield {"type": "ping"}
        if thought := delta.get("reasoning_content"):
            yield from self._begins("thinking", {"thinking": "", "signature": ""})
            yield self._adds("thinking_delta", thinking=thought)
        if text := delta.get("content"):
            yield from self._begins("text", {"text": ""})
            yield self._adds("text_delta", text=text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                start = {"id": call["id"], "name": call["function"]["name"], "input": {}}
                yield from self._begins("tool_use", start, again=True)
            if arguments := call["function"]["arguments"]:
                yield self._adds("input_json_delta", partial_json=arguments)
        if choice["finish_reason"]:
            self._reason = self._stop_reason(choice["finish_reason"])
            yield from self._ends()

    def _stop_reason(self, reason: str) -> str:
        return "stop_sequence" if self.matched_stop and reason == "stop" else _REASONS[reason]

    def _begins(self, kind: str, block: Json, *, again: bool = False) -> Iterator[Json]:
        """Yield the beginning of a block, unless one of its kind is open, after the end of the open one."""
        if kind == self._kind and not again:
            return
        yield from self._ends()
        self._block, self._kind = self._block + 1, kind
        yield {"type": "content_block_start", "index": self._block, "content_block": {"type": kind, **block}}

    def _ends(self) -> Iterator[Json]:
        if self._kind == "thinking":
            yield self._adds("signature_delta", signature=_SIGNATURE)
        if self._kind:
            yield {"type": "content_block_stop", "index": self._block}
        self._kind = ""

    def _adds(self, kind: str, **added: str) -> Json:
        return {"type": "content_block_delta", "index": self._block, "delta": {"type": kind, **added}}


def _message(answer: Json) -> Json:
    name = "msg_" + answer["id"].removeprefix("chatcmpl-")
    return {"id": name, "type": "message", "role": "assistant", "model": answer["model"]}


def _usage(usage: Json) -> Json:
    """Return token counts; those of the cache are not part of `input_tokens`."""
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    counts = {"input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"]}
    return counts | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}


def _object(text: str) -> Json | orjson.Fragment:
    """Return the arguments of a call; empty if they are cut or cannot be written."""
    try:
        found = json.loads(text, parse_constant=reject_constant)
        orjson.dumps([[[found]]])  # as deep as in the answer
    except orjson.JSONEncodeError as error:  # the text is valid JSON all the same
        return orjson.Fragment(text) if "64-bit" in str(error) else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _event(event: Json) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + orjson.dumps(event) + b"\n\n"
