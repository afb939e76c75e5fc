"""Parts of docs/reference/config.md and http.md: the fields of a schema, as pydantic describes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from baton.cli.setup.config import schema_text
from router.openai.messages_api.schema import MessagesBody
from router.openai.responses_api.schema import ResponsesBody
from router.openai.schema import ChatBody, CompletionBody
from tools.reference.pages import Page, code, table

Schema = Mapping[str, Any]
KEYS = ("key", "value", "default", "meaning")
SECTIONS = {  # part of the page: the keys of the cluster file in it
    "cluster": ("name", "mode", "resumable_s", "history", "model", "redis", "ray"),
    "router": ("router",),
    "pools": ("prefill",),
    "transfer": ("transfer", "retry", "ledger"),
    "goals": ("slo", "scaling"),
    "results": ("determinism", "thinking"),
    "operation": ("security", "log", "tracing"),
}
SAME_AS = {"decode": "prefill"}
LARGEST_SIZE = 2**50
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def config_page() -> Page:
    """Return the page of the cluster file. Raises ValueError if a key is in no part."""
    schema = Tree(json.loads(schema_text()))
    listed = {name for names in SECTIONS.values() for name in names} | {*SAME_AS}
    if listed != {*schema.root["properties"]}:
        raise ValueError(f"tools/reference/keys.py: not in a part: {listed ^ {*schema.root['properties']}}")
    return Page("config.md", {part: _keys(schema, names) for part, names in SECTIONS.items()})


def http_page() -> Page:
    """Return the page of the HTTP bodies."""
    bodies: dict[str, type[BaseModel]] = {"completions": CompletionBody, "chat-completions": ChatBody}
    bodies |= {"messages": MessagesBody, "responses": ResponsesBody}
    return Page("http.md", {part: _fields(Tree(body.model_json_schema())) for part, body in bodies.items()})


def _keys(schema: Tree, names: tuple[str, ...]) -> str:
    """Return the rows of the named sections, then those keys of their twins that differ."""
    sections = schema.root["properties"]
    rows = [row for name in names for row in schema.rows(name, sections[name])]
    for twin, name in SAME_AS.items():
        if name in names:
            same = {(row[0].replace(f"{name}.", f"{twin}."), *row[1:]) for row in rows}
            rows += [row for row in schema.rows(twin, sections[twin]) if row not in same]
    return table(KEYS, rows)


def _fields(schema: Tree) -> str:
    rows = (row for name, field in schema.root["properties"].items() for row in schema.rows(name, field))
    return table(("field", "value"), ((name, kind) for name, kind, *_ in rows))


@dataclass(frozen=True, slots=True)
class Tree:
    """A JSON schema with its definitions."""

    root: Schema

    def rows(self, name: str, field: Schema) -> Iterator[tuple[str, str, str, str]]:
        """Yield name, values, default and meaning of a field; for an object, those of its fields."""
        inner = self._section(field)
        if inner is None or self._is_optional(field):
            yield code(name), self.kind(field), self._default(field), field.get("description", "")
        if inner is not None:
            for key, each in inner["properties"].items():
                yield from self.rows(f"{name}.{key}", each)

    def _default(self, field: Schema) -> str:
        default = field.get("default")
        if self.kind(field).startswith("size") and isinstance(default, int):
            number, unit = next((default // size, name) for size, name in UNITS if default % size == 0)
            return code(f"{number}{unit}")
        return "" if default is None else code(_text(default))

    def _section(self, field: Schema) -> Schema | None:
        """Return the object with named fields that `field` is, or that one of its alternatives is."""
        found = [each for each in map(self._resolved, self._alternatives(field)) if "properties" in each]
        return found[0] if found else None

    def _is_optional(self, field: Schema) -> bool:
        return len(self._alternatives(field)) > 1

    def _alternatives(self, field: Schema) -> list[Schema]:
        return list(field.get("anyOf") or [field])

    def _resolved(self, field: Schema) -> Schema:
        for one in field.get("allOf", ()):
            field = {**self._resolved(one), **field}
        name = field.get("$ref", "").rpartition("/")[2]
        return self._resolved(self.root["$defs"][name]) if name else field

    def kind(self, field: Schema) -> str:
        """Return the values that a field takes, in words; null, which means that the field is left out, is not one."""
        each = [self._resolved(one) for one in self._alternatives(field)]
        if any(one.get("maximum") == LARGEST_SIZE for one in each):
            others = [self._kind(one) for one in each if one.get("type") not in ("integer", "string") or "const" in one]
            return " or ".join(["size", *others])
        return " or ".join(dict.fromkeys(self._kind(one) for one in each if one.get("type") != "null"))

    def _kind(self, field: Schema) -> str:
        if "const" in field:
            return code(_text(field["const"]))
        if "enum" in field:
            return ", ".join(code(_text(each)) for each in field["enum"])
        kind = str(field.get("type", "string" if "pattern" in str(field) else "any"))
        if kind == "array":
            return f"list of {self.kind(field['items']) if field.get('items') else 'values'}{_length(field)}"
        return {"object": "mapping", "boolean": "true, false"}.get(kind, kind) + _range(field)


def _text(value: object) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value)


def _range(field: Schema) -> str:
    """Return the limits of a number, without those of its 32 or 64 bits."""
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {field[key]:,.12g}" for key, sign in signs.items() if -(2**31) < field.get(key, 2**31) < 2**31]
    return f" {', '.join(limits)}" if limits else ""


def _length(field: Schema) -> str:
    words = {"minItems": "at least", "maxItems": "at most"}
    limits = [f"{word} {field[key]:,}" for key, word in words.items() if key in field]
    return f", {', '.join(limits)}" if limits else ""
