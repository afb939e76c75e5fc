"""Reasoning and tool calls are found however the text is split, and other text stays unchanged."""

import json
import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import Constraint
from baton.errors import InvalidRequest
from baton.structured_output import Grammars
from baton.tokenizer import OracleTokenizer
from router.openai.choices import ChatFormat, Reading
from router.openai.formats.answer import reader_of, whole
from router.openai.formats.forced import forced_schema
from router.openai.formats.text import Arguments, Call, Reasoning, Source
from router.openai.schema import Function
from router.parsing.model_forms import TOOL_FORMS
from tests.integration.gateway_support import any_text
from tests.support.time_factor import scaled

PLACE = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "dry": {}}}
TEXT: dict[str, Any] = {"type": "string"}
OPTIONAL: dict[str, Any] = {"anyOf": [TEXT, {"type": "null"}]}
TOOLS: dict[str, dict[str, Any]] = {
    "weather": PLACE,
    "write": {"properties": {"text": OPTIONAL, "mode": {"enum": ["w", None]}}},
    "now": {},
    "null": {"properties": None},
    "list": {"properties": []},
}
RAIN = '{"name": "weather", "arguments": {"city": "Köln"}}'
NOW = '{"name": "now", "parameters": {}}'
CITY, RAINS, NOWS = '{"city": "Köln"}', ("weather", '{"city": "Köln"}'), ("now", "{}")
DRAFT = 'Maybe: <tool_call>\n{"name": "weather", "arguments": {"city": "draft"}}\n</tool_call> no, ask first'
BEGIN, END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
THINKS = {"qwen": ("think", "hermes"), "glm": ("think", "glm"), "deepseek": ("think", "deepseek"),
          "magistral": ("magistral", "mistral"), "granite": ("granite", "granite"), "harmony": ("harmony", "harmony"),
          "opened": ("think", "hermes")}  # fmt: skip


def read(form, *pieces, tools=TOOLS, cut=False):
    """Return the reasoning, content and calls. `form` is one of calls, or of a model in THINKS."""
    reasoning, calls = THINKS.get(form, ("", form))
    reader = reader_of(reasoning, calls, tools, opened=form == "opened")
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.end(cut=cut)
    found = whole(parts)
    return found.reasoning, found.content, [(call.name, arguments) for call, arguments in found.calls]


