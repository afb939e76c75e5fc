"""OpenAI's API without a server: bodies, errors, their documentation, and the measured times.

Bodies are read, or rejected by name. For any body, tests/fuzzing/requests.py checks that. Each of Baton's errors has a
status, a body and headers. docs/reference/openai.md has each accepted field, each rejected field and each error code.
"""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest

from baton.errors import TOO_LONG, BatonError, InvalidRequest, NoWorker, Overloaded, Unauthenticated, Violation
from baton.metrics import Metrics
from baton.rpc.status import CODES
from baton.rpc.v1 import common_pb2
from baton.testing import FakeClock
from router.openai import errors, parsing
from router.openai.job import chat_job, completion_job, tokenize_call
from router.openai.messages_api.chat import messages_job
from router.openai.messages_api.schema import MessagesBody
from router.openai.parsing import checked
from router.openai.responses import RequestMetrics
from router.openai.responses_api.chat import responses_job
from router.openai.responses_api.schema import ResponsesBody
from router.openai.schema import ChatBody, CompletionBody, StreamOptions, TokenizeBody
from tests.fuzzing.common import outcome
from tests.support.time_factor import scaled

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs/reference/openai.md").read_text()


def read(**fields):
    return checked(orjson.dumps({"prompt": "x", **fields}), CompletionBody)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (CompletionBody, {"prompt": {"s3cret": 1}}),
        (CompletionBody, {"prompt": "x", "stop": [["s3cret"]]}),
        (CompletionBody, {"prompt": "x", "user": ["s3cret"]}),
        (ChatBody, {"messages": "s3cret"}),
        (ChatBody, {"messages": [{"role": "s3cret", "content": "s3cret"}]}),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "text", "text": ["s3cret"]}]}]}),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "s3cret"}]}]}),
        (ChatBody, {"messages": [{"role": "user", "content": "x", "name": ["s3cret"]}]}),
        (CompletionBody, {"prompt": "x", "structured_outputs": {"regex": "s3cret", "choice": ["s3cret"]}}),
        (MessagesBody, {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "s3cret"}]}]}),
        (MessagesBody, {"max_tokens": 1, "messages": [{"role": "user", "content": {"s3cret": 1}}]}),
        (ResponsesBody, {"input": [{"type": "s3cret"}]}),
        (ResponsesBody, {"input": [{"role": "user", "content": [{"type": "s3cret", "text": "s3cret"}]}]}),
    ],
)
def test_what_was_written_is_not_repeated(kind, wrong):
    """Errors must not contain values, because they are logged."""
    with pytest.raises(InvalidRequest) as refused:
        checked(orjson.dumps(wrong), kind)
    assert "s3cret" not in str(refused.value)


TURN = {"role": "user", "content": "x"}
LONG = "must have at most 10000 items, got 500000"


@pytest.mark.parametrize(
    ("kind", "wrong", "mistakes"),
    [
        (CompletionBody, {f"temperature{number}": number for number in range(40_000)}, 16),
        (ChatBody, {"messages": [0] * 500_000}, f"messages: {LONG}"),
        (TokenizeBody, {"messages": [0] * 500_000}, f"messages: {LONG}"),
        (MessagesBody, {"max_tokens": 1, "messages": [0] * 500_000}, f"messages: {LONG}"),
        (ResponsesBody, {"input": [0] * 500_000}, f"input: {LONG}"),
        (
            ChatBody,
            {"messages": [TURN], "stop_token_ids": [-1] * 300_000},
            "body: has 300000 mistakes; only up to 50000 are named",
        ),
    ],
)
def test_a_megabyte_of_mistakes_is_refused_at_once(kind, wrong, mistakes):
    """Limited processor time, because the router's loop waits."""
    data = orjson.dumps({"prompt": "x"} | wrong if kind is CompletionBody else wrong)
    started = time.process_time()
    with pytest.raises(InvalidRequest) as refused:
        checked(data, kind)
    assert mistakes in (len(refused.value.violations), str(refused.value))
    assert time.process_time() - started < scaled(1.0)


