"""Translation of typed bodies to router calls. `/v1/completions` makes one call per prompt; choices keep the order of
the prompts. `/v1/chat/completions` makes one call; the router renders the chat template.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from baton.errors import InvalidRequest
from baton.rpc.v1 import inference_pb2 as pb
from router.openai.chat_responses import ChatShape, ToolShape
from router.openai.job import Job, Json, base_request, http_name, usage_of
from router.openai.logprobs import Scored
from router.openai.schema import ChatBody, CompletionBody, Message, Prompt, Tool
from router.openai.tool_calls import forced_schema


def chat_job(body: ChatBody, tool_form: str = "") -> Job:
    """Return the call for a chat body. `tool_form` is the model's tool-call syntax. Raises InvalidRequest."""
    given = body.max_completion_tokens is not None
    request = base_request(body, body.max_completion_tokens if given else body.max_tokens)
    called = {call.id: call.function.name for message in body.messages for call in message.tool_calls or ()}
    request.chat.messages.extend(_turn(message, called.get(message.tool_call_id or "")) for message in body.messages)
    if body.offered:
        request.chat.tools = _json([_told(tool) for tool in body.offered], "tools")
    schema = _schema(body, tool_form)
    if schema is not None:
        field = "tools" if body.forced else "response_format.json_schema.schema"
        request.constraint.json_schema = _json(schema, field)
    if body.logprobs:
        request.logprobs = body.top_logprobs or 0
    names = _names("max_completion_tokens" if given else "max_tokens", forced=bool(body.forced))
    functions = [tool.function.name for tool in body.offered]
    return Job(
        requests=[request],
        shape=ToolShape(tool_form, functions, body.parallel_tool_calls is not False) if functions else ChatShape(),
        rename=lambda _, field: http_name(field, names),
        n=body.n or 1,
        stream=bool(body.stream),
        usage=usage_of(body.stream_options),
        thoughts=bool(body.thoughts),
        logprobs=bool(body.logprobs),
    )


def _json(value: object, field: str) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # orjson reads 1024 levels and writes 254
        raise InvalidRequest.of(field, "is nested too deeply") from None


def _names(limit: str, *, forced: bool) -> dict[str, str]:
    wanted = {"constraint.json_schema": "tools", "constraint": "tools"} if forced else {"constraint": "response_format"}
    return wanted | {
        "chat.messages": "messages",
        "chat.tools": "tools",
        "chat": "messages",
        "text": "messages",
        "token_ids": "messages",
        "prompt": "messages",
        "logprobs": "top_logprobs",
        "max_tokens": limit,
    }


def _told(tool: Tool) -> Json:
    """Return a tool for chat templates, with `parameters` always set: some templates read them without a check."""
    told: Json = tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
    told["function"].setdefault("parameters", {"type": "object", "properties": {}})
    return told


def _turn(message: Message, name: str | None) -> pb.ChatMessage:
    """Return a chat message. `name` is the function that a tool message answers; some templates need it."""
    role = "system" if message.role == "developer" else message.role  # templates use the older name
    turn = pb.ChatMessage(role=role, content=message.content, name=name, tool_call_id=message.tool_call_id)
    for call in message.tool_calls or ():
        turn.tool_calls.add(id=call.id, name=call.function.name, arguments=call.function.arguments)
    return turn


def _schema(body: ChatBody, tool_form: str) -> object:
    """Return the schema of the answer, or None if unconstrained. A forced call takes precedence over a text format."""
    if body.forced:
        return forced_schema([tool.function for tool in body.forced], tool_form, body.parallel_tool_calls)
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    return wanted.json_schema.shape if wanted.json_schema else {"type": "object"}


class CompletionShape:
    """Objects of type `text_completion`."""

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def choice(self, index: int, text: str, scored: Sequence[Scored] | None, reason: str) -> Json:
        """Return a whole choice."""
        return _choice(index, text, scored, 0, reason)

    def opening(self, index: int) -> Json | None:
        """Return None: a completion has no opening event."""
        return None

    def piece(self, index: int, text: str, scored: Sequence[Scored] | None, offset: int) -> list[Json]:
        """Return a choice with text."""
        return [_choice(index, text, scored, offset, None)]

    def thought(self, index: int, thought: Json) -> Json:
        """Return a choice with a thought and no text."""
        return _choice(index, "", None, 0, None) | {"thoughts": [thought]}

    def ending(self, index: int, reason: str) -> list[Json]:
        """Return a choice with the finish reason and no text."""
        return [_choice(index, "", None, 0, reason)]


def completion_job(body: CompletionBody) -> Job:
    """Return the calls for a completion body, one per prompt."""
    prompts: list[Prompt] = body.prompt

    def rename(number: int, field: str) -> str:
        here = f"prompt[{number}]" if prompts[1:] else "prompt"
        return http_name(field, {"text": here, "token_ids": here, "prompt": here})

    base = base_request(body, body.max_tokens)
    if body.logprobs is not None:
        base.logprobs = body.logprobs
    return Job(
        requests=[_with_prompt(base, prompt) for prompt in prompts],
        shape=CompletionShape(),
        rename=rename,
        n=body.n or 1,
        stream=bool(body.stream),
        usage=usage_of(body.stream_options),
        thoughts=bool(body.thoughts),
        logprobs=body.logprobs is not None,
    )


def _with_prompt(base: pb.GenerateRequest, prompt: Prompt) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    request.CopyFrom(base)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()
    return request


def _choice(index: int, text: str, scored: Sequence[Scored] | None, offset: int, reason: str | None) -> Json:
    logprobs = None if scored is None else _logprobs(scored, offset)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(scored: Sequence[Scored], offset: int) -> Json:
    offsets = []
    for each in scored:
        offsets.append(offset)
        offset += len(each.text)
    return {
        "tokens": [each.text for each in scored],
        "token_logprobs": [each.logprob for each in scored],
        "top_logprobs": [_best(each.top) for each in scored],
        "text_offset": offsets,
    }


def _best(top: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return log-probabilities by text. Several tokens may share a text; the likeliest is kept."""
    best: dict[str, float] = {}
    for text, logprob in top:
        best.setdefault(text, logprob)
    return best