# form, text, content, calls, reasoning
TEXTS = [
    ("hermes", f"<tool_call>\n{RAIN}\n</tool_call>", "", [RAINS]),
    ("hermes", f"Well.\n\n<tool_call>{RAIN}</tool_call>\n<tool_call>{NOW}</tool_call>\n", "Well.", [RAINS, NOWS]),
    ("hermes", f"<tool_call>{RAIN}", "", [RAINS]),
    ("hermes", f"<TOOLCALL>[{RAIN}, {NOW}]</TOOLCALL>", "", [RAINS, NOWS]),
    ("hermes", f"Ok <tool_calls>[{RAIN}]</tool_calls>", "Ok", [RAINS]),
    ("hermes", f"<tool_call>{RAIN}\n</to", "", [RAINS]),  # cut inside a closing mark
    ("hermes", f"<tool_call>{RAIN}</tool_call>\n<tool_c", "", [RAINS]),
    ("hermes", f"<tool_call>{RAIN[:-4]}", "", [("weather", '{"city": "Köl')]),  # cut inside arguments
    ("hermes", f"<tool_call>{RAIN}</tool_call> Done.", "Done.", [RAINS]),
    ("hermes", f"{RAIN}\n</tool_call>", "", [RAINS]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [NOWS]),  # without arguments
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [NOWS]),
    ("hermes", '<tool_call>{"arguments": {"city": "Köln"}, "name": "weather"}</tool_call>', "", [RAINS]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Köln\\"}"}</tool_call>', "", [RAINS]),
    ("hermes", f"<tool_call>{RAIN}</tool_call><tool_call>{{'name': 'now'}}</tool_call>",
     "<tool_call>{'name': 'now'}</tool_call>", [RAINS]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "}]\\\\\\"{</tool_call>"}}</tool_call>', "",
     [("now", '{"a": "}]\\\\\\"{</tool_call>"}')]),
    ("mistral", f"[TOOL_CALLS][{RAIN}, {NOW}]", "", [RAINS, NOWS]),
    ("mistral", f" [{RAIN}]", "", [RAINS]),
    ("mistral", f"I ask. [TOOL_CALLS] [{RAIN}]", "I ask.", [RAINS]),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{CITY}[TOOL_CALLS]now[ARGS]{{}}", "", [RAINS, NOWS]),
    ("mistral", f"Ok[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{CITY}", "Ok", [RAINS]),
    ("mistral", f"[TOOL_CALLS]weather{CITY}", "", [RAINS]),
    ("llama", NOW, "", [NOWS]),
    ("llama", f"<|python_tag|>{NOW}; {RAIN}", "", [NOWS, RAINS]),
    ("llama", f"{NOW}, {RAIN}", "", [NOWS, RAINS]),
    ("llama", '{"type": "function", "name": "now", "parameters": {}}', "", [NOWS]),
    ("json", f"\n {RAIN}", "", [RAINS]),
    ("json", '{"name": "now", "arguments": {"n": 123456789012345678901234567890}}', "",
     [("now", '{"n": 123456789012345678901234567890}')]),
    ("deepseek", f"Hm<｜tool▁calls▁begin｜>{BEGIN}function{SEP}weather\n```json\n{CITY}\n```{END}\n"
     f"{BEGIN}function{SEP}now\n```json\n{{}}\n```{END}<｜tool▁calls▁end｜>", "Hm", [RAINS, NOWS], ""),
    ("deepseek", f"<think>Hm</think><｜tool▁calls▁begin｜>{BEGIN}weather{SEP}{CITY}{END}{BEGIN}now{SEP}{{}}{END}"
     "<｜tool▁calls▁end｜>", "", [RAINS, NOWS], "Hm"),
    ("kimi", f"Ok<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{CITY}"
     "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
     "<|tool_calls_section_end|>", "Ok", [RAINS, NOWS]),
    ("qwen3_coder", "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
     "<parameter=days>\n3\n</parameter>\n<parameter=dry>\nTrue\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
     "<function=now>\n</function>\n</tool_call>", "I look.",
     [("weather", '{"city": "Köln", "days": 3, "dry": true}'), NOWS]),
    ("qwen3_coder", '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Köln</parameter>\n</invoke>\n'
     '<invoke name="now">\n</invoke>\n</minimax:tool_call>', "", [RAINS, NOWS]),
    ("qwen3_coder", "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>", "", [NOWS]),
    ("qwen3_coder", '<function=weather>\n<parameter=city>\n 3 "a"\n\n</parameter></function>', "",
     [("weather", '{"city": " 3 \\"a\\"\\n"}')]),
    ("glm", "<think>Hm</think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
     "<arg_key>dry</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call><tool_call>now</tool_call>", "",
     [("weather", '{"city": "Köln", "dry": [1]}'), NOWS], "Hm"),
    ("qwen3_coder", "<tool_call><function=weather><parameter=days>1</parameter></tool_call>\n<tool_call><function=now>"
     "\n</tool_call>", "", [("weather", '{"days": 1}'), NOWS]),  # without </function>
    ("qwen3_coder", "<function=weather><parameter=days>1</parameter>\n<para", "", [("weather", '{"days": 1}')]),
    ("qwen3_coder", "<function=weather><parameter=days>1</parameter>\n</fun", "", [("weather", '{"days": 1}')]),
    ("glm", "<tool_call>weather<arg_key>days</arg_key><arg_value>1</arg_value>\nDone.", "Done.",
     [("weather", '{"days": 1}')]),
    ("glm", "<tool_call>weather<arg_key>days</arg_key><arg_value>1</arg_value><arg_k", "",
     [("weather", '{"days": 1}')]),
    ("glm", "<tool_call>null<arg_key>a</arg_key><arg_value>1</arg_value></tool_call><tool_call>list<arg_key>a</arg_key>"
     "<arg_value>x</arg_value></tool_call>", "", [("null", '{"a": 1}'), ("list", '{"a": "x"}')]),
    ("pythonic", "[weather(city='K(ö, \"ln', days=-3), now()]", "",
     [("weather", '{"city": "K(ö, \\"ln", "days": -3}'), NOWS]),
    ("pythonic", "[now(a=1e999, b=2)]", "", [("now", '{"a": "1e999", "b": 2}')]),
    ("pythonic", "[now(1, a==2, b=, c=x + 1, from='y', 'd=1')]", "", [("now", '{"b": "", "c": "x + 1", "from": "y"}')]),
    ("pythonic", "[now(a=true, b=[null, {'c': false}], d='null', true='x')]", "",
     [("now", '{"a": true, "b": [null, {"c": false}], "d": "null", "true": "x"}')]),
    ("pythonic", "[now(a='x\n  y\\n', b=[\n1,\r\n\"\r\"], c='''p\nq''')]", "",
     [("now", '{"a": "x\\n  y\\n", "b": [1, "\\r"], "c": "p\\nq"}')]),
    ("qwen3_coder", "<function=write>\n<parameter=mode>\nw\n<parameter=text>\nx\n</function>\n<function=write>\n"
     "<parameter=text>\ny\n\n<parameter=mode>\nnull\n</function>", "",
     [("write", '{"mode": "w", "text": "x"}'), ("write", '{"text": "y\\n", "mode": null}')]),  # without </parameter>
    ("pythonic", f"<|python_start|>[now()]<|python_end|>{NOW}", "", [NOWS, NOWS]),
    ("pythonic", "<|tool_call_start|>[now()]<|tool_call_end|>Wait.", "Wait.", [NOWS]),
    ("granite", f"<|tool_call|>[{RAIN}, {NOW}]", "", [RAINS, NOWS]),
    ("granite", "Here is my thought process: a <tool_call> b.\nHere is my response: c", "c", [], "a <tool_call> b."),
    ("harmony", f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
     f"<|constrain|>json<|message|>{CITY}<|call|>", "", [RAINS], "Hm."),
    ("harmony", f"<|channel|>analysis<|message|>to=functions.now {NOW}<|end|><|start|>assistant<|channel|>final"
     "<|message|>Hi.", "Hi.", [], f"to=functions.now {NOW}"),
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now<|channel|>"
     "commentary json<|message|>{}", "I look.", [NOWS], ""),
    ("harmony", RAIN, "", [RAINS], ""),
    ("harmony", "<|channel|>final<|message|>The sign is <", "The sign is <", [], ""),
    ("harmony", "<|channel|>final<|message|>if a:\n    b = 1\n", "if a:\n    b = 1\n", [], ""),
    ("harmony", "<|channel|>commentary to=functions.now<|message|>{}<|start|>assistant<|channel|>final<|message|>Hi",
     "Hi", [NOWS], ""),
    ("qwen", f"<think>\n{DRAFT}\n</think>\n\nWhich city?", "Which city?", [], DRAFT),
    ("qwen", f"<think>{DRAFT}</think>Sure.\n<tool_call>{RAIN}</tool_call>", "Sure.", [RAINS], DRAFT),
    ("qwen", f"<think>{DRAFT} </thi", "", [], DRAFT),
    ("qwen", f"Hi, the tag <think> opens it.\n<think>{RAIN}</think>\nDone",
     "Hi, the tag <think> opens it.Done", [], RAIN),
    ("opened", f"{DRAFT}\n</think>\n\n{RAIN}", "", [RAINS], DRAFT),
    ("opened", f"\n<think>\n{DRAFT}</think>Hi", "Hi", [], DRAFT),  # repeats the mark of the prompt
    ("opened", "<th", "", [], "<th"),
    ("opened", "only a thought", "", [], "only a thought"),
    ("magistral", f"[THINK]Hm [TOOL_CALLS][{RAIN}] \n[/THINK]I ask.[TOOL_CALLS]now[ARGS]{{}}", "I ask.", [NOWS],
     f"Hm [TOOL_CALLS][{RAIN}]"),
]  # fmt: skip
CALLS_BEGIN = f"<｜tool▁calls▁begin｜>{BEGIN}"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
DAYS = "<function=weather><parameter=days>1"
TO_WEATHER = "<|channel|>commentary to=functions.weather"


