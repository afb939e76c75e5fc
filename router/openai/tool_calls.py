"""Calls of tools in what a model writes, found while it is written.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one or several, behind text or not
    mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
    llama    <|python_tag|>{"name": ..., "parameters": {...}}; {...}
    json     any other way: only bare

In each form a call, or a list of them, may stand bare at the beginning: special tokens have no text, and models forget
them. What is not JSON, has no arguments, or calls what nobody offered stays text, to the letter. Once a call is found,
the whitespace around it is nobody's.

What an answer must be when the model has to call a tool: a JSON schema, since a constraint is one.

It has no marks around it, whatever the form: `CallReader` takes bare calls at the beginning of an answer.
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
    """A function, and its arguments as JSON."""

    name: str
    arguments: str


Part: TypeAlias = str | Call


class CallReader:
    """One answer, read as it comes: text is handed out as soon as it is known to be no part of a call, a call as soon
    as it is whole. How the text is cut into pieces changes nothing but when.
    """

    def __init__(self, form: str, names: Collection[str]) -> None:
        """`names` of the functions that may be called; a form that is not known is json."""
        begin, end = _MARKS.get(form, ("", ""))
        marked = rf"{re.escape(begin)}\s*+(?=[\[{{])" if begin else r"(?!)"
        self._marked = re.compile(rf"(?<!\s)\s*+{marked}")
        self._bare = re.compile(r'\s*+(?=\[?\s*+\{\s*+")')
        self._maybe = re.compile(rf"(?<!\s)\s*+{_beginning_of(begin)}\Z")
        self._maybe_bare = re.compile(r"\s*+(?:\[\s*+)?(?:\{\s*+)?\Z")
        self._behind = re.compile(rf"\s*+(?:{re.escape(end)}\s*+)?")
        self._maybe_behind = re.compile(rf"\s*+{_beginning_of(end)}\Z")
        self._names = names
        self._first = True  # nothing but calls so far
        self._after = False  # right behind a call
        self._held: list[str] = []  # what may be the beginning of a call, or follow one
        self._value: _Value | None = None

    def feed(self, text: str) -> list[Part]:
        """The answer goes on with `text`."""
        return list(self._read(text))

    def end(self) -> list[Part]:
        """The answer is at its end: what was held back is text."""
        held = self._value.text if self._value else "".join(self._held)
        self._held, self._value = [], None
        if self._after:
            held = self._behind.sub("", held, count=1)
        return [held] if held else []

    def _read(self, text: str) -> Iterator[Part]:
        while text:
            if not self._value and text.isspace():  # which decides nothing; some models write no end of it
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
    """A JSON object or array, until its last bracket; `lead` is what stands before it."""

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
        """How much of `text` was needed to end it; 0: all, and it has not ended."""
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
    """A pattern: some of `mark`, or all of it and whitespace, or nothing."""
    return reduce(lambda rest, char: f"(?:{re.escape(char)}{rest})?", reversed(mark), r"\s*+")


def _calls(text: str, names: Collection[str]) -> list[Call]:
    """All of the object or the array of them; empty: it is something else."""
    try:
        value = json.loads(text, parse_constant=_refuse)
        calls = [_call(each, names) for each in (value if isinstance(value, list) else [value])]
    except (ValueError, RecursionError):
        return []
    return calls


def _call(value: object, names: Collection[str]) -> Call:
    """Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("no object")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        raise ValueError("no call")
    text = json.dumps(arguments, ensure_ascii=False)
    text.encode()  # half a surrogate pair is no text, and cannot be sent
    return Call(name, text)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


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