@pytest.mark.parametrize("size", [64, 128, 129])
@pytest.mark.parametrize(
    ("kind", "body", "field", "made"),
    [
        (
            ChatBody,
            {"messages": [TURN], "tools": [{"type": "function", "function": {}}]},
            "tools[0].function",
            chat_job,
        ),
        (
            MessagesBody,
            {"max_tokens": 1, "messages": [TURN], "tools": [{"input_schema": {}}]},
            "tools[0]",
            lambda body: messages_job(body, "", ""),
        ),
        (
            ResponsesBody,
            {"input": "x", "tools": [{"type": "function"}]},
            "tools[0]",
            lambda body: responses_job(body, "", ""),
        ),
    ],
)
def test_names_of_tools_have_up_to_128_characters(kind, body, field, made, size):
    """The limit of Anthropic, and of OpenAI's Responses."""
    [tool] = body["tools"]
    named = {"function": {"name": "n" * size}} if kind is ChatBody else {"name": "n" * size}
    job, error = outcome(lambda: made(checked(orjson.dumps(body | {"tools": [tool | named]}), kind)), InvalidRequest)
    assert (error is None) == (size <= 128)
    assert job is not None or "must be 1 to 128 of the characters A-Z a-z 0-9 _ -" in str(error)


@pytest.mark.parametrize(("levels", "fits"), [(200, True), (300, False), (1000, False)])
@pytest.mark.parametrize(("tools", "form"), [(b"", ""), (b"[]", ""), (b"[%s]", "none"), (b"[%s]", "hermes")])
def test_a_schema_has_its_depth(levels, fits, tools, form):
    """A schema that can be parsed but not serialized is the client's mistake."""
    schema = b'{"not":' * levels + b"{}" + b"}" * levels
    wanted = b'{"type":"json_schema","json_schema":{"schema":' + schema + b"}}"
    offered = b',"tools":' + tools.replace(b"%s", orjson.dumps(TOOL)) if tools else b""
    data = b'{"messages":[{"role":"user","content":"x"}],"response_format":' + wanted + offered + b"}"
    if fits:
        made = chat_job(checked(data, ChatBody), form).requests[0].constraint.json_schema.encode()
        assert made.startswith(b'{"$defs"') if form == "hermes" else made == schema
    else:
        with pytest.raises(InvalidRequest, match=r"^response_format\.json_schema\.schema: .*nested too deeply[^;]*$"):
            chat_job(checked(data, ChatBody), form)


@pytest.mark.parametrize("levels", [200, 248, 249, 250, 251, 252, 253, 254, 300])
def test_deep_values_of_other_apis_are_served_or_refused(levels):
    deep = b'{"a":' * levels + b"{}" + b"}" * levels
    turns = b'{"role":"assistant","content":[{"type":"tool_use","id":"1","name":"f","input":' + deep + b"}]}"
    turns += b',{"role":"user","content":"x"}'
    tool = b'{"type":"function","name":"f","parameters":' + deep + b"}"
    messages = checked(b'{"max_tokens":1,"messages":[' + turns + b"]}", MessagesBody)
    responses = checked(b'{"input":"x","tools":[' + tool + b"]}", ResponsesBody)
    for made in (lambda: messages_job(messages, "", ""), lambda: responses_job(responses, "", "")):
        job, error = outcome(made, InvalidRequest)
        if job is None:
            assert "nested too deeply" in str(error)
            assert levels > 200
        else:
            assert levels < 300
            begun = {"choices": [{"delta": {"role": "assistant"}, "finish_reason": None}], "id": "r", "created": 1}
            usage = {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1}
            assert job.wire.event(begun | {"model": "m", "usage": usage | DETAILS})


