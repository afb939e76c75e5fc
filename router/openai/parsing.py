"""Parses an HTTP body into its schema and names every mistake. Errors never repeat values of prompts."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from baton.errors import InvalidRequest, Violation
from baton.limits import MAX_HTTP_BODY_SECONDS
from router.openai import schema
from router.openai.errors import UNKNOWN, UNSUPPORTED, HttpError
from router.openai.schema import ChatBody, CompletionBody

_NAMED = 16  # Reported mistakes; a long list does not help, and takes long to make.
_COUNTED = 50_000  # a body with more mistakes gets one error: to list them takes long, too
_DRAIN = 16  # A too long body is read up to this multiple of the limit, so that the client reads the error.

# Fields of OpenAI and vLLM that are known but not supported, with the values that request nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "guided_decoding_backend": ("auto", "guidance"),  # vLLM's name of llguidance
    "guided_whitespace_pattern": (),
    "length_penalty": (1.0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
NEUTRAL_FIELDS: Mapping[type[BaseModel], Mapping[str, tuple[object, ...]]] = {
    CompletionBody: {"suffix": ("",), **_NEUTRAL},
    ChatBody: {
        **_NEUTRAL,
        "best_of": (1,),
        "documents": (),
        "echo": (False,),
        "include_reasoning": (True,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "modalities": (["text"],),
        "prediction": (),
        "web_search_options": (),
    },
}
# Kinds of wrong values, in words of JSON.
_WORDS = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "none_required": "null",
    "string_type": "a string",
}
_NESTED: Mapping[str, type[BaseModel]] = {
    "stream_options": schema.StreamOptions,
    "structured_outputs": schema.StructuredOutputs,
    "messages": schema.Message,
    "messages.tool_calls": schema.ToolCall,
    "messages.tool_calls.function": schema.CalledFunction,
    "tools": schema.Tool,
    "tools.function": schema.Function,
    "response_format": schema.ResponseFormat,
    "response_format.json_schema": schema.JsonSchema,
}

B = TypeVar("B", bound=BaseModel)


async def read_body(request: Request, kind: type[B], limit: int, *, ignores_unknown: bool = False) -> B:
    """Return the body. Raises HttpError if it is not `application/json` of at most `limit` bytes, or InvalidRequest."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise HttpError(415, "unsupported_media_type", "content-type: must be application/json", "content-type")
    if (coding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        text = f"content-encoding: {coding[:32]!r} is not supported, only identity"
        raise HttpError(
            415, "unsupported_content_encoding", text, "content-encoding", headers={"accept-encoding": "identity"}
        )
    try:
        async with asyncio.timeout(MAX_HTTP_BODY_SECONDS):
            data = await _bytes(request, limit)
    except ClientDisconnect:
        raise HttpError(400, "body_incomplete", "body: the client disconnected before its end", "body") from None
    except TimeoutError:
        raise HttpError(408, "request_timeout", f"body: must be received within {MAX_HTTP_BODY_SECONDS} s") from None
    return checked(data, kind, ignores_unknown=ignores_unknown)


def checked(data: bytes, kind: type[B], *, ignores_unknown: bool = False) -> B:
    """Parse and check the bytes of a body. Fields that are unknown or not supported are errors, unless it
    `ignores_unknown`. Raises InvalidRequest.
    """
    try:
        tree = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest.of("body", f"must be valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise InvalidRequest.of("body", "must be a JSON object")
    neutral = NEUTRAL_FIELDS.get(kind, {})
    refused = [name for name in tree if name in neutral and not _requests_nothing(tree[name], neutral[name])]
    violations = [Violation(name, f"{UNSUPPORTED} by this server") for name in refused if not ignores_unknown]
    tree = {name: value for name, value in tree.items() if name not in neutral}
    body = validated(tree, kind, violations, ignores_unknown=ignores_unknown)
    if violations:
        raise InvalidRequest(*violations)
    return body


def validated(
    tree: Mapping[str, Any], kind: type[B], violations: Sequence[Violation] = (), *, ignores_unknown: bool = False
) -> B:
    """Return the body that `tree` holds. Raises InvalidRequest with its mistakes, after `violations`."""
    try:
        return kind.model_validate(tree, extra="ignore" if ignores_unknown else None)
    except ValidationError as error:
        if (count := error.error_count()) > _COUNTED:
            raise InvalidRequest.of("body", f"has {count} mistakes; only up to {_COUNTED} are named") from None
        found = error.errors(include_url=False)[:_NAMED]
        raise InvalidRequest(*violations, *(_violation(each, kind) for each in found)) from None


async def _bytes(request: Request, limit: int) -> bytes:
    data, size = bytearray(), 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            data += part
        if size > _DRAIN * limit:
            break
    if size > limit:
        raise HttpError(413, "body_too_large", f"body: must be at most {limit} bytes", "body")
    return bytes(data)


def _requests_nothing(value: object, neutral: Sequence[object]) -> bool:
    return value is None or any(type(value) is type(each) and value == each for each in neutral)


def _violation(detail: Any, kind: type[BaseModel]) -> Violation:
    loc, tags = detail["loc"], kind.tags if issubclass(kind, schema.Body) else ()
    steps = (
        f"[{step}]" if isinstance(step, int) else f".{step}"
        for place, step in enumerate(loc)
        if not (step in tags and place and isinstance(loc[place - 1], int))
    )
    place, message = "".join(steps).removeprefix(".")[:128], str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "union_tag_invalid":
        return Violation(f"{place}.type", f"must be one of {message.rpartition('tags: ')[2]}")
    if detail["type"] == "extra_forbidden":
        return Violation(place or "''", _unknown(detail["loc"], kind))
    if detail["type"] == "union_tag_not_found":
        is_object = isinstance(detail["input"], dict)
        return Violation(f"{place}.type", "is required") if is_object else Violation(place, "must be an object")
    if detail["type"] == "missing":
        return Violation(place, "is required")
    if not place:  # a rule between fields; its message starts with the first field
        field, _, text = message.partition(": ")
        return Violation(field, text)
    return Violation(place, message if detail["type"] == "value_error" else _worded(detail, message))


def _worded(detail: Any, message: str) -> str:
    """Return the mistake in words of JSON, with the value. The default is pydantic's text."""
    given = detail.get("ctx", {})
    size, least, most = given.get("actual_length"), given.get("min_length"), given.get("max_length")
    match detail["type"]:
        case "too_short":
            return "must not be empty" if least == 1 else f"must have at least {least} items, got {size}"
        case "too_long":
            return f"must have at most {most} items, got {size}"
        case "string_too_long":
            return f"must have at most {most} characters, got {len(detail['input'])}"
        case "literal_error":
            value = detail["input"]
            got = "" if isinstance(value, str) else _got(value)  # the mistake is the text, not its kind
            return f"must be {given['expected'].replace('True', 'true').replace('False', 'false')}{got}"
        case kind if kind in _WORDS:
            return f"must be {_WORDS[kind]}{_got(detail['input'])}"
    return message.replace("Input should be", "must be") + _got(detail["input"])


def _got(value: object) -> str:
    """Return the wrong value if it is a number, else only its kind, because other values may be user text."""
    if value is None or isinstance(value, bool | int | float):
        return f", got {orjson.dumps(value).decode()}"
    return f", got {'an object' if isinstance(value, dict) else 'a list' if isinstance(value, list) else 'a string'}"


def _unknown(loc: Sequence[int | str], kind: type[BaseModel]) -> str:
    owner = _NESTED.get(".".join(part for part in loc[:-1] if isinstance(part, str)), kind)
    known = [field.alias or name for name, field in owner.model_fields.items()]
    near = difflib.get_close_matches(str(loc[-1])[:64], known, n=1)
    return f"{UNKNOWN}; did you mean {near[0]}?" if near else UNKNOWN