@pytest.mark.parametrize(
    ("form", "text", "ended", "cut"),
    [
        ("mistral", "[TOOL_CALLS]weather[ARGS]", [("weather", "{}")], [("weather", "")]),
        ("kimi", f"{KIMI}<|tool_call_argument_begin|>", [("weather", "{}")], [("weather", "")]),
        ("kimi", KIMI, [("weather", "{}")], []),
        ("deepseek", f"{CALLS_BEGIN}weather{SEP}", [("weather", "{}")], [("weather", "")]),
        ("deepseek", f"{CALLS_BEGIN}weather", [("weather", "{}")], []),
        ("deepseek", f"{CALLS_BEGIN}weather{SEP}{END}", [("weather", "{}")], [("weather", "{}")]),
        ("harmony", f"{TO_WEATHER}<|message|>", [("weather", "{}")], [("weather", "")]),
        ("harmony", TO_WEATHER, [("weather", "{}")], []),
        ("qwen3_coder", f"{DAYS}</parameter>\n<para", [("weather", '{"days": 1}')], [("weather", '{"days": 1')]),
        ("qwen3_coder", f"{DAYS}\n</par", [("weather", '{"days": 1}')], [("weather", '{"days": 1')]),
        ("qwen3_coder", "<function=weather>\n<parameter=city>\nK\n", [("weather", '{"city": "K"}')],
         [("weather", '{"city": "K')]),
        ("qwen3_coder", "<function=weather>\n", [("weather", "{}")], [("weather", "")]),
        ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>K</arg_v", [("weather", '{"city": "K"}')],
         [("weather", '{"city": "K')]),
        ("glm", "<tool_call>weather<arg_key>days</arg_key><arg_value>1</arg_value><arg_k",
         [("weather", '{"days": 1}')], [("weather", '{"days": 1')]),
        ("glm", "<tool_call>weather", [("weather", "{}")], []),
        ("glm", "<tool_call>weather\n", [("weather", "{}")], [("weather", "")]),
        ("pythonic", "[weather(days=1, city='K", [("weather", '{"days": 1, "city": "\'K"}')],
         [("weather", '{"days": 1')]),
        ("pythonic", "[weather(", [("weather", "{}")], [("weather", "")]),
    ],
)  # fmt: skip
def test_a_call_that_was_cut_looks_cut(form, text, ended, cut):
    """Otherwise a client could run the function without arguments, or another one whose name begins so. The arguments
    of an answer that ended are whole JSON.
    """
    assert read(form, text)[2] == ended
    assert read(form, text, cut=True)[2] == cut
    assert read(form, *text, cut=True)[2] == cut