DETAILS = {"prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 123456789012345678901234567890}', b'{"a": 123456789012345678901234567890}'),
        ('{"a": "\\ud800"}', b"{}"),
        ('{"a": NaN, "b": 123456789012345678901234567890}', b"{}"),
        ('{"a":' * 252 + "1" + "}" * 252, b"{}"),
        ('{"a":' * 251 + "1" + "}" * 251, b'{"a":' * 251 + b"1" + b"}" * 251),
    ],
    ids=["long", "surrogate", "constant", "too deep", "deep"],
)
def test_any_arguments_of_a_call_can_be_written(arguments, shown):
    body = checked(b'{"max_tokens":1,"messages":[{"role":"user","content":"x"}]}', MessagesBody)
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    choice = {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    answer = {"id": "r", "model": "m", "choices": [choice], "usage": usage}
    assert b'"input":' + shown + b"}" in orjson.dumps(messages_job(body, "", "").wire.whole(answer))


def test_every_mistake_is_named():
    wrong = {"prompt": 1, "temperature": "x", "best_off": 2, "suffix": "y"}
    with pytest.raises(InvalidRequest) as refused:
        read(**wrong)
    assert {violation.field for violation in refused.value.violations} == set(wrong)


CALL_OF_257 = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "n" * 257, "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        (ChatBody, {"messages": []}, "messages: must not be empty"),
        (ChatBody, {"messages": [5]}, "messages[0]: must be an object, got 5"),
        (ChatBody, {"messages": "x"}, "messages: must be a list, got a string"),
        (ChatBody, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content: must be a string, got 5"),
        (ChatBody, {"stream": "yes"}, "stream: must be true or false, got a string"),
        (ChatBody, {"seed": 1.5}, "seed: must be an integer, got 1.5"),
        (ChatBody, {"temperature": "hot"}, "temperature: must be a number, got a string"),
        (ChatBody, {"tools": [{"type": "function"}] * 129}, "tools: must have at most 128 items, got 129"),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": "x", "name": "n" * 257}]},
            "at most 256 characters, got 257",
        ),
        (ChatBody, {"messages": [{"role": "user", "content": "x", "refusal": "r"}]}, "refusal: must be null, got a"),
        (ChatBody, {"n": 17}, "n: must be less than or equal to 16, got 17"),
        (ChatBody, {"metadata": 3}, "metadata: must be an object, got 3"),
        (ChatBody, {"guided_json": 5}, "guided_json: must be an object or a string"),
        (ChatBody, {"structured_outputs": {"json_object": False}}, "json_object: must be true, got false"),
        (ChatBody, {"messages": [CALL_OF_257]}, "messages[0].tool_calls[0].function.name: must have at most 256"),
        (ResponsesBody, {"input": "x", "tools": [{"type": "y"}]}, "type: must be 'function'; tools[0].name: is"),
        (ResponsesBody, {"input": "x", "background": True}, "background: must be false, got true"),
        (ResponsesBody, {"input": "x", "tool_choice": {"zz": 1}}, "tool_choice: must be none, auto, required, or {"),
        (MessagesBody, {"messages": [{"role": "user", "content": [7]}]}, "content[0]: must be an object"),
    ],
)
def test_mistakes_are_in_words_of_json(kind, fields, words):
    """The texts of pydantic have words of Python: lists "after validation", dictionaries and None."""
    body = {} if kind is ResponsesBody else {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    with pytest.raises(InvalidRequest) as refused:
        checked(orjson.dumps(body | fields), kind)
    assert words in str(refused.value)


def test_fields_of_messages_have_their_places_in_the_body():
    """The system text, and each of several results, is a message of the chat."""
    uses = [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in "ab"]
    results = [{"type": "tool_result", "tool_use_id": name} for name in "ab"]
    turns = [
        {"role": "assistant", "content": uses},
        {"role": "user", "content": results},
        {"role": "assistant", "content": ""},
    ]
    body = {"max_tokens": 1, "messages": turns, "system": "s", "tools": [{"name": "f", "input_schema": {}}]}
    rename = messages_job(checked(orjson.dumps(body), MessagesBody), "", "").rename
    found = {
        "chat.messages[0].role": "system.role",
        "chat.messages[1].tool_calls": "messages[0].tool_calls",
        "chat.messages[3].name": "messages[1].name",
        "chat.messages[4].role": "messages[2].role",
        "chat.tools": "tools",
        "sampling.stop": "stop_sequences",
    }
    assert {field: rename(0, field) for field in found} == found


def test_what_is_not_given_stays_unset():
    """Only the router sets defaults."""
    (request,) = completion_job(read()).requests
    assert SimpleNamespace(**{f.name: v for f, v in request.ListFields()}) == SimpleNamespace(
        text="x", sampling=type(request.sampling)(), resumable_s=0.0
    )


def test_types_are_strict_and_a_whole_number_is_a_number():
    for value in ("1", True, 1.5, [1]):
        with pytest.raises(InvalidRequest, match="max_tokens: must be an integer, got "):
            read(max_tokens=value)
    assert completion_job(read(temperature=1)).requests[0].sampling.temperature == 1.0


# --- fields of other servers


def chat(**fields):
    return checked(orjson.dumps({"messages": [{"role": "user", "content": "x"}], **fields}), ChatBody)


HELLO = [{"role": "user", "content": "x"}]
HINTS = {
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "u",
    "service_tier": "flex",
    "store": True,
    "verbosity": "low",
}
NEUTRAL = {
    "bad_words": [],
    "best_of": 1,
    "echo": False,
    "include_reasoning": True,
    "length_penalty": 1.0,
    "mm_processor_kwargs": None,
    "prompt_logprobs": None,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
}


@pytest.mark.parametrize("field", [*HINTS, *NEUTRAL])
def test_fields_without_effect_are_taken(field):
    assert chat_job(chat(**{field: (HINTS | NEUTRAL)[field]})).requests == chat_job(chat()).requests
    hint = {name: value for name, value in HINTS.items() if name == field}
    assert completion_job(read(**hint)).requests == completion_job(read()).requests


def test_defaults_of_fields_within_fields_are_taken():
    parts = [{"type": "text", "text": "x", "annotations": None, "cache_control": {"type": "ephemeral"}}]
    said = {"role": "assistant", "content": parts, "provider_specific_fields": None}
    plain = [{"role": "assistant", "content": "x"}]
    assert chat_job(chat(messages=[said])).requests == chat_job(chat(messages=plain)).requests
    names = "disable_fallback", "disable_any_whitespace", "disable_additional_properties"
    regex = dict.fromkeys(names, False) | {"regex": "a", "whitespace_pattern": None}
    assert completion_job(read(structured_outputs=regex)).requests == completion_job(read(guided_regex="a")).requests
    function = {"name": "f", "parameters": {"properties": {"a": {"default": None}}}}
    [tool] = chat(tools=[{"type": "function", "function": function}]).tools
    assert tool.function.parameters == function["parameters"]
    named = {"type": "function", "function": {"name": "f", "description": None}, "allowed_tools": None}
    assert chat(tools=[{"type": "function", "function": function}], tool_choice=named).tool_choice == ["f"]


@pytest.mark.parametrize(("field", "value"), [("length_penalty", 2.0), ("echo", True), ("use_beam_search", True)])
def test_values_that_would_have_an_effect_are_rejected(field, value):
    with pytest.raises(InvalidRequest, match=f"{field}: not supported") as refused:
        chat(**{field: value})
    assert errors.problem_of(refused.value).code == "unsupported_parameter"


def test_names_and_variables_of_the_template_are_passed_on():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "x", "name": "Ann"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
        {"role": "tool", "tool_call_id": "c", "content": "r", "name": "g"},
    ]
    fields = {"chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False}
    asked = chat_job(chat(messages=turns, **fields)).requests[0].chat
    assert [turn.name for turn in asked.messages] == ["Ann", "", "f", "g"]
    assert (asked.template_kwargs, asked.add_generation_prompt) == ('{"enable_thinking":false}', False)
    assert not chat_job(chat()).requests[0].chat.HasField("add_generation_prompt")


TURNS = [("weather", "rain"), ("stocks", "up")]


def rounds(call, result):
    return [each for name, text in TURNS for each in (call(name), result(text))]


@pytest.mark.parametrize(
    ("kind", "job", "body"),
    [
        (ChatBody, chat_job, {"messages": rounds(
            lambda name: {"role": "assistant", "tool_calls": [
                {"id": "call_0", "type": "function", "function": {"name": name, "arguments": "{}"}}]},
            lambda text: {"role": "tool", "tool_call_id": "call_0", "content": text})}),
        (MessagesBody, lambda body: messages_job(body, "", ""), {"max_tokens": 1, "messages": rounds(
            lambda name: {"role": "assistant", "content": [
                {"type": "tool_use", "id": "call_0", "name": name, "input": {}}]},
            lambda text: {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "call_0", "content": text}]})}),
        (ResponsesBody, lambda body: responses_job(body, "", ""), {"input": rounds(
            lambda name: {"type": "function_call", "call_id": "call_0", "name": name, "arguments": "{}"},
            lambda text: {"type": "function_call_output", "call_id": "call_0", "output": text})}),
    ],
)  # fmt: skip
def test_a_result_has_the_name_of_the_last_call_of_its_id_before_it(kind, job, body):
    turns = job(checked(orjson.dumps(body), kind)).requests[0].chat.messages
    assert [(turn.name, turn.content) for turn in turns if turn.role == "tool"] == TURNS


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"structured_outputs": {"json": {"type": "array"}}}, "json_schema", '{"type":"array"}'),
        ({"structured_outputs": {"json": '{"type": "array"}'}}, "json_schema", '{"type": "array"}'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choices", ["a", "b"]),
        ({"guided_json": {"type": "array"}}, "json_schema", '{"type":"array"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choices", ["a", "b"]),
        ({"guided_grammar": "start: A", "guided_decoding_backend": "guidance"}, "grammar", "start: A"),
        ({"structured_outputs": {"grammar": "start: A"}}, "grammar", "start: A"),
        ({"structured_outputs": {"regex": "a+"}, "guided_regex": "a+"}, "regex", "a+"),
        ({"structured_outputs": {"regex": "a+", "disable_fallback": False}, "guided_regex": "a+"}, "regex", "a+"),
    ],
)
def test_constraints_of_vllm(fields, kind, value):
    for job in (completion_job(read(**fields)), chat_job(chat(**fields))):
        constraint = job.requests[0].constraint
        assert constraint.WhichOneof("kind") == kind
        assert (list(constraint.choices.texts) if kind == "choices" else getattr(constraint, kind)) == value
        field = next(iter(fields))
        key = {"json_schema": ".json", "choices": ".choice"}.get(kind, f".{kind}") * (field == "structured_outputs")
        assert job.rename(0, f"constraint.{kind}") == field + key


