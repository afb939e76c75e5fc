"""Anthropic's Messages API over the job of chat."""

import json
from typing import Any

import pytest

from baton.errors import NoWorker, Overloaded
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from router.openai.messages_api.chat import field_names
from router.openai.messages_api.schema import MessagesBody
from tests.integration.gateway_support import LENGTH, completed, spoken, tokens
from tests.integration.test_gateway_tools import CALL

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "Now.", "input_schema": SCHEMA}
ASK: dict[str, Any] = {"model": "org/tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "hello"}]}
SAID = f"<think>hm</think>Let me.\n<tool_call>{CALL}</tool_call>"
ACCEPTED = {"accepted": pb.Accepted(prompt_tokens=3)}
USE = {"type": "tool_use", "name": "weather", "input": {"city": "Köln"}}
STOPPED = {"finished": pb.Finished(reason=common_pb2.FINISH_REASON_STOP_STRING, matched_stop="!")}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "rain"}]}


@pytest.fixture
async def gateway(gateway):
    gateway.fake.reasoning_form, gateway.fake.tool_form = "think", "hermes"
    return gateway


async def post(gateway, body, path="/v1/messages", **headers):
    status, found, data = await gateway.raw("POST", path, json.dumps(body).encode(), **headers)
    return status, found, data


async def answer(gateway, **more):
    status, _, data = await post(gateway, {**ASK, **more})
    assert status == 200, data
    return json.loads(data)


async def events(gateway, **more):
    """Return the data of all events, after a check that each has its name."""
    status, _, data = await post(gateway, {**ASK, "stream": True, **more}, connection="close")
    assert status == 200, data
    found = []
    for block in data.decode().split("event: ")[1:]:
        name, _, rest = block.partition("\n")
        found.append(json.loads(rest.split("data: ", 1)[1].split("\n\n")[0]))
        assert found[-1]["type"] == name
    return found


def assembled(found):
    """Return the message that the events make, as a client does."""
    assert [each["type"] for each in (found[0], found[1], found[-2], found[-1])] == [
        "message_start", "ping", "message_delta", "message_stop"
    ]  # fmt: skip
    message, inputs = found[0]["message"], dict[int, str]()
    for event in found[2:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            kind = delta.pop("type").removesuffix("_delta")
            if kind == "input_json":
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                block["input"] = json.loads(inputs[event["index"]] if inputs[event["index"]].endswith("}") else "{}")
            else:
                block[kind] += delta[kind]
    return message | found[-2]["delta"] | {"usage": found[-2]["usage"]}


@pytest.mark.parametrize("size", [1, 5, 1000])
async def test_thoughts_text_and_calls(gateway, size):
    gateway.plays(ACCEPTED, *spoken(SAID, size=size)[:-1], {"completed": pb.Completed(usage=pb.Usage(
        prompt_tokens=3, cached_tokens=2, completion_tokens=9))})  # fmt: skip
    message = await answer(gateway, tools=[TOOL])
    thought, text, use = message["content"]
    assert (thought["type"], thought["thinking"], thought["signature"]) == ("thinking", "hm", "unsigned")
    assert text == {"type": "text", "text": "Let me."}
    assert use == USE | {"id": use["id"]}
    assert (message["type"], message["role"], message["id"], message["stop_reason"]) == (
        "message", "assistant", "msg_r1", "tool_use"
    )  # fmt: skip
    counts = {"input_tokens": 1, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 0, "output_tokens": 9}
    assert message["usage"] == counts
    found = await events(gateway, tools=[TOOL])
    assert found[0]["message"]["usage"]["input_tokens"] == 3
    assert assembled(found) == message


@pytest.mark.parametrize(
    ("steps", "reason", "stop"),
    [
        (spoken("Hi"), "end_turn", None),
        (spoken("Hi", LENGTH), "max_tokens", None),
        ([tokens(0, 0, [1], "Hi"), STOPPED, completed()], "stop_sequence", "!"),
        (spoken(f"<tool_call>{CALL[:-4]}", LENGTH), "max_tokens", None),
        ([*spoken(f"<tool_call>{CALL[:-4]}")[:-2], STOPPED, completed()], "stop_sequence", "!"),
    ],
)  # fmt: skip
async def test_why_an_answer_ended(gateway, steps, reason, stop):
    gateway.plays(ACCEPTED, *steps)
    message = await answer(gateway, stop_sequences=["!"], tools=[TOOL])
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
    assert list(gateway.fake.requests[0].sampling.stop) == ["!"]
    assert assembled(await events(gateway, stop_sequences=["!"], tools=[TOOL])) == message


async def test_the_conversation_is_that_of_chat(gateway):
    cached = {"cache_control": {"type": "ephemeral"}}
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "See."},
        USE | {"id": "1"},
    ]
    turns = [*ASK["messages"], {"role": "assistant", "content": blocks},
             {"role": "user", "content": [RESULT, {"type": "text", "text": "and?", **cached}]}]  # fmt: skip
    await answer(
        gateway, messages=turns, system=[{"type": "text", "text": "Be brief", **cached}], tools=[TOOL | cached],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True}, metadata={"user_id": "x"}, top_k=5,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )  # fmt: skip
    (request,) = gateway.fake.requests
    system, user, said, result, more = request.chat.messages
    assert [(each.role, each.content) for each in (system, user, said, result, more)] == [
        ("system", "Be brief"), ("user", "hello"), ("assistant", "See."), ("tool", "rain"), ("user", "and?")
    ]  # fmt: skip
    assert (said.reasoning, said.tool_calls[0].name, said.tool_calls[0].arguments) == (
        "hm",
        "weather",
        '{"city":"Köln"}',
    )
    assert (result.tool_call_id, result.name) == ("1", "weather")
    assert json.loads(request.chat.tools)[0]["function"] == {
        "name": "weather", "description": "Now.", "parameters": SCHEMA
    }  # fmt: skip
    assert (request.sampling.max_tokens, request.sampling.top_k) == (20, 5)


