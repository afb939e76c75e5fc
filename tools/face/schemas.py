"""Keys of the cluster file and fields of request bodies, from their JSON Schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tools.face import product

Schema = dict[str, Any]
# Keys of a schema with prose, or with their own place in a line. All other keys are limits.
SHOWN = set("$defs $ref title description default type properties required items anyOf enum const".split())
SHOWN |= {"additionalProperties", "patternProperties"}
_NONE = object()  # marks a missing default


def config() -> Iterator[str]:
    """Yield each key of the cluster file with type, limits and default."""
    yield from _lines(product.config_schema(), "")


def routes() -> Iterator[str]:
    """Yield each path of the gateway with its methods, then the fields of the bodies."""
    for route in product.routes():
        yield f"{route.path}: {', '.join(sorted(route.methods or ()))}"
    for path, schema in product.body_schemas().items():
        yield from (f"body of {path}: {line}" for line in _lines(schema, ""))


def _lines(schema: Schema, path: str) -> Iterator[str]:
    reader = _Reader(schema.get("$defs", {}))
    yield f"(all): {reader.kind(schema)}"
    yield from reader.inside(schema, path, _NONE)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reader of a schema. `defs`: the schemas that `$ref` refers to. Their class names are internal and not shown."""

    defs: dict[str, Schema]

    def inside(self, schema: Schema, path: str, default: object) -> Iterator[str]:
        """Yield a line for each key below `path`. The default of an object overrides those of its keys."""
        schema = self._resolved(schema)
        for name, value in schema.get("properties", {}).items():
            own = default[name] if isinstance(default, dict) and name in default else value.get("default", _NONE)
            at = f"{path}.{name}".lstrip(".")
            yield f"{at}: {self.kind(value)}{self._default(value, own, name in schema.get('required', ()))}"
            yield from self.inside(value, at, own)
        for part in schema.get("anyOf", ()):
            yield from self.inside(part, path, _NONE)
        if "items" in schema:
            yield from self.inside(schema["items"], f"{path}[]", _NONE)
        for pattern, value in self._patterns(schema):
            yield from self.inside(value, f"{path}.{pattern}", _NONE)

    def kind(self, schema: Schema) -> str:
        """Return the type and its limits."""
        schema = self._resolved(schema)
        limits = [f"{key} {_json(value)}" for key, value in sorted(schema.items()) if key not in SHOWN]
        return self._type(schema) + (f" ({', '.join(limits)})" if limits else "")

    def _type(self, schema: Schema) -> str:
        if "anyOf" in schema:
            outer = f"{schema['type']}: " if "type" in schema else ""
            return outer + " | ".join(map(self.kind, schema["anyOf"]))
        if "enum" in schema or "const" in schema:
            return " | ".join(map(_json, schema.get("enum", [schema.get("const")])))
        if "items" in schema:
            return f"[{self.kind(schema['items'])}]"
        patterns = [f"{pattern}: {self.kind(value)}" for pattern, value in self._patterns(schema)]
        closed = "closed " if schema.get("additionalProperties") is False else ""
        return closed + str(schema.get("type", "any")) + (f" {{{', '.join(patterns)}}}" if patterns else "")

    def _patterns(self, schema: Schema) -> list[tuple[str, Schema]]:
        rest = schema.get("additionalProperties")
        return [*schema.get("patternProperties", {}).items(), *([("*", rest)] if isinstance(rest, dict) else [])]

    def _default(self, schema: Schema, default: object, required: bool) -> str:
        if required:
            return ", required"
        has_keys = "properties" in self._resolved(schema)
        return "" if default is _NONE or has_keys else f" = {_json(default)}"

    def _resolved(self, schema: Schema) -> Schema:
        if "$ref" not in schema:
            return schema
        return self.defs[schema["$ref"].rpartition("/")[2]] | {k: v for k, v in schema.items() if k != "$ref"}


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