@pytest.mark.parametrize("value", [True, False])
def test_fields_of_vllm_are_passed_on_with_both_values(value):
    names = "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens"
    fields = dict.fromkeys(names, value) | {"bad_words": ["a", "b"]}
    ends = {"continue_final_message": value, "add_generation_prompt": not value, "reasoning_effort": "max"}
    for job in (completion_job(read(**fields)), chat_job(chat(**fields, **ends))):
        request = job.requests[0]
        given = request.sampling.include_stop_str_in_output, request.sampling.skip_special_tokens
        assert (*given, request.add_special_tokens, list(request.sampling.bad_words)) == (*[value] * 3, ["a", "b"])
    shown = request.chat
    assert (shown.continue_final_message, shown.add_generation_prompt, shown.reasoning_effort) == (
        value,
        not value,
        "max",
    )
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "add_special_tokens": value,
        "continue_final_message": value,
    }
    asked = tokenize_call(checked(orjson.dumps(body), TokenizeBody))
    assert (asked.add_special_tokens, asked.chat.continue_final_message) == (value, value)


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "tools": [TOOL]}, "guided_regex"),
    ],
)
def test_constraints_that_cannot_be(fields, field):
    with pytest.raises(InvalidRequest) as refused:
        chat(**fields)
    assert [violation.field for violation in refused.value.violations] == [field]


