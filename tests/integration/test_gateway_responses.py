"""OpenAI's Responses API over the job of chat, with the `openai` package."""

import json
from typing import Any

import openai
import pydantic
import pytest

from baton.errors import Overloaded
from baton.rpc.v1 import inference_pb2 as pb
from tests.integration.gateway_support import LENGTH, refused, spoken, tokens
from tests.integration.test_gateway_tools import CALL

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "x"}
TOOL = {"type": "function", "name": "weather", "description": "Now.", "parameters": SCHEMA, "strict": False}
SAID = f"<think>hm</think>Let me.\n<tool_call>{CALL}</tool_call>"
ACCEPTED = {"accepted": pb.Accepted(prompt_tokens=3)}
PART = {"type": "input_text", "text": "hello"}


@pytest.fixture
async def gateway(gateway):
    gateway.fake.reasoning_form, gateway.fake.tool_form = "think", "hermes"
    return gateway


async def ask(gateway, input: Any = "hello", **more) -> Any:
    return await gateway.client.responses.create(model="org/tiny", input=input, **more)


async def events(gateway, **more) -> list[Any]:
    found = [event async for event in await ask(gateway, stream=True, **more)]
    assert [event.sequence_number for event in found] == [*range(len(found))]
    return found


def without_status(output):
    return [item.model_dump(exclude={"status"}, exclude_none=True) for item in output]


@pytest.mark.parametrize("size", [1, 5, 1000])
async def test_reasoning_text_and_calls(gateway, size):
    usage = pb.Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=9)
    gateway.plays(ACCEPTED, *spoken(SAID, size=size)[:-1], {"completed": pb.Completed(usage=usage)})
    done = await ask(gateway, tools=[TOOL], instructions="Be brief", metadata={"a": "b"})
    thought, message, call = done.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")
    assert (message.type, message.role, done.output_text) == ("message", "assistant", "Let me.")
    assert (call.type, call.name, call.arguments, call.call_id[:5]) == (
        "function_call", "weather", '{"city": "Köln"}', "call_"
    )  # fmt: skip
    assert (done.id, done.status, done.error, done.instructions, done.metadata) == (
        "resp_r1", "completed", None, "Be brief", {"a": "b"}
    )  # fmt: skip
    assert done.tools[0].name == "weather"
    assert (done.usage.input_tokens, done.usage.input_tokens_details.cached_tokens) == (3, 2)
    assert (done.usage.output_tokens, done.usage.total_tokens) == (9, 12)
    found = await events(gateway, tools=[TOOL])
    last = found[-1].response
    assert (last.status, without_status(last.output), last.usage) == (
        "completed",
        without_status(done.output),
        done.usage,
    )


async def test_events_have_the_order_of_openai(gateway):
    gateway.plays(ACCEPTED, *spoken(SAID, size=1000))
    found = await events(gateway, tools=[TOOL])
    item, part = "response.output_item", "response.content_part"
    thought = [f"response.reasoning_text.{each}" for each in ("delta", "done")]
    text = [f"response.output_text.{each}" for each in ("delta", "done")]
    call = [f"response.function_call_arguments.{each}" for each in ("delta", "done")]
    assert [event.type for event in found] == [
        "response.created", "response.in_progress",
        f"{item}.added", f"{part}.added", *thought, f"{part}.done", f"{item}.done",
        f"{item}.added", f"{part}.added", *text, f"{part}.done", f"{item}.done",
        f"{item}.added", *call, f"{item}.done", "response.completed",
    ]  # fmt: skip
    assert [event.output_index for event in found if event.type == f"{item}.added"] == [0, 1, 2]
    assert (found[0].response.status, found[0].response.output, found[2].item.status) == (
        "in_progress",
        [],
        "in_progress",
    )
    assert (found[9].part.text, found[10].delta, found[11].text) == ("", "Let me.", "Let me.")
    assert (found[14].item.arguments, found[15].delta, found[16].arguments) == ("", *['{"city": "Köln"}'] * 2)


async def test_an_answer_that_is_cut_is_incomplete(gateway):
    gateway.plays(ACCEPTED, *spoken(f"<tool_call>{CALL[:-4]}", LENGTH))
    done = await ask(gateway, tools=[TOOL], max_output_tokens=7)
    assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (done.output[0].status, done.output[0].arguments) == ("incomplete", '{"city": "Köl')
    assert gateway.fake.requests[0].sampling.max_tokens == 7
    last = (await events(gateway, tools=[TOOL]))[-1]
    assert (last.type, without_status(last.response.output)) == ("response.incomplete", without_status(done.output))