OPEN = "<function=weather>\n<parameter=city>\nrm -rf /srv"
STOPPED = [
    ("qwen3_coder", f"<tool_call>{OPEN}", "/tmp", '{"city": "rm -rf /srv', "stop"),
    ("qwen3_coder", f"<tool_call>{OPEN}\n", "</parameter>", '{"city": "rm -rf /srv', "stop"),
    ("qwen3_coder", f"<tool_call>{OPEN}\n</parameter>\n", "\n</function>", '{"city": "rm -rf /srv"}', "tool_calls"),
    ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>K", "!", '{"city": "K', "stop"),
    ("glm", "<tool_call>weather<arg_key>days</arg_key><arg_value>1</arg_value>", "</tool_call>", '{"days": 1}',
     "tool_calls"),
    ("pythonic", "[weather(days=1, city='K", "!", '{"days": 1', "stop"),
    ("mistral", "[TOOL_CALLS]weather[ARGS]", "{", "", "stop"),
    ("deepseek", f"{CALLS_BEGIN}weather{SEP}", "{", "", "stop"),
    ("kimi", f"{KIMI}<|tool_call_argument_begin|>", "{", "", "stop"),
    ("harmony", f"{TO_WEATHER}<|message|>", "{", "", "stop"),
    ("hermes", f"<tool_call>{RAIN[:-4]}", "!", '{"city": "Köl', "stop"),
    ("hermes", f"<tool_call>{RAIN}</tool_call>", "\n\n", CITY, "tool_calls"),
    ("hermes", f"<tool_call>{RAIN}\n", "</tool_call>", CITY, "tool_calls"),
]  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("form", "text", "stop", "arguments", "reason"), STOPPED)
def test_a_call_that_a_stop_string_cut_looks_cut(form, text, stop, arguments, reason, streamed):
    reasoning, form = THINKS.get(form, ("", form))
    found = ChatFormat(Reading(reasoning, form, TOOLS))
    if streamed:
        deltas = [each for char in text for each in found.piece(0, char, None)]
        found.stopped(0, stop)
        deltas += found.ending(0, "stop")
        calls, shown = [call for each in deltas for call in each["delta"].get("tool_calls", ())], deltas[-1]
    else:
        found.read(0, text)
        found.stopped(0, stop)
        shown = found.choice(0, text, None, "stop")
        calls = shown["message"]["tool_calls"]
    assert "".join(call["function"]["arguments"] for call in calls) == arguments
    assert shown["finish_reason"] == reason