def test_unknown_fields_can_be_ignored():
    fields = {"messages": [{"role": "user", "content": "x", "mood": 1}], "zzz": 1, "truncate_prompt_tokens": 3, "n": 2}
    body = checked(orjson.dumps(fields), ChatBody, ignores_unknown=True)
    assert chat_job(body).requests == chat_job(chat(n=2)).requests
    with pytest.raises(InvalidRequest, match=r"^n: [^;]*$"):
        checked(orjson.dumps(fields | {"n": "2"}), ChatBody, ignores_unknown=True)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
    ],
)
def test_a_text_or_a_chat_is_tokenized(fields, field):
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        checked(orjson.dumps(fields), TokenizeBody)


# --- errors


def every(kind):
    return [kind, *(below for child in kind.__subclasses__() for below in every(child))]


@pytest.mark.parametrize("kind", [kind for kind in every(BatonError) if kind.__module__ == "baton.errors"])
def test_every_error_has_a_body(kind):
    error = InvalidRequest.of("n", "wrong") if kind is InvalidRequest else kind("s3cret")
    problem = errors.problem_of(error)
    body = orjson.loads(problem.body())["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert 400 <= problem.status < 600
    assert ("s3cret" in problem.message) == (kind in CODES and kind is not InvalidRequest)
    assert (problem.headers.get("www-authenticate") == "Bearer") == (kind is Unauthenticated)
    assert ("retry-after" in problem.headers) == (problem.status in {429, 503})
    assert problem.headers["x-should-retry"] == str(kind in CODES and kind.retryable).lower()


@pytest.mark.parametrize(("wait_s", "seconds"), [(0.0, "1"), (0.3, "1"), (1.0, "1"), (1.1, "2"), (-3.0, "1")])
def test_retry_after_is_whole_seconds_and_never_too_early(wait_s, seconds):
    assert errors.problem_of(Overloaded("full", wait_s)).headers["retry-after"] == seconds


def test_the_first_field_is_the_parameter():
    problem = errors.problem_of(InvalidRequest(Violation("a", "unknown field"), Violation("b", "not supported")))
    assert (problem.param, problem.code) == ("a", "unknown_parameter")
    assert problem.message == "a: unknown field; b: not supported"


def test_the_code_of_a_sequence_that_is_too_long_is_that_of_openai():
    error = InvalidRequest.of("prompt", f"{TOO_LONG} 100 tokens; 101 do not fit")
    assert errors.problem_of(error).code == "context_length_exceeded"


# --- docs/reference/openai.md


def first_cells(title: str) -> set[str]:
    """Return the names in the first column of a chapter's tables."""
    chapter = TEXT[TEXT.index(f"\n## {title}\n") :].partition("\n## ")[2].partition("\n## ")[0]
    rows = [line for line in chapter.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([\w.\[\]]+)`", row.split("|")[1])}


FIELDS = first_cells("Request fields")


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_each_field_has_a_row(body):
    assert set(body.model_fields) - {"stream_options"} <= FIELDS
    assert {f"stream_options.{name}" for name in StreamOptions.model_fields} <= FIELDS
    assert set(parsing.NEUTRAL_FIELDS[body]) <= FIELDS


def test_each_row_is_of_a_field():
    known = {
        name for body in (CompletionBody, ChatBody) for name in (*body.model_fields, *parsing.NEUTRAL_FIELDS[body])
    }
    assert {re.split(r"[.\[]", name)[0] for name in FIELDS} <= known


def test_each_error_has_a_row_with_its_status_type_and_code():
    rows = [line for line in TEXT.splitlines() if re.match(r"\| \d{3}", line)]
    for status, kind, code in errors.ANSWERS.values():
        if status != 499:
            assert any(line.startswith(f"| {status}") and f"`{kind}`" in line and f"`{code}`" in line for line in rows)
    assert any(line.startswith("| 405") and "`method_not_allowed`" in line for line in rows)
    source = "".join(file.read_text() for file in (ROOT / "router/openai").glob("*.py"))
    for status, code in re.findall(r'HttpError\((\d+), "(\w+)"', source):
        assert code == "internal" or any(status in line and f"`{code}`" in line for line in rows), code


# --- the times of a request as a gateway measures them


@pytest.fixture
def world():
    made = SimpleNamespace(clock=FakeClock(), metrics=Metrics("here", "1"))
    made.measured = RequestMetrics(made.clock, made.metrics)
    made.value = lambda name, **labels: made.metrics.registry.get_sample_value(f"baton_{name}", labels)
    return made


def test_where_the_time_goes(world):
    for wait, choice, count in ((8, 0, 1), (1, 1, 1), (2, 0, 1), (4, 0, 2), (16, 1, 0)):
        world.clock.advance(wait)
        world.measured.tokens(choice, count)
    world.measured.completed(common_pb2.Timings(queue_s=1, prefill_s=2, e2e_s=20))
    world.measured.completed(common_pb2.Timings(queue_s=5, prefill_s=6, e2e_s=19))
    world.clock.advance(1)
    world.measured.finished()
    sums = {name: world.value(f"{name}_seconds_sum") for name in ("ttft", "itl", "e2e", "queue", "prefill")}
    assert sums == {"ttft": 8, "itl": 3 + 4, "e2e": 32, "queue": 1, "prefill": 2}
    assert world.value("itl_seconds_count") == 1 + 2


def test_it_ends_once(world):
    def visiting():
        with world.measured:
            world.measured.tokens(0, 1)
            world.measured.failed(NoWorker("gone"))
            world.measured.finished()
            raise NoWorker("again")

    with pytest.raises(BatonError, match="again"):
        visiting()
    counts = {outcome: world.value("requests_total", outcome=outcome) for outcome in ("failed", "refused", "finished")}
    assert counts == {"failed": 1, "refused": 0, "finished": 0}


def test_nobody_counts_without_metrics():
    with RequestMetrics(FakeClock(), None) as measured:
        measured.tokens(0, 1)
        measured.tokens(0, 1)
        measured.finished()
