"""What an answer must be when the model has to call a tool: a JSON schema, since a constraint is one.

It has no marks around it, whatever the form: `CallReader` takes bare calls at the beginning of an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.gateway.toolschema import Function

_NONE = {"type": "object", "properties": {}, "additionalProperties": False}
_BASE = frozenset({"$schema", "$id", "id"})  # of a document, which the parameters are no longer


def forced_schema(functions: Sequence[Function], form: str, parallel: bool | None) -> dict[str, Any]:
    """A call of one of `functions`, as models of this form write it; several if `parallel` and the form allow."""
    places = [f"#/$defs/{number}" for number in range(len(functions))]
    given = {
        str(number): _moved(_parameters(function), place)
        for number, (function, place) in enumerate(zip(functions, places, strict=True))
    }
    key = "parameters" if form == "llama" else "arguments"
    calls = [_call(function.name, key, place) for function, place in zip(functions, places, strict=True)]
    one = {"anyOf": calls} if calls[1:] else calls[0]
    if form != "mistral" and not parallel:
        return {"$defs": given, **one}
    most = {"maxItems": 1} if parallel is False else {}
    return {"$defs": given, "type": "array", "items": one, "minItems": 1, **most}


def _call(name: str, key: str, place: str) -> dict[str, Any]:
    fields = {"name": {"const": name}, key: {"$ref": place}}
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


def _parameters(function: Function) -> dict[str, Any]:
    if function.parameters is None:
        return _NONE
    return {"type": "object"} | {name: value for name, value in function.parameters.items() if name not in _BASE}


def _moved(schema: Any, place: str) -> Any:
    """`schema`, at another place of the document: what it refers to within itself is there now."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {name: _pointed(name, value, place) for name, value in schema.items()}


def _pointed(name: str, value: Any, place: str) -> Any:
    if name == "$ref" and isinstance(value, str) and value.startswith("#"):
        return place + value.removeprefix("#")
    return _moved(value, place)
