"""Tools over HTTP, with the `openai` package: requests to the router, and calls parsed from the model's text."""

import asyncio
import json
import random
import re
from typing import Any

import openai
import pydantic
import pytest

from baton.structured_output import Grammars
from baton.tokenizer import OracleTokenizer
from tests.integration.gateway_support import EOS, HELLO, LENGTH, alone, any_text, asking, refused, spoken, tokens


def function(name: str, **fields: Any) -> dict[str, Any]:
    """Return a function as a tool, or the choice of it."""
    return {"type": "function", "function": {"name": name, **fields}}


def called(name: str, arguments: str) -> dict[str, Any]:
    """Return an earlier call of a function, as a client sends it back."""
    return {"id": "1", **function(name, arguments=arguments)}


PARAMETERS = {
    "type": "object", "$defs": {"Unit": {"enum": ["C", "F"]}}, "additionalProperties": False,
    "properties": {"city": {"enum": ["Rome", "Köln"]}, "unit": {"$ref": "#/$defs/Unit"}, "day": {"const": None}},
    "required": ["city", "unit"],
}  # fmt: skip
WEATHER, NOW = function("weather", description="Now.", parameters=PARAMETERS), function("now")
NO_JSON = {**HELLO[0], "tool_calls": [called("x", "[")]}
CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
CUT = '<tool_call>{"name": "weather", "arguments": {"city'
UNKNOWN = '<tool_call>{"name": "delete_all", "arguments": {}}</tool_call>'
SAID = f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"


@pytest.fixture
async def gateway(gateway):
    gateway.fake.tool_form = "hermes"
    return gateway


@pytest.fixture
async def routed(make):
    """A real router. Its model has a plain template."""
    cluster = await make(http="127.0.0.1:0")
    async with asking(cluster.router.http) as made:
        yield made


async def chat(gateway, messages=HELLO, tools=(WEATHER, NOW), **options):
    return await gateway.chat(messages, tools=list(tools), **options)


async def choice_of(gateway, **options):
    (choice,) = (await chat(gateway, **options)).choices
    return choice


async def streamed(gateway, **options):
    """Assemble the chunks of one choice as clients do. Return its content, calls and finish reason."""
    content, reason = "", None
    calls: list[list[str]] = []
    async for chunk in await chat(gateway, stream=True, **options):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert (call.index, call.type, call.id[:5]) == (len(calls), "function", "call_")
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
    return content, [tuple(call) for call in calls], reason


async def test_tools_reach_the_template(gateway):
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    await chat(gateway, tools=[strict, NOW], tool_choice="auto", parallel_tool_calls=True)
    (request,) = gateway.fake.requests
    now = function("now", parameters={"type": "object", "properties": {}})
    assert json.loads(request.chat.tools) == [WEATHER, now], "what is not given stays out, null within a schema stays"
    assert not request.HasField("constraint")


async def test_no_choice_is_no_tools(gateway):
    gateway.plays(*spoken(SAID))
    choice = await choice_of(gateway, tool_choice="none")
    assert not gateway.fake.requests[0].chat.HasField("tools")
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (SAID, None, "stop")


async def test_results_are_sent_back(gateway):
    gateway.plays(*spoken(SAID))
    asked = (await choice_of(gateway)).message
    first, second = asked.tool_calls
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in (first, second)]
    await chat(gateway, [*HELLO, asked.model_dump(), *results])
    _, said, result, _ = gateway.fake.requests[1].chat.messages
    assert (said.role, said.content) == ("assistant", "Let me see.")
    sent = [(call.id, call.name, json.loads(call.arguments)) for call in said.tool_calls]
    assert sent == [(call.id, "weather", {"city": "Köln"}) for call in (first, second)]
    assert (result.role, result.content, result.tool_call_id) == ("tool", "rain", first.id)
    assert (result.name, said.HasField("name")) == ("weather", False), "some templates want the function's name"


