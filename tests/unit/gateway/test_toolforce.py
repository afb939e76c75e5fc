"""A forced call can be nothing else, and what it can be fits the function's parameters."""

import json
import random

import pytest

from baton.constraint import Constraint
from baton.errors import InvalidRequest
from baton.grammar import Grammars
from baton.tokenizer import OracleTokenizer
from router.gateway.toolcalls import Call, CallReader
from router.gateway.toolforce import forced_schema
from router.gateway.toolschema import Function
from tests.integration.gateway_support import any_text

PLACE = {"type": "object", "properties": {"at": {"enum": ["home", "sea"]}}, "required": ["at"]} | {
    "additionalProperties": False
}
MOVE = Function(
    name="move",
    parameters={
        "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.org/move",
        "type": "object", "$defs": {"Place": PLACE}, "properties": {"to": {"$ref": "#/$defs/Place"}, "steps": {
            "type": "array", "items": {"$ref": "#/properties/to"}, "maxItems": 2}},
        "required": ["to", "steps"], "additionalProperties": False,
    },
)  # fmt: skip
STOP = Function(name="stop")


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama", "json"])
@pytest.mark.parametrize("parallel", [None, True, False])
def test_any_allowed_text_is_a_call(form, parallel, seed):
    grammars, rng = Grammars(OracleTokenizer()), random.Random(seed)
    schema = forced_schema([MOVE, STOP], form, parallel)
    counts = set[int]()
    for _ in range(12):
        text = any_text(grammars, json.dumps(schema), rng)
        reader = CallReader(form, ["move", "stop"])
        parts = [*reader.feed(text), *reader.end()]
        assert parts
        assert all(isinstance(part, Call) for part in parts), text
        for call in parts:
            check(call)
        counts.add(len(parts))
        assert ('"parameters"' in text) == (form == "llama")
    assert 1 in counts
    if parallel is not True and (parallel is False or form != "mistral"):
        assert counts == {1}


def check(call):
    arguments = json.loads(call.arguments)
    if call.name == "stop":
        assert arguments == {}
    else:
        assert {"to", "steps"} == arguments.keys()
        assert all(place in ({"at": "home"}, {"at": "sea"}) for place in [arguments["to"], *arguments["steps"]])


def test_parameters_that_are_no_schema_are_refused():
    wrong = Function(name="f", parameters={"type": "object", "properties": {"x": {"type": "whatever"}}})
    text = json.dumps(forced_schema([wrong], "json", None))
    with pytest.raises(InvalidRequest):
        Grammars(OracleTokenizer()).check(Constraint("json_schema", (text,)))
