"""Forced tool calls: the schema of an answer that is nothing but calls, without marks, whatever the model's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.openai.schema import Function

_NONE = {"type": "object", "properties": {}, "additionalProperties": False}
_BASE = frozenset({"$schema", "$id", "id"})  # identify a document; the parameters are now part of another one


def forced_schema(functions: Sequence[Function], form: str, parallel: bool | None) -> dict[str, Any]:
    """Return the schema for a call of one of `functions`; for several if `parallel` and the form allow it."""
    places = [f"#/$defs/{number}" for number in range(len(functions))]
    given = {
        str(number): _moved(_parameters(function), place)
        for number, (function, place) in enumerate(zip(functions, places, strict=True))
    }
    key = "parameters" if form == "llama" else "arguments"
    calls = [_call_schema(function.name, key, place) for function, place in zip(functions, places, strict=True)]
    one = {"anyOf": calls} if calls[1:] else calls[0]
    if form != "mistral" and not parallel:
        return {"$defs": given, **one}
    most = {"maxItems": 1} if parallel is False else {}
    return {"$defs": given, "type": "array", "items": one, "minItems": 1, **most}


def calls_or(content: Mapping[str, Any], functions: Sequence[Function], form: str, parallel: bool | None) -> Any:
    """Return the schema of an answer that is either a call, like `forced_schema`, or `content` as text."""
    calls = forced_schema(functions, form, parallel)
    text = _moved({name: value for name, value in content.items() if name not in _BASE}, "#/$defs/content")
    return {"$defs": calls.pop("$defs") | {"content": text}, "anyOf": [{"$ref": "#/$defs/content"}, calls]}


def _call_schema(name: str, key: str, place: str) -> dict[str, Any]:
    fields = {"name": {"const": name}, key: {"$ref": place}}
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


def _parameters(function: Function) -> dict[str, Any]:
    if function.parameters is None:
        return _NONE
    return {"type": "object"} | {name: value for name, value in function.parameters.items() if name not in _BASE}


def _moved(schema: Any, place: str) -> Any:
    """Return `schema` with its internal references rewritten to `place` in another document."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {}
    for name, value in schema.items():
        local = name == "$ref" and isinstance(value, str) and value.startswith("#")
        moved[name] = place + value.removeprefix("#") if local else _moved(value, place)
    return moved
