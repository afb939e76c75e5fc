"""OpenAPI description, made of the routes and of the models that parse bodies."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import Route

Json = dict[str, Any]
_SCHEMAS = "#/components/schemas/{model}"
_TEXT: Json = {"type": "string"}
_FIELDS: Json = {"message": _TEXT, "type": _TEXT, "code": _TEXT, "param": {"type": ["string", "null"]}}
_ERROR: Json = {"type": "object", "properties": {"error": {"type": "object", "properties": _FIELDS}}}


def openapi(
    routes: Iterable[Route],
    bodies: Mapping[str, type[BaseModel]],
    neutral: Mapping[type[BaseModel], Mapping[str, Sequence[object]]],
    version: str,
) -> Json:
    """Return the OpenAPI 3.1 description. `bodies` are the bodies of paths, `neutral` the fields that a body accepts
    only with values without effect.
    """
    kinds = list(dict.fromkeys(bodies.values()))
    names, defined = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_SCHEMAS)
    schemas: Json = defined.get("$defs", {}) | {"Error": _ERROR}
    for kind in kinds:
        fields = schemas[kind.__name__]["properties"]
        fields |= {
            name: {"enum": [None, *values], "description": "No other value is supported."}
            for name, values in neutral.get(kind, {}).items()
        }
    paths: dict[str, Json] = {}
    for route in (each for each in routes if each.include_in_schema):
        reference = names[bodies[route.path], "validation"] if route.path in bodies else None
        operations = {method.lower(): _operation(route, method, reference) for method in sorted(route.methods or ())}
        paths.setdefault(route.path.replace(":path}", "}"), {}).update(operations)
    info = {"title": "Baton", "version": version or "0"}
    security = {"bearer": {"type": "http", "scheme": "bearer"}}
    components = {"schemas": schemas, "securitySchemes": security}
    return {
        "openapi": "3.1.0",
        "info": info,
        "security": [{}, {"bearer": []}],
        "paths": paths,
        "components": components,
    }


def _operation(route: Route, method: str, body: Any) -> Json:
    text = inspect.getdoc(route.endpoint) or ""
    name = re.sub(r"\W+", "_", f"{method.lower()}{route.path.replace(':path', '')}").strip("_")
    found: Json = {"operationId": name, "summary": text.split("\n\n")[0].replace("\n", " ")}
    if variables := sorted(route.param_convertors):
        given = {"in": "path", "required": True, "schema": {"type": "string"}}
        found["parameters"] = [{"name": variable, **given} for variable in variables]
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    error = {"application/json": {"schema": {"$ref": _SCHEMAS.format(model="Error")}}}
    found["responses"] = {
        "200": {"description": "the answer"},
        "default": {"description": "an error", "content": error},
    }
    return found
