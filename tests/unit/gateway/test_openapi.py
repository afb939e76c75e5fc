"""The description of the HTTP API is that of the code: its paths are served, and its fields are parsed."""

import json
import re
from typing import Any
from unittest.mock import Mock

import jsonschema
import orjson
import pytest
from starlette.requests import Request
from starlette.routing import Route
from starlette.testclient import TestClient

from baton.errors import Overloaded, WorkerLost
from router.openai.errors import HttpError
from router.openai.parsing import NEUTRAL_FIELDS, checked
from router.openai.server import BODIES, Gateway, GatewaySettings

APP = Gateway(Mock(), GatewaySettings(version="1.2")).app()
CLIENT = TestClient(APP)
SPEC = CLIENT.get("/openapi.json").json()
WITHOUT_BODY = {"/ping", "/v1/embeddings"}


def test_each_path_is_served_and_each_served_path_is_described():
    served = {route.path.replace(":path}", "}"): route.methods for route in APP.routes if isinstance(route, Route)}
    described = {path: {method.upper() for method in methods} for path, methods in SPEC["paths"].items()}
    assert described | {"/v1/models/": {"GET", "HEAD"}} == served
    operations = [one["operationId"] for methods in SPEC["paths"].values() for one in methods.values()]
    assert len(set(operations)) == len(operations)
    assert all(one["summary"] for methods in SPEC["paths"].values() for one in methods.values())
    with_body = {path for path, methods in SPEC["paths"].items() if "requestBody" in methods.get("post", {})}
    assert (
        with_body
        == set(BODIES)
        == {path for path, methods in served.items() if methods and "POST" in methods} - WITHOUT_BODY
    )
    assert SPEC["info"]["version"] == "1.2"


def test_references_and_schemas_are_valid():
    text = json.dumps(SPEC)
    schemas = SPEC["components"]["schemas"]
    assert set(re.findall(r"#/components/schemas/(\w+)", text)) <= set(schemas)
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize("kind", BODIES.values())
def test_the_fields_of_a_body_are_those_that_are_parsed(kind):
    fields = {field.alias or name for name, field in kind.model_fields.items()}
    schema = SPEC["components"]["schemas"][kind.__name__]
    assert set(schema["properties"]) == fields | set(NEUTRAL_FIELDS.get(kind, ()))
    assert schema["additionalProperties"] is False


TURN = {"role": "user", "content": [{"type": "text", "text": "x"}]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[1, 2], [3]], "stop": "x", "echo": True, "max_tokens": 0, "suffix": ""}),
        ("/v1/completions", {"prompt": ["a"], "stop": ["x"], "structured_outputs": {"json": {"type": "object"}}}),
        ("/v1/chat/completions", {"messages": [TURN], "tool_choice": "auto", "n": None, "best_of": 1}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_what_is_parsed_fits_the_description(path: str, body: dict[str, Any]):
    checked(orjson.dumps(body), BODIES[path])
    name = SPEC["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    jsonschema.validate(body, {"$ref": name, "components": SPEC["components"]})
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body | {"zzz": 1}, {"$ref": name, "components": SPEC["components"]})


def test_the_page_shows_all_and_loads_nothing_from_elsewhere():
    answer = CLIENT.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert all(path in answer.text for path in SPEC["paths"])
    fields = {field for schema in SPEC["components"]["schemas"].values() for field in schema.get("properties", ())}
    assert all(f"<code>{field}</code>" in answer.text for field in fields)
    assert set(re.findall(r'(?:href|src)="([^#"]*)"', answer.text)) == {
        "/page/docs.css",
        "/page/icon.svg",
        "/openapi.json",
    }
    assert "<script" not in answer.text
    assert CLIENT.get("/page/docs.css").status_code == 200


@pytest.mark.parametrize(
    ("error", "reasons"),
    [
        (HttpError(404, "not_found", "no such path"), ["HTTP 404 not_found"]),
        (Overloaded("full"), ["HTTP 503 overloaded"]),
        (WorkerLost("gone"), []),
        (HttpError(400, "body_incomplete", "the client disconnected", "body"), []),
        (RuntimeError("broken"), []),
    ],
)
async def test_a_failure_and_a_client_that_leaves_are_no_rejections(error: Exception, reasons: list[str]):
    found = list[str]()
    gateway = Gateway(Mock(), GatewaySettings(rejected=found.append))
    await gateway._on_exception(Request({"type": "http", "method": "POST", "path": "/tokenize"}), error)
    assert found == reasons
