"""The OpenAPI description as a page without scripts, which loads nothing from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

Json = dict[str, Any]


def page(spec: Json) -> str:
    """Return the page of a description from `spec.openapi`."""
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Baton HTTP API</title>',
        '<meta name="viewport" content="width=device-width"><link rel="icon" href="/page/icon.svg">',
        '<link rel="stylesheet" href="/page/docs.css"><body><h1>Baton HTTP API</h1>',
        '<p><a href="/openapi.json">openapi.json</a></p>',
    ]
    for path, operations in spec["paths"].items():
        for method, operation in operations.items():
            if method == "head":
                continue
            parts.append(f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation['summary'])}</p>")
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                parts.append(f"<p>Body: {_type(schema)}</p>")
    parts.append("<h1>Bodies</h1>")
    for name, schema in spec["components"]["schemas"].items():
        rows = "".join(_row(field, value, schema) for field, value in schema.get("properties", {}).items())
        parts.append(f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{escape(schema.get("description", ""))}</p>')
        parts.append(f"<table>{rows}</table>")
    return "".join(parts)


def _row(name: str, schema: Json, owner: Json) -> str:
    text = escape(schema.get("description", "required" if name in owner.get("required", ()) else ""))
    return f"<tr><td><code>{escape(name)}</code><td>{_type(schema)}<td>{text}"


def _type(schema: Json) -> str:
    """Return a schema in a few words, with links to others."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_type, schema["anyOf"]))
    if "enum" in schema:
        return escape(", ".join(map(str, schema["enum"])))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return escape(str(schema.get("const", schema.get("type", "any"))))