NOT_JSON = {"if": "    return x", "number": "12345", "null": None, "nulls": " null", "lines": "\na\n", "list": "[1]"}


@pytest.mark.parametrize("form", ["qwen3_coder", "glm"])
@pytest.mark.parametrize(
    "shape",
    [
        OPTIONAL,
        {"type": ["string", "null"]},
        {"oneOf": [{"enum": ["a", None]}, {"allOf": [{"maxLength": 9}, TEXT]}]},
    ],
)
def test_a_text_that_may_be_null_stays_a_text(form, shape):
    tools = {"f": {"properties": dict.fromkeys(NOT_JSON, shape)}}
    assert json.loads(written(form, tools)) == NOT_JSON


@pytest.mark.parametrize("form", ["qwen3_coder", "glm"])
@pytest.mark.parametrize(
    "shape", [{}, {"anyOf": [TEXT, {"$ref": "#"}]}, {"type": ["string", "number"]}, {"type": [{}]}]
)
def test_a_value_of_another_type_is_json_or_its_text(form, shape):
    tools = {"f": {"properties": dict.fromkeys(NOT_JSON, shape)}}
    assert json.loads(written(form, tools)) == NOT_JSON | {"number": 12345, "nulls": None, "list": [1]}


def written(form, tools):
    """Return the arguments of a call with the values of NOT_JSON."""
    begin, between, end = (
        ("<parameter=", ">", "</parameter>")
        if form == "qwen3_coder"
        else ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
    )
    values = {key: "null" if value is None else value for key, value in NOT_JSON.items()}
    fields = "".join(f"{begin}{key}{between}\n{value}\n{end}\n" for key, value in values.items())
    text = f"<function=f>\n{fields}</function>" if form == "qwen3_coder" else f"<tool_call>f\n{fields}</tool_call>"
    [(name, arguments)] = read(form, text, tools=tools)[2]
    assert read(form, *text, tools=tools)[2] == [(name, arguments)]
    return arguments


