"""Tool calls: found in a model's output while it streams (`CallReader`), and forced by a schema (`forced_schema`).

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one or several, after text or not
    mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    llama    <|python_tag|>{"name": ..., "parameters": {...}}; {...}
    json     any other form: only bare

In each form calls may stand bare at the beginning, because special tokens have no text and models forget them. A forced
schema has no marks either. Output that is not JSON, has no arguments, or calls an unknown function stays text
unchanged. Whitespace around a call is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

from router.openai.schema import Function

_MARKS = {"hermes": ("<tool_call>", "</tool_call>"), "mistral": ("[TOOL_CALLS]", ""), "llama": ("<|python_tag|>", ";")}


@dataclass(frozen=True, slots=True)
class Call:
    """A function name, and its arguments as JSON."""

    name: str
    arguments: str


Part: TypeAlias = str | Call


class CallReader:
    """Incremental parser of one answer. Text is returned when it cannot be part of a call, a call when it is complete.
    The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, form: str, names: Collection[str]) -> None:
        """`names` are the functions that may be called; an unknown form is treated as json."""
        begin, end = _MARKS.get(form, ("", ""))
        marked = rf"{re.escape(begin)}\s*+(?=[\[{{])" if begin else r"(?!)"
        self._marked = re.compile(rf"(?<!\s)\s*+{marked}")
        self._bare = re.compile(r'\s*+(?=\[?\s*+\{\s*+")')
        self._maybe = re.compile(rf"(?<!\s)\s*+{_beginning_of(begin)}\Z")
        self._maybe_bare = re.compile(r"\s*+(?:\[\s*+)?(?:\{\s*+)?\Z")
        self._behind = re.compile(rf"\s*+(?:{re.escape(end)}\s*+)?")
        self._maybe_behind = re.compile(rf"\s*+{_beginning_of(end)}\Z")
        self._names = names
        self._first = True  # only calls so far
        self._after = False  # directly after a call
        self._held: list[str] = []  # a possible beginning of a call, or text after one
        self._value: _Value | None = None

    def feed(self, text: str) -> list[Part]:
        return list(self._read(text))

    def end(self) -> list[Part]:
        """Return the text that was held back; it is no call."""
        held = self._value.text if self._value else "".join(self._held)
        self._held, self._value = [], None
        if self._after:
            held = self._behind.sub("", held, count=1)
        return [held] if held else []

    def _read(self, text: str) -> Iterator[Part]:
        while text:
            if not self._value and text.isspace():  # undecidable, and some models write whitespace without end
                self._held.append(text)
                return
            parts, text = self._inside(self._value, text) if self._value else self._outside(text)
            yield from parts

    def _outside(self, text: str) -> tuple[list[Part], str]:
        text, self._held = "".join((*self._held, text)), []
        if self._after:
            if self._maybe_behind.match(text):
                self._held = [text]
                return [], ""
            self._after = False
            text = self._behind.sub("", text, count=1)
        found = (self._first and self._bare.match(text)) or self._marked.search(text)
        if found:
            self._value = _Value(found.group())
            return self._said(text[: found.start()]), text[found.end() :]
        maybe = (self._first and self._maybe_bare.match(text)) or self._maybe.search(text)
        at = maybe.start() if maybe else len(text)
        self._held = [text[at:]]
        return self._said(text[:at]), ""

    def _said(self, text: str) -> list[Part]:
        self._first = self._first and not text
        return [text] if text else []

    def _inside(self, value: _Value, text: str) -> tuple[list[Part], str]:
        at = value.take(text)
        if not at:
            return [], ""
        self._value = None
        calls = _calls(value.json, self._names)
        if not calls:
            return self._said(value.text), text[at:]
        self._first = self._after = True
        return list(calls), text[at:]


class _Value:
    """A JSON object or array, up to its last bracket; `lead` is the text before it."""

    def __init__(self, lead: str) -> None:
        self._lead = lead
        self._pieces: list[str] = []
        self._depth, self._quoted, self._escaped = 0, False, False

    @property
    def json(self) -> str:
        return "".join(self._pieces)

    @property
    def text(self) -> str:
        return self._lead + self.json

    def take(self, text: str) -> int:
        """Return the number of characters up to the end of the value, or 0 if it has not ended."""
        for at, char in enumerate(text, 1):
            self._look_at(char)
            if not self._depth:
                self._pieces.append(text[:at])
                return at
        self._pieces.append(text)
        return 0

    def _look_at(self, char: str) -> None:
        if self._quoted:
            self._quoted = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif char == '"':
            self._quoted = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1


def _beginning_of(mark: str) -> str:
    """Return a pattern for a prefix of `mark`: empty, partial, or complete with whitespace."""
    return reduce(lambda rest, char: f"(?:{re.escape(char)}{rest})?", reversed(mark), r"\s*+")


def _calls(text: str, names: Collection[str]) -> list[Call]:
    """Return the calls of an object or an array; empty if any part is no call."""
    try:
        value = json.loads(text, parse_constant=_reject)
        return [_call(each, names) for each in (value if isinstance(value, list) else [value])]
    except (ValueError, RecursionError):
        return []


def _call(value: object, names: Collection[str]) -> Call:
    fields = value if isinstance(value, dict) else {}
    name, arguments = fields.get("name"), fields.get("arguments", fields.get("parameters"))
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        raise ValueError("not a call of an offered function")
    text = json.dumps(arguments, ensure_ascii=False)
    text.encode()  # raises for half a surrogate pair, which cannot be sent
    return Call(name, text)


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


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