@pytest.mark.parametrize("helper", ["parse", "stream", "swarm"])
async def test_messages_of_helpers_are_sent_back(gateway, helper):
    """The openai package keeps what it parsed in its messages, and Swarm adds names."""
    tool = openai.pydantic_function_tool(Weather)
    gateway.plays(*spoken(SAID.replace('"weather"', '"Weather"')))
    asked: dict[str, Any] = {"model": "m", "messages": HELLO, "tools": [tool]}
    if helper == "stream":
        async with gateway.client.chat.completions.stream(**asked) as stream:
            message = (await stream.get_final_completion()).choices[0].message.model_dump()
        assert [call["index"] for call in message["tool_calls"]] == [0, 1]
    else:
        message = (await gateway.client.chat.completions.parse(**asked)).choices[0].message.model_dump()
    assert {"parsed"} < message.keys()
    assert message["tool_calls"][0]["function"]["parsed_arguments"] == {"city": "Köln"}
    more = {"sender": "Agent", "tool_name": "Weather"} if helper == "swarm" else {}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in message["tool_calls"]]
    message["parsed"] = {"city": "Köln"}
    await chat(gateway, [*HELLO, message | more, *(result | more for result in results)], tools=[tool])
    _, said, *_ = gateway.fake.requests[1].chat.messages
    assert [(call.name, call.arguments) for call in said.tool_calls] == [("Weather", '{"city": "Köln"}')] * 2


async def test_calls_need_no_words(gateway):
    for content in ({}, {"content": None}, {"content": ""}):
        await chat(gateway, [*HELLO, {"role": "assistant", "tool_calls": [called("now", "")], **content}])
    assert [request.chat.messages[1].content for request in gateway.fake.requests] == [""] * 3