NO_CALLS = [
    ("hermes", "Just text, <b>marked</b> <tool_call"),
    ("hermes", "the tag <tool_call> opens, </tool_call> closes"),
    ("hermes", '<tool_call>{"name": "wea'),
    ("hermes", "<tool_call>{'name': 'weather', 'arguments': {}}</tool_call>"),
    ("hermes", '<tool_call>{"name": "delete", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "x"}</tool_call>'),
    ("hermes", '<tool_call>{"name": ["now"], "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>{" + "[" * 10_000 + "]" * 10_000 + "}"),
    ("hermes", f"[TOOL_CALLS][{RAIN}]"),
    ("mistral", "[TOOL_CALLS] []"),
    ("mistral", "[TOOL_CALLS]delete[ARGS]{}"),
    ("llama", f"So: {NOW}"),
    ("json", '{"answer": {"name": "now"}} and so on\n'),
    ("json", '{"name": "now"}'),
    ("json", "[a list] {of} things "),
    ("json", " \n"),
    ("other", f"<tool_call>{RAIN}</tool_call>"),
    ("glm", "<tool_call>delete</tool_call>"),
    ("qwen3_coder", "<function=delete></function>"),
    ("pythonic", "[delete(x=1)] [1]"),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.delete:0<|tool_call_argument_begin|>{}"),
    ("deepseek", f"<｜tool▁calls▁begin｜>{BEGIN}delete{SEP}{{}}{END}"),
]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls", "reasoning"),
    [*((*each, "")[:5] for each in TEXTS), *((form, text, text, [], "") for form, text in NO_CALLS)],
)
def test_texts_are_read_alike_however_they_are_cut(form, text, content, calls, reasoning):
    assert read(form, text) == (reasoning, content, calls)
    assert read(form, *text) == (reasoning, content, calls), "a character at a time"
    for at in range(len(text)) if len(text) < 1000 else ():
        assert read(form, text[:at], text[at:]) == (reasoning, content, calls), (text[:at], text[at:])


SCRAPS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "<|python_tag|>", "[", "]", "{", "}", '"', "\\", ";", ",",
     " ", "\n", "x", "ß", RAIN, NOW, RAIN[:20], f"[{NOW}]", "<think>", "</think>", "<function=now>", "</function>",
     "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "now", "(", "a=", "'", ")", BEGIN,
     SEP, END, "<｜tool▁calls▁begin｜>", "<|channel|>", "<|message|>", "<|end|>", "analysis", "to=functions.now",
     "[ARGS]"]
)  # fmt: skip
FORMS = st.sampled_from([*TOOL_FORMS, *THINKS])


@given(form=FORMS, scraps=st.lists(SCRAPS, max_size=12), data=st.data())
def test_cuts_change_nothing(form, scraps, data):
    text = "".join(scraps)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = read(form, *pieces)
    assert found == read(form, text)
    if form in {"hermes", "mistral", "llama", "json"} and not found[2]:
        assert found[1] == text


@pytest.mark.slow
@given(form=FORMS, arguments=st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.text()), max_size=3))
def test_arguments_come_back(form, arguments):
    if form == "opened":
        return
    _, _, [(name, found)] = read(form, *json.dumps({"name": "now", "arguments": arguments}))
    assert (name, json.loads(found)) == ("now", arguments)


def test_parts_come_as_soon_as_they_are_certain():
    reader = reader_of("think", "hermes", TOOLS)
    pieces = ("<thi", "nk>\nHm", "m \n", "</think>", "It is", " <b", "old> <tool", "_x ", "y\n<tool_call>", RAIN[:9],
              RAIN[9:34], RAIN[34:42], RAIN[42:])  # fmt: skip
    assert [reader.feed(piece) for piece in pieces] == [
        [], [Reasoning("Hm")], [Reasoning("m")], [], ["It is"], [" <b"], ["old>"], [" <tool_x"], [" y"], [],
        [Call("weather"), Arguments("{")], [Arguments('"city": ')], [Arguments('"Köln"}')],
    ]  # fmt: skip


