"""`/v1/chat/completions`: one call; the model's template is the router's business."""

from __future__ import annotations

import orjson

from baton.errors import InvalidRequest
from baton.rpc.v1 import inference_pb2 as pb
from router.gateway.chatshape import ChatShape
from router.gateway.job import Job, Json, base_request, http_name, usage_of
from router.gateway.schema import ChatBody, Message
from router.gateway.toolforce import forced_schema
from router.gateway.toolschema import Tool
from router.gateway.toolshape import ToolShape


def chat_job(body: ChatBody, tool_form: str = "") -> Job:
    """What `body` asks for. `tool_form`: how the model has calls of tools written; only with tools.

    Raises InvalidRequest for a schema that is nested too deeply.
    """
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
    except orjson.JSONEncodeError:  # it reads 1024 levels and writes 254
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
    """A tool as templates know it: some look at the parameters without asking whether there are any."""
    told: Json = tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
    told["function"].setdefault("parameters", {"type": "object", "properties": {}})
    return told


def _turn(message: Message, name: str | None) -> pb.ChatMessage:
    """`name`: of the function whose answer it is, which some templates want to be told."""
    role = "system" if message.role == "developer" else message.role  # templates know the older name
    turn = pb.ChatMessage(role=role, content=message.content, name=name, tool_call_id=message.tool_call_id)
    for call in message.tool_calls or ():
        turn.tool_calls.add(id=call.id, name=call.function.name, arguments=call.function.arguments)
    return turn


def _schema(body: ChatBody, tool_form: str) -> object:
    """What the answer must be; None: anything. A forced call counts before a format, which is one of text."""
    if body.forced:
        return forced_schema([tool.function for tool in body.forced], tool_form, body.parallel_tool_calls)
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    return wanted.json_schema.shape if wanted.json_schema else {"type": "object"}