@pytest.mark.parametrize(
    ("wrong", "param", "says"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "must be 'function'"),
        ({"tools": [function("a b")]}, "tools[0].function.name", "1 to 128"),
        ({"tools": [function("x", paramters={})]}, "tools[0].function.paramters", "did you mean parameters"),
        ({"tools": [function("x", parameters={"type": "string"})]}, "tools[0].function.parameters", "of type object"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name", "must be unique"),
        ({"tools": [NOW] * 129}, "tools", "at most 128"),
        ({"tool_choice": "any"}, "tool_choice", "none, auto, required"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "none, auto, required"),
        ({"tool_choice": function("x")}, "tool_choice", "one of tools: weather, now"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "only allowed with tools"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "role tool"),
        ({"messages": [{**HELLO[0], "tool_call_id": "1"}]}, "messages[0].tool_call_id", "role tool"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id", "earlier"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content", "required"),
        ({"messages": [{**HELLO[0], "tool_calls": [called("x", "{}")]}]}, "messages[0].tool_calls", "role assistant"),
        ({"messages": [NO_JSON]}, "messages[0].tool_calls[0].function.arguments", "JSON object"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_wrong_tools(gateway, wrong, param, says):
    found = await refused(openai.BadRequestError, chat(gateway, extra_body=wrong), re.escape(says))
    assert (found.param, gateway.fake.requests) == (param, [])


async def test_a_template_without_tools(routed):
    for choice in ("auto", "required"):
        asked = chat(routed, tool_choice=choice)
        found = await refused(openai.BadRequestError, asked, "chat template does not support tools")
        assert (found.param, found.code) == ("tools", "invalid_value")
    messages = [*HELLO, {"role": "assistant", "tool_calls": [called("now", "{}")]}]
    asked = chat(routed, messages, tool_choice="none")
    found = await refused(openai.BadRequestError, asked, "does not support tool calls")
    assert found.param == "messages[1].tool_calls"
    assert (await chat(routed, tool_choice="none", max_tokens=2)).usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("text", "reason", "options", "content", "count", "shown"),
    [
        (SAID, EOS, {}, "Let me see.", 2, "tool_calls"),
        (SAID, EOS, {"parallel_tool_calls": False}, "Let me see.", 1, "tool_calls"),
        (SAID + CUT, LENGTH, {}, "Let me see.", 3, "length"),
        ("It rains.", EOS, {}, "It rains.", 0, "stop"),
        (UNKNOWN, EOS, {}, UNKNOWN, 0, "stop"),
        (CUT, LENGTH, {}, None, 1, "length"),
        (SAID.removesuffix("ol_call>"), LENGTH, {}, "Let me see.", 2, "length"),
    ],
    ids=["two", "one at a time", "two and a part", "none", "unknown function", "a part", "a part of a mark"],
)
async def test_calls(gateway, text, reason, options, content, count, shown):
    gateway.plays(*spoken(text, reason))
    choice = await choice_of(gateway, **options)
    calls = choice.message.tool_calls or []
    assert (choice.message.content, choice.finish_reason) == (content, shown)
    found = [(call.type, call.function.name, call.function.arguments) for call in calls]
    whole = count - (CUT in text)
    wanted = [("weather", '{"city": "Köln"}')] * whole + [("weather", '{"city')] * (count - whole)
    assert found == [("function", *each) for each in wanted]
    assert len({call.id for call in calls}) == count
    for size in (1, 7, 1000):
        gateway.plays(*spoken(text, reason, size))
        assert await streamed(gateway, **options) == (content or "", wanted, shown)


async def test_calls_of_each_choice(gateway):
    gateway.plays(*spoken(SAID, choices=2))
    done = await chat(gateway, n=2)
    assert [len(choice.message.tool_calls) for choice in done.choices] == [2, 2]
    found = {0: 0, 1: 0}
    async for chunk in await chat(gateway, n=2, stream=True):
        found[chunk.choices[0].index] += sum(call.id is not None for call in chunk.choices[0].delta.tool_calls or ())
    assert found == {0: 2, 1: 2}


async def test_text_and_arguments_are_not_held_back(gateway):
    held = [asyncio.Event() for _ in range(2)]

    async def script(request):
        yield tokens(0, 0, [1], "Let me see.<tool")
        await held[0].wait()
        yield tokens(0, 1, [1], f"_call>{CALL[:-4]}")
        await held[1].wait()
        for step in [tokens(0, 2, [1], f"{CALL[-4:]}</tool_call>"), *spoken("")]:
            yield step

    gateway.fake.script = script
    chunks = await chat(gateway, stream=True)
    first = [(await anext(chunks)).choices[0].delta.content for _ in range(2)]
    assert first == ["", "Let me see."]
    held[0].set()
    [call] = (await anext(chunks)).choices[0].delta.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Köl')
    held[1].set()
    rest = [chunk.choices[0] async for chunk in chunks]
    assert [each.delta.tool_calls and each.delta.tool_calls[0].function.arguments for each in rest] == ['n"}', None]
    assert [each.finish_reason for each in rest] == [None, "tool_calls"]


async def test_logprobs_of_calls(gateway):
    texts, entry = ("<tool_call>", CALL[:9], CALL[9:]), [{"logprob": -0.5}]
    gateway.plays(*(tokens(0, number, [1], text, entry) for number, text in enumerate(texts)), *spoken(""))
    choice = await choice_of(gateway, logprobs=True)
    assert [entry.token for entry in choice.logprobs.content] == [" dog"] * 3
    seen = [chunk.choices[0] async for chunk in await chat(gateway, logprobs=True, stream=True)]
    assert [len(choice.logprobs.content) for choice in seen if choice.logprobs] == [1, 1, 1]
    assert sum(bool(choice.delta.tool_calls) for choice in seen) == 1


async def test_a_long_call_keeps_the_connection():
    """Nothing is sent before the function is clear. Comments keep the connection alive for proxies."""
    async with alone(keep_alive_s=0.0) as gateway:
        gateway.fake.tool_form = "hermes"
        gateway.plays(*spoken(f"<tool_call>{CALL}", size=10))
        body = {"messages": HELLO, "tools": [WEATHER], "stream": True}
        _, _, data = await gateway.raw("POST", "/v1/chat/completions", json.dumps(body).encode())
        assert data.count(b": waiting\n") >= 3
        assert data.index(b": waiting") < data.index(b'"tool_calls"')


class Weather(pydantic.BaseModel):
    """How the weather is in a city."""

    city: str


async def test_the_helpers_of_the_client(gateway):
    gateway.plays(*spoken(SAID.replace('"weather"', '"Weather"')))
    asked: dict[str, Any] = {"model": "m", "messages": HELLO, "tools": [openai.pydantic_function_tool(Weather)]}
    done = await gateway.client.chat.completions.parse(**asked)
    assert [call.function.parsed_arguments for call in done.choices[0].message.tool_calls] == [Weather(city="Köln")] * 2
    async with gateway.client.chat.completions.stream(**asked) as stream:
        kinds = [event.type async for event in stream]
        message = (await stream.get_final_completion()).choices[0].message
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert (message.content, message.tool_calls[1].function.parsed_arguments) == ("Let me see.", Weather(city="Köln"))
    (tool,) = json.loads(gateway.fake.requests[0].chat.tools)
    assert tool["function"]["parameters"]["required"] == ["city"]
    assert "strict" not in tool["function"]


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama", "json"])
@pytest.mark.parametrize("choice", ["required", function("weather")])
async def test_forced_calls(gateway, form, choice, seed):
    """A model without preferences, constrained by the worker's grammar, makes only valid calls."""
    grammars, rng = Grammars(OracleTokenizer()), random.Random(seed)

    async def script(request):
        text = any_text(grammars, request.constraint.json_schema, rng)
        for step in spoken(text):
            yield step

    gateway.fake.tool_form, gateway.fake.script = form, script
    names, wanted = set[str](), {"weather", "now"} if choice == "required" else {"weather"}
    for _ in range(64):
        told = await choice_of(gateway, tool_choice=choice)
        assert (told.message.content, told.finish_reason) == (None, "tool_calls")
        for call in told.message.tool_calls:
            names.add(call.function.name)
            assert re.fullmatch("[a-z0-9]{9}" if form == "mistral" else "call_[a-z0-9]{24}", call.id)
            arguments = json.loads(call.function.arguments)
            assert not arguments if call.function.name == "now" else arguments["city"] in ("Rome", "Köln")
            assert call.function.name == "now" or arguments["unit"] in ("C", "F")
        if names == wanted:
            break
    assert names == wanted
    offered = json.loads(gateway.fake.requests[0].chat.tools)
    assert [tool["function"]["name"] for tool in offered] == ["weather", "now"], "also those that it must not call"


REPLY = {
    "type": "object", "$id": "https://reply", "$defs": {"Mood": {"enum": ["good", "bad"]}},
    "properties": {"mood": {"$ref": "#/$defs/Mood"}}, "required": ["mood"], "additionalProperties": False,
}  # fmt: skip


def joined_calls(chunks):
    """Return name and arguments of each call of a stream."""
    found = dict[int, list[str]]()
    for call in (call for chunk in chunks for call in chunk.delta.tool_calls or ()):
        name, arguments = found.setdefault(call.index, ["", ""])
        found[call.index] = [name + (call.function.name or ""), arguments + (call.function.arguments or "")]
    return [tuple(each) for each in found.values()]


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama", "json"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_optional_call_or_text_in_the_format(gateway, form, streamed, seed):
    """A model without preferences writes both, and each is valid."""
    grammars, rng = Grammars(OracleTokenizer()), random.Random(seed)

    async def script(request):
        for step in spoken(any_text(grammars, request.constraint.json_schema, rng)):
            yield step

    gateway.fake.tool_form, gateway.fake.script = form, script
    asked = {"tools": [WEATHER, NOW], "response_format": {"type": "json_schema", "json_schema": {"schema": REPLY}}}
    kinds = set[str]()
    for _ in range(200):
        if streamed:
            chunks = [chunk.choices[0] for chunk in await gateway.streamed("chat", **asked)]
            text = "".join(chunk.delta.content or "" for chunk in chunks)
            calls, reason = joined_calls(chunks), chunks[-1].finish_reason
        else:
            told = (await gateway.chat(**asked)).choices[0]
            calls = [(call.function.name, call.function.arguments) for call in told.message.tool_calls or []]
            text, reason = told.message.content, told.finish_reason
        kinds |= {name for name, _ in calls} or {"text"}
        if calls:
            assert (text or "", reason) == ("", "tool_calls")
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
        else:
            assert reason == "stop"
            assert json.loads(text)["mood"] in ("good", "bad")
        if len(kinds) == 3:
            break
    assert kinds == {"text", "weather", "now"}


async def test_a_forced_call_counts_before_a_format(gateway):
    gateway.plays(*spoken(CALL))
    await chat(gateway, tool_choice="required", response_format={"type": "json_object"})
    schema = json.loads(gateway.fake.requests[0].constraint.json_schema)
    assert [call["properties"]["name"]["const"] for call in schema["anyOf"]] == ["weather", "now"]


async def test_several_forced_calls(gateway):
    gateway.plays(*spoken(f"[{CALL}, {CALL}]"))
    choice = await choice_of(gateway, tool_choice="required", parallel_tool_calls=True)
    assert len(choice.message.tool_calls) == 2
    assert json.loads(gateway.fake.requests[0].constraint.json_schema)["type"] == "array"


async def test_a_schema_that_cannot_be_enforced(routed):
    """Constraints are checked before the template is read."""
    wrong = function("f", parameters={"properties": {"x": {"type": "odd"}}})
    asked = chat(routed, tools=[wrong], tool_choice="required")
    assert (await refused(openai.BadRequestError, asked)).param == "tools"
