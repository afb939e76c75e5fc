"""Answers of chat in the form of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from router.openai.errors import Json, Problem
from router.openai.formats.wire import AnswerWire, receipt_of
from router.openai.responses_api.schema import ResponsesBody

_PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponsesWire(AnswerWire):
    """Translates the answer of one request. Each item of the output is complete before the next one begins."""

    resumable = False

    def __init__(self, body: ResponsesBody) -> None:
        self.asked = _echo(body)
        self._sequence = -1
        self._output = list[Json]()
        self._open = False  # the last item
        self._pieces = list[str]()  # of its text or arguments
        self._reason = "stop"

    def whole(self, answer: Json) -> Json:
        [choice] = answer["choices"]
        message = choice["message"]
        for field in ("reasoning_content", "content"):
            if message.get(field):
                list(self._adds(answer, field, message[field]))
        for call in message.get("tool_calls", ()):
            list(self._calls(answer, call))
        self._reason = choice["finish_reason"]
        list(self._ends())
        return self._response(answer)

    def event(self, chunk: Json) -> bytes:
        return b"".join(self._sent(each) for each in self._events(chunk))

    def done(self) -> bytes:
        return b""

    def failed(self, problem: Problem) -> bytes:
        error = {"type": "error", "code": problem.code, "message": problem.message, "param": problem.param}
        return self._sent(error)

    def _sent(self, event: Json) -> bytes:
        self._sequence += 1
        data = orjson.dumps(event | {"sequence_number": self._sequence})
        return f"event: {event['type']}\ndata: ".encode() + data + b"\n\n"

    def _events(self, chunk: Json) -> Iterator[Json]:
        if not chunk["choices"]:
            response = self._response(chunk)
            yield {"type": f"response.{response['status']}", "response": response}
            return
        [choice] = chunk["choices"]
        delta = choice["delta"]
        if "role" in delta:
            begun = self._response(chunk) | {"status": "in_progress", "incomplete_details": None}
            yield {"type": "response.created", "response": begun}
            yield {"type": "response.in_progress", "response": begun}
        for field in ("reasoning_content", "content"):
            if delta.get(field):
                yield from self._adds(chunk, field, delta[field])
        for call in delta.get("tool_calls", ()):
            yield from self._calls(chunk, call)
        if choice["finish_reason"]:
            self._reason = choice["finish_reason"]
            yield from self._ends()

    def _adds(self, answer: Json, field: str, text: str) -> Iterator[Json]:
        """Add text or reasoning to its item."""
        kind = "message" if field == "content" else "reasoning"
        if not (self._open and self._output[-1]["type"] == kind):
            more: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._begins(answer, kind, more | {"content": []})
            part: Json = {"type": _PARTS[kind], "text": ""}
            self._output[-1]["content"] = [part | ({"annotations": [], "logprobs": []} if kind == "message" else {})]
            yield self._of_part("response.content_part.added", part=self._part)
        self._pieces.append(text)
        logprobs: Json = {"logprobs": []} if kind == "message" else {}
        yield self._of_part(f"response.{_PARTS[kind]}.delta", delta=text, **logprobs)

    def _calls(self, answer: Json, call: Json) -> Iterator[Json]:
        """Begin a call, or add to its arguments."""
        function = call["function"]
        if "id" in call:
            more = {"call_id": call["id"], "name": function["name"], "arguments": ""}
            yield from self._begins(answer, "function_call", more)
        if function["arguments"]:
            self._pieces.append(function["arguments"])
            yield self._of_item("response.function_call_arguments.delta", delta=function["arguments"])

    def _begins(self, answer: Json, kind: str, more: Json) -> Iterator[Json]:
        yield from self._ends()
        name = f"{_PREFIXES[kind]}_{answer['id'].removeprefix('chatcmpl-')}_{len(self._output)}"
        self._output.append({"id": name, "type": kind, "status": "in_progress", **more})
        self._open = True
        yield {"type": "response.output_item.added", "output_index": self._last, "item": self._output[-1]}

    def _ends(self) -> Iterator[Json]:
        """End the open item."""
        if not self._open:
            return
        self._open, item = False, self._output[-1]
        item["status"] = "incomplete" if self._reason == "length" else "completed"
        text, self._pieces = "".join(self._pieces), []
        if item["type"] == "function_call":
            item["arguments"] = text
            yield self._of_item("response.function_call_arguments.done", arguments=text, name=item["name"])
        else:
            logprobs: Json = {"logprobs": []} if item["type"] == "message" else {}
            self._part["text"] = text
            yield self._of_part(f"response.{_PARTS[item['type']]}.done", text=text, **logprobs)
            yield self._of_part("response.content_part.done", part=self._part)
        yield {"type": "response.output_item.done", "output_index": self._last, "item": item}

    @property
    def _last(self) -> int:
        return len(self._output) - 1

    @property
    def _part(self) -> Json:
        part: Json = self._output[-1]["content"][0]
        return part

    def _of_item(self, kind: str, **more: object) -> Json:
        return {"type": kind, "item_id": self._output[-1]["id"], "output_index": self._last, **more}

    def _of_part(self, kind: str, **more: object) -> Json:
        return self._of_item(kind, content_index=0, **more)

    def _response(self, answer: Json) -> Json:
        cut = self._reason == "length"
        found = {
            "id": "resp_" + answer["id"].removeprefix("chatcmpl-"),
            "object": "response",
            "created_at": answer["created"],
            "model": answer["model"],
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output,
            "usage": _usage(answer["usage"]) if answer.get("usage") else None,
        }
        return self.asked | found | receipt_of(answer)


def _echo(body: ResponsesBody) -> Json:
    """Return the fields of a response that repeat the request."""
    given = body.model_dump(by_alias=True, include=set(_DEFAULTS), exclude_none=True)
    return {"error": None, "previous_response_id": None, "store": False, "background": False} | _DEFAULTS | given


_DEFAULTS: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": None},
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}


def _usage(usage: Json) -> Json:
    details = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": details,
        "total_tokens": usage["total_tokens"],
    }