@pytest.mark.parametrize("role", ["user", "assistant"])
async def test_an_answer_continues_its_given_beginning(gateway, role):
    turns = [*ASK["messages"], {"role": role, "content": "So"}]
    await answer(gateway, messages=turns)
    status, _, _ = await post(gateway, {"messages": turns}, "/v1/messages/count_tokens")
    assert status == 200
    chats = [gateway.fake.requests[0].chat, gateway.fake.tokenized[0].chat]
    assert [chat.continue_final_message for chat in chats] == [role == "assistant"] * 2
    assert [chat.messages[-1].content for chat in chats] == ["So" if role == "assistant" else "hello\nSo"] * 2


async def test_consecutive_turns_of_one_role_are_one(gateway):
    """An error names the turn that the message begins with."""
    call = {"role": "assistant", "content": [USE | {"id": "1"}]}
    turns = [*ASK["messages"], {"role": "user", "content": "more"}, {"role": "assistant", "content": "Let me."}, call,
             {"role": "user", "content": [RESULT]}, {"role": "user", "content": "and?"}]  # fmt: skip
    await answer(gateway, messages=turns, tools=[TOOL], cache_control={"type": "ephemeral"})
    messages = gateway.fake.requests[0].chat.messages
    assert [(each.role, each.content) for each in messages] == [
        ("user", "hello\nmore"), ("assistant", "Let me."), ("tool", "rain"), ("user", "and?")
    ]  # fmt: skip
    assert messages[1].tool_calls[0].name == "weather"
    names = field_names(MessagesBody.model_validate(ASK | {"messages": turns}))
    places = [names[f"messages[{number}]"] for number in range(4)]
    assert places == ["messages[0]", "messages[2]", "messages[4]", "messages[4]"]


async def test_a_call_before_a_given_beginning_needs_its_result(gateway):
    turns = [*ASK["messages"], {"role": "assistant", "content": [USE | {"id": "1"}]},
             {"role": "assistant", "content": "Sure, "}]  # fmt: skip
    status, _, data = await post(gateway, ASK | {"messages": turns})
    assert (status, b"the last one must not have a tool_use" in data) == (400, True)


@pytest.mark.parametrize("step", [ACCEPTED, NoWorker("none")])
async def test_an_answer_has_the_id_of_its_request_under_anthropics_name(gateway, step):
    gateway.plays(step, *spoken("Hi"))
    _, headers, _ = await post(gateway, ASK)
    assert headers["request-id"] == headers["x-request-id"] == "r1"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_a_call_can_be_forced(gateway, choice):
    gateway.plays(ACCEPTED, *spoken(CALL))
    message = await answer(gateway, tools=[TOOL], tool_choice=choice)
    assert [block["type"] for block in message["content"]] == ["tool_use"]
    assert json.loads(gateway.fake.requests[0].constraint.json_schema)["properties"]["name"] == {"const": "weather"}