async def test_items_are_the_messages_of_chat(gateway):
    gateway.plays(ACCEPTED, *spoken(SAID))
    first = await ask(gateway, tools=[TOOL])
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "rain"}
    said = [item.model_dump(exclude_none=True) for item in first.output]
    turns = [{"role": "user", "content": [PART]}, *said, result, {"type": "message", "role": "user", "content": "and?"}]
    await ask(gateway, turns, instructions="Be brief", tools=[TOOL], store=False, reasoning={"effort": "low"},
              include=["reasoning.encrypted_content"], extra_body={"top_k": 5})  # fmt: skip
    request = gateway.fake.requests[1]
    assert [(each.role, each.content) for each in request.chat.messages] == [
        ("system", "Be brief"), ("user", "hello"), ("assistant", "Let me."), ("tool", "rain"), ("user", "and?")
    ]  # fmt: skip
    answered = request.chat.messages[2]
    assert [call.arguments for call in answered.tool_calls] == ['{"city": "Köln"}']
    assert (request.sampling.top_k, request.chat.reasoning_effort) == (5, "low")
    assert json.loads(request.chat.tools)[0]["function"]["parameters"] == SCHEMA


async def test_calls_follow_their_reasoning(gateway):
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    output = {"type": "function_call_output", "output": [PART]}
    turns = [{"role": "user", "content": "x"}, thought, call, call | {"call_id": "2"}, output | {"call_id": "1"},
             output | {"call_id": "2"}]  # fmt: skip
    await ask(gateway, turns)
    _, said, *results = gateway.fake.requests[0].chat.messages
    assert (said.reasoning, [each.id for each in said.tool_calls]) == ("hm", ["1", "2"])
    assert [(each.tool_call_id, each.content) for each in results] == [("1", "hello"), ("2", "hello")]


class City(pydantic.BaseModel):
    """A city."""

    city: str


async def test_text_and_calls_can_have_a_schema(gateway):
    gateway.plays(ACCEPTED, *spoken('{"city": "Köln"}'))
    done = await gateway.client.responses.parse(model="org/tiny", input="x", text_format=City)
    assert done.output_parsed == City(city="Köln")
    assert json.loads(gateway.fake.requests[0].constraint.json_schema)["properties"].keys() == {"city"}
    gateway.plays(ACCEPTED, *spoken(CALL))
    for choice in ("required", {"type": "function", "name": "weather"}):
        [call] = (await ask(gateway, tools=[TOOL], tool_choice=choice)).output
        assert (call.type, call.name) == ("function_call", "weather")
        schema = json.loads(gateway.fake.requests[-1].constraint.json_schema)
        assert schema["properties"]["name"] == {"const": "weather"}


@pytest.mark.parametrize(
    ("wrong", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
        ({"conversation": "c"}, "conversation", "stores no responses"),
        ({"background": True}, "background", "must be false"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "'message', 'function_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "input_text"),
        (
            {"input": [RESULT]},
            "input[0].call_id",
            "earlier",
        ),
        (
            {"instructions": "x", "input": [{"role": "user", "content": "y"}, RESULT]},
            "input[1].call_id",
            "earlier",
        ),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format", "not allowed with other types"),
        ({"text": {"format": {"type": "text", "schema": SCHEMA}}}, "text.format", "not allowed with other types"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be 'function'"),
        ({"tool_choice": "required"}, "tool_choice", "only allowed with tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "must be"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "must be"),
        ({"max_tokens": 3}, "max_tokens", "did you mean max_output_tokens"),
    ],
    ids=str,
)
async def test_mistakes_are_named(gateway, wrong, param, words):
    found = await refused(openai.BadRequestError, ask(gateway, extra_body=wrong))
    assert found.param.startswith(param), found
    assert words in found.message
    assert not gateway.fake.requests


async def test_errors_of_the_router(gateway):
    gateway.plays(Overloaded("full", 2.0))
    found = await refused(openai.InternalServerError, ask(gateway))
    assert (found.status_code, found.code) == (503, "overloaded")
    gateway.plays(ACCEPTED, tokens(0, 0, [1], "Hi"), Overloaded("full", 2.0))
    last = (await events(gateway))[-1]
    assert (last.type, last.code) == ("error", "overloaded")


async def test_embeddings_are_refused_with_what_they_would_need(gateway):
    asked = gateway.client.embeddings.create(model="org/tiny", input="x")
    found = await refused(openai.APIStatusError, asked, "a checkpoint that was trained for them")
    assert (found.status_code, found.code) == (501, "unsupported")