@pytest.mark.parametrize(("form", "given_id"), [("mistral", "abc123def"), ("kimi", "functions.weather:0")])
def test_ids_that_the_model_wrote_are_kept(form, given_id):
    text = next(str(text) for known, text, *_ in TEXTS if known == form and given_id in text)
    reader = reader_of("", form, TOOLS)
    assert Call("weather", given_id) in reader.feed(text)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("part", "times"), [(" ", 200_000), ("<tool_call>{", 20_000), ('["', 100_000), ("<tool_", 30_000)]
)
@pytest.mark.parametrize("size", [3, 10**6])
def test_long_answers_cost_little(part, times, size):
    text = part * times + "x"
    started = time.process_time()
    for form in ("hermes", "llama"):
        reader = reader_of("think", form, TOOLS)
        for at in range(0, len(text), size):
            reader.feed(text[at : at + size])
        reader.end()
    assert time.process_time() - started < scaled(3.0)


@pytest.mark.parametrize("mark", ["<tool_call>", '<tool_call>{"a":['])
@pytest.mark.parametrize("form", ["glm", "hermes"])
def test_calls_without_end_are_read_twice_at_most(monkeypatch, mark, form):
    """After 64 KiB of failed attempts, marks are text."""
    sizes, take = list[int](), Source.take

    def counted(self, size):
        sizes.append(size)
        return take(self, size)

    monkeypatch.setattr(Source, "take", counted)
    text = mark * 7_000 + f"<tool_call>{RAIN}</tool_call>"
    pieces = [text[at : at + 1000] for at in range(0, len(text), 1000)]
    assert read(form, *pieces)[1:] == (text, [])
    assert sum(sizes) < 3 * (len(text) + 65_536)


# --- forced calls: only calls are possible, and they match the function's parameters


def closed(**properties):
    """Return a schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


STEPS = {"type": "array", "items": {"$ref": "#/properties/to"}, "maxItems": 2}
NAMED = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.org/move"}
DEFINED = {"$defs": {"Place": closed(at={"enum": ["home", "sea"]})}}
MOVE = Function(name="move", parameters=NAMED | DEFINED | closed(to={"$ref": "#/$defs/Place"}, steps=STEPS))
STOP = Function(name="stop")


@pytest.mark.parametrize("form", TOOL_FORMS)
@pytest.mark.parametrize("parallel", [None, True, False])
def test_any_allowed_text_is_a_call(form, parallel, seed):
    grammars, rng = Grammars(OracleTokenizer()), random.Random(seed)
    schema = forced_schema([MOVE, STOP], form, parallel)
    counts = set[int]()
    for _ in range(12):
        text = any_text(grammars, json.dumps(schema), rng)
        _, content, calls = read(form, text, tools={"move": {}, "stop": {}})
        assert calls
        assert not content
        for call in calls:
            check(*call)
        counts.add(len(calls))
        assert ('"parameters"' in text) == (form == "llama")
    assert 1 in counts
    if parallel is not True and (parallel is False or form != "mistral"):
        assert counts == {1}


def check(name, text):
    arguments = json.loads(text)
    if name == "stop":
        assert arguments == {}
    else:
        assert {"to", "steps"} == arguments.keys()
        assert all(place in ({"at": "home"}, {"at": "sea"}) for place in [arguments["to"], *arguments["steps"]])


def test_parameters_that_are_no_schema_are_refused():
    wrong = Function(name="f", parameters={"type": "object", "properties": {"x": {"type": "whatever"}}})
    text = json.dumps(forced_schema([wrong], "json", None))
    with pytest.raises(InvalidRequest):
        Grammars(OracleTokenizer()).check(Constraint("json_schema", (text,)))