async def test_text_can_have_a_schema(gateway):
    await answer(gateway, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert json.loads(gateway.fake.requests[0].constraint.json_schema) == SCHEMA


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_tokens": None}, "max_tokens: must be an integer, got null"),
        ({"messages": []}, "messages: must not be empty"),
        (
            {"messages": [5], "stream": "yes"},
            "messages[0]: must be an object, got 5; stream: must be true or false, got a",
        ),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type: is required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: must be a list, got 5"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: must be 1 to 128 of the characters"),
        ({"tools": [TOOL, {"name": "f", "input_schema": {"type": "null"}}]}, "tools[1].input_schema: must be a JSON"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].tool_use_id: must be the id"),
        ({"messages": [{"role": "user", "content": [USE | {"id": "1"}]}]}, "tool_use is not allowed with role user"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type: must be one of 'text', 'thinking', 'tool_use', 'tool_result'",
        ),
        ({"messages": [{"role": "assistant", "content": [USE | {"id": "1"}]}]}, "must not have a tool_use"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [TOOL]}, "must name one of tools: weather"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: must be 'custom'"),
        ({"container": "x"}, "container: unknown field"),
    ],
    ids=str,
)
async def test_mistakes_are_named(gateway, wrong, words):
    status, _, data = await post(gateway, ASK | wrong)
    error = json.loads(data)
    assert (status, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert words in error["error"]["message"]
    assert not gateway.fake.requests


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(Overloaded("full", 2.0), 529, "overloaded_error"), (NoWorker("gone"), 503, "api_error")],
)
async def test_errors_have_the_form_of_the_api(gateway, error, status, kind):
    gateway.plays(error)
    found, headers, data = await post(gateway, ASK)
    assert (found, json.loads(data)["error"]["type"]) == (status, kind)
    assert headers["x-should-retry"] == "true"
    gateway.plays(ACCEPTED, tokens(0, 0, [1], "Hi"), error)
    last = (await events(gateway))[-1]
    assert (last["type"], last["error"]["type"]) == ("error", kind)
    found, _, data = await gateway.raw("GET", "/v1/messages")
    assert (found, json.loads(data)["type"]) == (405, "error")


@pytest.mark.parametrize(
    ("headers", "status", "kind"),
    [
        ({"sec_fetch_site": "cross-site"}, 403, "permission_error"),
        ({"x_long": "x" * 20_000}, 431, "invalid_request_error"),
    ],
    ids=["page", "headers"],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_errors_before_the_path_is_looked_up_have_the_form_of_the_api_too(gateway, path, headers, status, kind):
    found, _, data = await post(gateway, ASK, path, **headers)
    error = json.loads(data)
    assert (found, error["type"], error["error"]["type"]) == (status, "error", kind)
    _, _, data = await post(gateway, ASK, "/v1/chat/completions", **headers)
    assert "code" in json.loads(data)["error"], "that of OpenAI"


async def test_the_key_is_the_token(gateway):
    await post(gateway, ASK, x_api_key="secret")
    assert gateway.fake.metadata["authorization"] == "Bearer secret"


async def test_tokens_of_a_prompt_are_counted(gateway):
    body = {name: value for name, value in ASK.items() if name != "max_tokens"} | {
        "system": "Be brief",
        "tools": [TOOL],
    }
    status, _, data = await post(gateway, body, "/v1/messages/count_tokens")
    assert (status, json.loads(data)) == (200, {"input_tokens": 3})
    chat = gateway.fake.tokenized[0].chat
    assert ([each.content for each in chat.messages], bool(chat.tools)) == (["Be brief", "hello"], True)


async def test_the_client_of_anthropic(gateway):
    anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")
    gateway.plays(ACCEPTED, *spoken(SAID))
    client = anthropic.AsyncAnthropic(base_url=f"http://{gateway.address}", api_key="k", max_retries=0)
    done = await client.messages.create(**ASK, tools=[TOOL])
    assert [block.type for block in done.content] == ["thinking", "text", "tool_use"]
    async with client.messages.stream(**ASK, tools=[TOOL]) as stream:
        final = await stream.get_final_message()
    assert [(block.type, getattr(block, "input", None)) for block in final.content] == [
        (block.type, getattr(block, "input", None)) for block in done.content
    ]
    results = [{"type": "tool_result", "tool_use_id": done.content[-1].id, "content": "rain"}]
    said = [block.model_dump(exclude_none=True) for block in done.content]
    turns = [*ASK["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": results}]
    await client.messages.create(**ASK | {"messages": turns})
    assert [each.role for each in gateway.fake.requests[-1].chat.messages] == ["user", "assistant", "tool"]
    gateway.plays(Overloaded("full", 2.0))
    with pytest.raises(anthropic.InternalServerError, match="overloaded_error"):
        await client.messages.create(**ASK)
    await client.close()
