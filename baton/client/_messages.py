"""Translates arguments to messages of `Inference`, and replies back. No I/O. The server, maybe newer, checks ranges."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from google.protobuf.message import Message

from baton.client import types
from baton.errors import EngineFault, InvalidRequest
from baton.rpc import convert
from baton.rpc.v1 import admin_pb2 as admin
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import inference_pb2 as inference

M = TypeVar("M", bound=Message)
T = TypeVar("T")
Ids: TypeAlias = Sequence[int]
Chat: TypeAlias = Sequence[types.ChatMessage | Mapping[str, Any]]
Tools: TypeAlias = Sequence[Mapping[str, Any]]

_SAMPLING = frozenset(common.Sampling.DESCRIPTOR.fields_by_name)
_TURN = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning")
_CONSTRAINT = frozenset({"json_schema", "regex", "choices", "grammar"})


def generate_request(prompt: types.Prompt, options: types.Options) -> inference.GenerateRequest:
    """Return the request. Raises TypeError for an unknown option, InvalidRequest if the wire cannot carry a value."""
    request = _options(options)
    if isinstance(prompt, str):
        request.MergeFrom(_field(inference.GenerateRequest, "text", prompt, "prompt."))
    elif isinstance(prompt, bytes | bytearray | memoryview):  # sequences of int, but never of token ids
        raise TypeError(f"a prompt must be text or token ids, not {type(prompt).__name__}")
    else:
        request.token_ids.MergeFrom(_field(common.TokenIds, "ids", prompt, "prompt.token_"))
        request.token_ids.SetInParent()
    return request


def chat_request(messages: Chat, options: types.Options, tools: Tools = ()) -> inference.GenerateRequest:
    """Like `generate_request`, for a conversation and OpenAI's `tools`. A message may be a mapping as of OpenAI's API:
    text parts are joined with line breaks, as over HTTP. Raises TypeError also for an unknown field.
    """
    for name, given in (("messages", messages), ("tools", tools)):
        if isinstance(given, str | bytes | Mapping):
            raise TypeError(f"{name} must be a list, not {type(given).__name__}")
    request = _options(options)
    request.chat.SetInParent()
    if tools:
        request.chat.tools = _json(list(tools), "prompt.chat.tools")
    for number, message in enumerate(messages):
        where, added = f"prompt.chat[{number}].", request.chat.messages.add()
        turn, more = (message, {}) if isinstance(message, types.ChatMessage) else _turn(message, where)
        fields = {"role": turn.role, "content": turn.content, "tool_call_id": turn.tool_call_id, **more}
        for name, value in fields.items():
            added.MergeFrom(_field(inference.ChatMessage, name, value, where))
        for index, each in enumerate(turn.tool_calls):
            call = _call(each, f"{where}tool_calls[{index}].")
            values = {"id": call.id, "name": call.name, "arguments": call.arguments}
            added.tool_calls.append(build_message(inference.ToolCall, f"{where}tool_calls", **values))
    return request


def cluster_status(reply: admin.StatusReply) -> types.ClusterStatus:
    """Return the status. Raises EngineFault for an invalid reply."""
    workers = tuple(trusted(_worker_status, each) for each in reply.workers)
    control = _control(reply.control) if reply.HasField("control") else None
    return types.ClusterStatus(**values(reply) | {"workers": workers, "control": control})


def _control(message: admin.Control) -> types.Control:
    slots = tuple(types.Slot(**values(slot)) for slot in message.slots)
    decisions = tuple(types.Decision(**values(decision)) for decision in message.decisions)
    plan = types.Plan(**values(message.plan))
    return types.Control(plan, message.age_s, slots, decisions, message.host, message.outlook)


def values(message: Message) -> dict[str, Any]:
    """Return the fields of a message by name, for a dataclass with the same fields."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def model(message: inference.Model) -> types.Model:
    """Return a served model. Its defaults are those that are set."""
    defaults = {field.name: value for field, value in message.defaults.ListFields()}
    return types.Model(**values(message) | {"aliases": tuple(message.aliases), "defaults": defaults})


def trusted(read: Callable[[M], T], message: M) -> T:
    """Return `read(message)`. An invalid reply is the server's fault, so InvalidRequest becomes EngineFault."""
    try:
        return read(message)
    except InvalidRequest as error:
        raise EngineFault(f"the server sent an invalid reply: {error}") from error


