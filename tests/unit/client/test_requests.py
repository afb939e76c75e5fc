"""A caller's options become a request, or an error that names the mistake."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from baton.client import ChatMessage, Options, ToolCall
from baton.client._messages import _TURN, build_message, chat_request, cluster_status, generate_request
from baton.errors import EngineFault, InvalidRequest
from baton.rpc.v1 import admin_pb2 as admin
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import inference_pb2 as inference


def test_each_option_is_a_field_of_the_wire_and_the_other_way_round():
    request = set(inference.GenerateRequest.DESCRIPTOR.fields_by_name)
    request -= {"text", "token_ids", "chat", "sampling", "constraint"}
    sampling = set(common.Sampling.DESCRIPTOR.fields_by_name)
    constraint = {"json_schema", "regex", "choices", "grammar"}
    assert set(Options.__annotations__) == request | sampling | constraint


def test_only_what_is_given_is_sent():
    request = generate_request("hello", {"temperature": 0.0, "seed": None, "n": 2, "logprobs": 0})
    sampling = common.Sampling(temperature=0.0)
    assert request == inference.GenerateRequest(text="hello", sampling=sampling, n=2, logprobs=0)
    assert request.sampling.HasField("temperature")
    assert not request.sampling.HasField("seed")
    for prompt, kind in (("", "text"), ([], "token_ids"), ((), "token_ids")):  # the server rejects these
        assert generate_request(prompt, {}).WhichOneof("prompt") == kind


def test_all_kinds_of_options():
    sampling: Options = {"stop": "END", "stop_token_ids": (3,), "logit_bias": {4: -1.0}}
    request = generate_request([1, 2], {**sampling, "model": "m", "choices": ["a", "b"]})
    assert request == inference.GenerateRequest(
        token_ids=common.TokenIds(ids=[1, 2]),
        sampling=common.Sampling(stop=["END"], stop_token_ids=[3], logit_bias={4: -1.0}),
        constraint=inference.Constraint(choices=inference.Choices(texts=["a", "b"])),
        model="m",
    )
    for schema, sent in (("{}", "{}"), ({"type": "object"}, '{"type": "object"}')):
        assert generate_request("", {"json_schema": schema}).constraint.json_schema == sent


def test_a_text_in_place_of_a_list_of_texts_is_one_of_them():
    request = generate_request("x", {"bad_words": "foo", "choices": "yes"})
    assert [*request.sampling.bad_words, *request.constraint.choices.texts] == ["foo", "yes"]


KINDS: Options = {"json_schema": {}, "regex": "", "choices": ["a"], "grammar": "x"}


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(KINDS, 2)])
def test_two_constraints_are_a_mistake(first: str, second: str):
    with pytest.raises(InvalidRequest, match=f"constraint.{second}: cannot be combined with {first}"):
        generate_request("x", {first: KINDS[first], second: KINDS[second]})  # type: ignore[misc]
    one = chat_request([], {first: KINDS[first], second: None})  # type: ignore[misc]
    assert one.constraint.HasField(first)  # type: ignore[arg-type]


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(TypeError, match="unknown option 'max_token'; did you mean 'max_tokens'"):
        generate_request("x", {"max_token": 3})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match="must be one of model, max_tokens"):
        generate_request("x", {"zzzzzz": 3})  # type: ignore[typeddict-unknown-key]


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
CALL = ToolCall("1", "now", 7)  # type: ignore[arg-type]
REQUESTS: dict[str, Callable[[Any], inference.GenerateRequest]] = {
    "options": lambda given: generate_request("x", given),
    "prompt": lambda given: generate_request(given, {}),
    "tools": lambda given: chat_request([], {}, given),
    "turn": lambda given: chat_request([given], {}),
    "call": lambda given: chat_request([{"role": "assistant", "tool_calls": [given]}], {}),
}


@pytest.mark.parametrize(
    ("what", "given", "field"),
    [
        ("options", {"max_tokens": "5"}, "sampling.max_tokens"),
        ("options", {"max_tokens": 2**31}, "sampling.max_tokens"),
        ("options", {"seed": -1}, "sampling.seed"),
        ("options", {"stop": [1]}, "sampling.stop"),
        ("options", {"logit_bias": {-1: 1.0}}, "sampling.logit_bias"),
        ("options", {"n": -1}, "n"),
        ("options", {"choices": [1]}, "constraint.choices.texts"),
        ("options", {"regex": 1}, "constraint.regex"),
        ("options", {"json_schema": {"enum": {1, 2}}}, "constraint.json_schema"),
        ("options", {"json_schema": 1}, "constraint.json_schema"),
        ("prompt", "\ud800", "prompt.text"),
        ("prompt", [-1], "prompt.token_ids"),
        ("prompt", [2**32], "prompt.token_ids"),
        ("tools", [{"x": {1}}], "prompt.chat.tools"),
        ("turn", {"role": "user", "content": 1}, "prompt.chat[0].content"),
        ("turn", {"role": "user", "content": [IMAGE]}, "prompt.chat[0].content"),
        ("turn", {"role": "user", "content": ["x"]}, "prompt.chat[0].content"),
        ("turn", {"role": "user", "content": [{"type": "text", "text": 1}]}, "prompt.chat[0].content"),
        ("turn", {"role": "user", "content": "x", "name": 1}, "prompt.chat[0].name"),
        ("turn", "hello", "prompt.chat[0]"),
        ("turn", {"content": "x"}, "prompt.chat[0].role"),
        ("turn", {"role": "user"}, "prompt.chat[0].content"),
        ("call", "x", "prompt.chat[0].tool_calls[0]"),
        ("call", {"id": "1"}, "prompt.chat[0].tool_calls[0].function"),
        ("call", {"function": {"name": "now", "arguments": "{}"}}, "prompt.chat[0].tool_calls[0].id"),
        ("call", {"id": "1", "function": "now"}, "prompt.chat[0].tool_calls[0].function"),
        ("call", {"id": "1", "function": {"name": "now"}}, "prompt.chat[0].tool_calls[0].function.arguments"),
        ("turn", ChatMessage("assistant", "", [CALL]), "prompt.chat[0].tool_calls"),
        ("turn", ChatMessage("tool", "", tool_call_id=7), "prompt.chat[0].tool_call_id"),  # type: ignore[arg-type]
    ],
)
def test_what_the_wire_cannot_carry_is_named_but_not_shown(what: str, given: Any, field: str):
    with pytest.raises(InvalidRequest) as caught:
        REQUESTS[what](given)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert what != "prompt" or str(given) not in str(caught.value)


@pytest.mark.parametrize("given", ["[]", {"role": "user", "content": "x"}])
def test_messages_and_tools_are_lists(given: Any):
    for name, messages, tools in (("messages", given, ()), ("tools", [], given)):
        with pytest.raises(TypeError, match=f"{name} must be a list, not {type(given).__name__}"):
            chat_request(messages, {}, tools)


def test_chat_takes_messages_and_mappings():
    request = chat_request([ChatMessage("system", "be kind"), {"role": "user", "content": "hi"}], {"max_tokens": 3})
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("system", "be kind"), ("user", "hi")]
    assert request.sampling.max_tokens == 3
    assert chat_request([], {}).WhichOneof("prompt") == "chat"
    with pytest.raises(TypeError, match="unknown field 'tool_cals' of a message; must be one of role, content"):
        chat_request([{"role": "user", "content": "", "tool_cals": [], "refusal": None}], {})


def test_chat_takes_all_fields_of_the_wire_and_text_parts():
    parts = [{"type": "text", "text": "be"}, {"type": "text", "text": "kind", "cache_control": None}]
    said = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    request = chat_request([{"role": "developer", "content": parts, "name": "Ann"}, said], {})
    assert list(request.chat.messages) == [
        inference.ChatMessage(role="developer", content="be\nkind", name="Ann"),
        inference.ChatMessage(role="assistant", content="yes", reasoning="hm"),
    ]
    [again] = chat_request([{"role": "assistant", "content": "yes", "reasoning": "hm"}], {}).chat.messages
    assert again == request.chat.messages[1]
    wire = {field.name for field in inference.ChatMessage.DESCRIPTOR.fields}
    assert {*_TURN} == wire | {"reasoning_content"}


def test_chat_takes_tools_and_calls_of_them():
    tool = {"type": "function", "function": {"name": "now", "parameters": {"enum": [None]}}}
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    mappings: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
    ]
    same = [ChatMessage("assistant", "", [ToolCall("1", "now", "{}")]), ChatMessage("tool", "noon", tool_call_id="1")]
    sent_call = inference.ToolCall(id="1", name="now", arguments="{}")
    for messages in (mappings, same):
        request = chat_request(messages, {}, [tool])
        assert json.loads(request.chat.tools) == [tool]
        assert list(request.chat.messages) == [
            inference.ChatMessage(role="assistant", tool_calls=[sent_call]),
            inference.ChatMessage(role="tool", content="noon", tool_call_id="1"),
        ]
    assert not chat_request(same, {}).chat.HasField("tools")


def test_tokenizing_names_what_is_wrong():
    request = build_message(inference.DetokenizeRequest, "ids", ids=[1, 2], model="m")
    assert (list(request.ids), request.model) == ([1, 2], "m")
    with pytest.raises(InvalidRequest, match="text"):
        build_message(inference.TokenizeRequest, "text", text="\udcff")
    with pytest.raises(InvalidRequest, match="ids"):
        build_message(inference.DetokenizeRequest, "ids", ids=[-1])
    for prompt in (b"abc", bytearray(b"abc")):
        with pytest.raises(TypeError, match="text or token ids, not byte"):
            generate_request(prompt, {})


def test_a_status_that_is_not_valid_is_the_fault_of_the_server():
    with pytest.raises(EngineFault, match=r"info\.role"):
        cluster_status(admin.StatusReply(workers=[admin.WorkerStatus()]))
