"""Tool calls are found however the text is split, and other text stays unchanged."""

import json
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import Constraint
from baton.errors import InvalidRequest
from baton.structured_output import Grammars
from baton.tokenizer import OracleTokenizer
from router.openai.schema import Function
from router.openai.tool_calls import Call, CallReader, forced_schema
from tests.integration.gateway_support import any_text
from tests.support.time_factor import scaled

NAMES = ("weather", "now")
RAIN = '{"name": "weather", "arguments": {"city": "Köln"}}'
RAIN_CALL = Call("weather", '{"city": "Köln"}')
NOW = '{"name": "now", "parameters": {}}'
NOW_CALL = Call("now", "{}")


def read(form, *pieces):
    """Read the pieces and join adjacent texts."""
    reader = CallReader(form, NAMES)
    found: list[str | Call] = []
    for part in [*(part for piece in pieces for part in reader.feed(piece)), *reader.end()]:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


NO_CALLS = [
    ("hermes", "Just text, <b>marked</b> <tool_call"),
    ("hermes", "the tag <tool_call> opens, </tool_call> closes"),
    ("hermes", f"<tool_call>{RAIN[:-1]}"),
    ("hermes", "<tool_call>{'name': 'weather', 'arguments': {}}</tool_call>"),
    ("hermes", '<tool_call>{"name": "delete", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "x"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"x": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"x": "\\ud800"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": ["now"], "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>{" + "[" * 10_000 + "]" * 10_000 + "}"),
    ("hermes", f"[TOOL_CALLS][{RAIN}]"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", f"[TOOL_CALLS][{RAIN}, 1]"),
    ("llama", f"So: {NOW}"),
    ("json", '{"answer": {"name": "now"}} and so on\n'),
    ("json", "[a list] {of} things "),
    ("json", " \n"),
    ("other", f"<tool_call>{RAIN}</tool_call>"),
]


@pytest.mark.parametrize(
    ("form", "text", "parts"),
    [
        ("hermes", f"<tool_call>\n{RAIN}\n</tool_call>", [RAIN_CALL]),
        ("hermes", f"Well.\n\n<tool_call>{RAIN}</tool_call>\n<tool_call>{NOW}</tool_call>\n",
         ["Well.", RAIN_CALL, NOW_CALL]),
        ("hermes", f"<tool_call>{RAIN}", [RAIN_CALL]),
        ("hermes", f"<tool_call>{RAIN}</tool_call> Done. ", [RAIN_CALL, "Done. "]),
        ("hermes", f"{RAIN}\n</tool_call>", [RAIN_CALL]),
        ("mistral", f"[TOOL_CALLS][{RAIN}, {NOW}]", [RAIN_CALL, NOW_CALL]),
        ("mistral", f" [{RAIN}]", [RAIN_CALL]),
        ("mistral", f"I ask. [TOOL_CALLS] [{RAIN}]", ["I ask.", RAIN_CALL]),
        ("llama", NOW, [NOW_CALL]),
        ("llama", f"<|python_tag|>{NOW}; {RAIN}", [NOW_CALL, RAIN_CALL]),
        ("llama", '{"type": "function", "name": "now", "parameters": {}}', [NOW_CALL]),
        ("json", f"\n {RAIN}", [RAIN_CALL]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "}]\\\\\\"{</tool_call>"}}</tool_call>',
         [Call("now", '{"a": "}]\\\\\\"{</tool_call>"}')]),
        ("json", '{"name": "now", "arguments": {"n": 123456789012345678901234567890}}',
         [Call("now", '{"n": 123456789012345678901234567890}')]),
        *((form, text, [text]) for form, text in NO_CALLS),
    ],
)  # fmt: skip
def test_calls_are_found_and_what_is_none_stays_text(form, text, parts):
    assert read(form, text) == parts
    assert read(form, *text) == parts, "a character at a time"


SCRAPS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "<|python_tag|>", "[", "]", "{", "}", '"', "\\", ";", ",",
     " ", "\n", "x", "ß", RAIN, NOW, RAIN[:20], f"[{NOW}]"]
)  # fmt: skip
FORMS = st.sampled_from(["hermes", "mistral", "llama", "json"])


@given(form=FORMS, scraps=st.lists(SCRAPS, max_size=12), data=st.data())
def test_cuts_change_nothing(form, scraps, data):
    text = "".join(scraps)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parts = read(form, *pieces)
    assert parts == read(form, text)
    if all(isinstance(part, str) for part in parts):
        assert "".join(parts) == text


@given(form=FORMS, arguments=st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.text()), max_size=3))
def test_arguments_come_back(form, arguments):
    [call] = read(form, *json.dumps({"name": "now", "arguments": arguments}))
    assert json.loads(call.arguments) == arguments


def test_text_is_not_held_longer_than_needed():
    reader = CallReader("hermes", NAMES)
    assert [reader.feed(piece) for piece in ("It is", " <b", "old> <tool", "_x ", "y")] == [
        ["It is"], [" <b"], ["old>"], [" <tool_x"], [" y"]
    ]  # fmt: skip


@pytest.mark.parametrize("text", [" " * 200_000 + "x", "<tool_call>{" * 20_000, '["' * 100_000, "<tool_" * 30_000])
@pytest.mark.parametrize("size", [3, 10**6])
def test_long_answers_cost_little(text, size):
    started = time.process_time()
    for form in ("hermes", "llama"):
        reader = CallReader(form, NAMES)
        for at in range(0, len(text), size):
            reader.feed(text[at : at + size])
        reader.end()
    assert time.process_time() - started < scaled(2.0)


# --- forced calls: only calls are possible, and they match the function's parameters


def closed(**properties):
    """Return a schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


STEPS = {"type": "array", "items": {"$ref": "#/properties/to"}, "maxItems": 2}
NAMED = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.org/move"}
DEFINED = {"$defs": {"Place": closed(at={"enum": ["home", "sea"]})}}
MOVE = Function(name="move", parameters=NAMED | DEFINED | closed(to={"$ref": "#/$defs/Place"}, steps=STEPS))
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