def _worker_status(message: admin.WorkerStatus) -> types.WorkerStatus:
    info, load = convert.info_from_pb(message.info), convert.load_from_pb(message.load)
    return types.WorkerStatus(info, load, message.state, message.dispatched, message.note)


def _options(options: types.Options) -> inference.GenerateRequest:
    request = inference.GenerateRequest()
    given = [name for name, value in options.items() if name in _CONSTRAINT and value is not None]
    if given[1:]:
        raise InvalidRequest.of(f"constraint.{given[1]}", f"cannot be combined with {given[0]}")
    for name, value in options.items():
        if name not in types.Options.__annotations__:
            near = difflib.get_close_matches(name, types.Options.__annotations__, n=1)
            known = ", ".join(types.Options.__annotations__)
            hint = f"did you mean {near[0]!r}?" if near else f"must be one of {known}"
            raise TypeError(f"unknown option {name!r}; {hint}")
        if value is not None:
            _set(request, name, value)
    return request


def _set(request: inference.GenerateRequest, name: str, value: Any) -> None:
    if name in _SAMPLING:
        value = [value] if name in {"stop", "bad_words"} and isinstance(value, str) else value
        request.sampling.MergeFrom(_field(common.Sampling, name, value, "sampling."))
    elif name == "choices":
        value = [value] if isinstance(value, str) else value
        request.constraint.choices.MergeFrom(_field(inference.Choices, "texts", value, "constraint.choices."))
    elif name in _CONSTRAINT:
        if name == "json_schema" and isinstance(value, Mapping):
            value = _json(value, "constraint.json_schema")
        request.constraint.MergeFrom(_field(inference.Constraint, name, value, "constraint."))
    else:
        request.MergeFrom(_field(inference.GenerateRequest, name, value, ""))


def _turn(message: Mapping[str, Any], where: str) -> tuple[types.ChatMessage, dict[str, Any]]:
    """Return a message, and the fields of the wire that `types.ChatMessage` lacks."""
    unknown = [name for name, value in _mapping(message, where).items() if name not in _TURN and value is not None]
    if unknown:
        raise TypeError(f"unknown field {unknown[0]!r} of a message; must be one of {', '.join(_TURN)}")
    calls = tuple(message.get("tool_calls") or ())
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    content = message.get("content") or "" if calls else _member(message, "content", where)
    role, content = _member(message, "role", where), _joined(content, where)
    turn = types.ChatMessage(role, content, calls, message.get("tool_call_id"))
    return turn, {"name": message.get("name"), "reasoning": reasoning}


def _joined(content: Any, where: str) -> Any:
    """Return text parts as one text, and another content as it is."""
    if not isinstance(content, list | tuple):
        return content
    texts: list[Any] = [
        part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"
    ]
    if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest.of(f"{where}content", 'parts must be {"type": "text", "text": ...}')
    return "\n".join(texts)


def _call(call: object, where: str) -> types.ToolCall:
    if isinstance(call, types.ToolCall):
        return call
    function, inner = _member(call, "function", where), f"{where}function."
    return types.ToolCall(
        _member(call, "id", where), _member(function, "name", inner), _member(function, "arguments", inner)
    )


def _member(given: object, name: str, where: str) -> Any:
    """Return a value of a mapping. Raises InvalidRequest if there is none."""
    if name not in (found := _mapping(given, where)):
        raise InvalidRequest.of(f"{where}{name}", "must be set")
    return found[name]


def _mapping(given: object, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidRequest.of(where.rstrip("."), f"must be a mapping, not {type(given).__name__}")
    return given


def _json(value: object, field: str) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest.of(field, f"not JSON ({type(error).__name__})") from error


def _field(kind: type[M], name: str, value: object, where: str) -> M:
    """Return a message with this field; protobuf checks the type and the width of the value."""
    return build_message(kind, f"{where}{name}", **{name: value})


def build_message(kind: type[M], field: str, **values: object) -> M:
    """Return a message. Raises InvalidRequest with `field` if the wire cannot carry a value."""
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        # without the value, because it may be a prompt
        raise InvalidRequest.of(field, f"invalid value for this field ({type(error).__name__})") from error
