"""The HTTP gateway in front of a scripted `Inference`: every possible answer, as `openai` shows it."""

import asyncio
import itertools
import json
import re
import threading
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from baton import errors
from baton.errors import InvalidRequest, Overloaded
from baton.metrics import Metrics
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from router.openai import choices
from router.openai.connections import BoundedProtocol
from router.openai.responses import EVENTS
from router.openai.upstream import Upstream, _Received
from tests.integration.gateway_support import (
    EOS,
    HALF,
    HELLO,
    USAGE,
    alone,
    completed,
    finished,
    opened,
    refused,
    tokens,
)
from tests.support.time_factor import scaled
from tests.support.waiting import until

ONE = tokens(0, 0, [1], "x")
CONTINUOUS = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


async def test_chat(gateway):
    done = await gateway.chat(max_completion_tokens=9, user="me")
    assert (done.object, done.id, done._request_id) == ("chat.completion", "chatcmpl-r1", "r1")
    (choice,) = done.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "dog cat", "stop")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 2)
    assert done.usage.prompt_tokens_details.cached_tokens == 1
    (request,) = gateway.fake.requests
    assert (request.sampling.max_tokens, request.client_tag, request.model) == (9, "me", "org/tiny")
    assert (request.HasField("n"), request.HasField("logprobs")) == (False, False)


async def test_chat_messages(gateway):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    earlier = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None}
    first = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    done = await gateway.chat([*first, earlier, {"role": "system", "content": "s"}])
    turns = [(turn.role, turn.content) for turn in gateway.fake.requests[0].chat.messages]
    assert turns == [("system", "be kind"), ("user", "a\nb"), ("assistant", "x"), ("system", "s")]
    await gateway.chat([*HELLO, done.choices[0].message.model_dump(), *HELLO])
    assert [turn.content for turn in gateway.fake.requests[1].chat.messages] == ["hello", "dog cat", "hello"]


async def test_chat_stream(gateway):
    *chunks, last = await gateway.streamed("chat", **USAGE)
    told = [(chunk.choices[0].delta.role, chunk.choices[0].delta.content) for chunk in chunks]
    assert told == [("assistant", ""), (None, "dog"), (None, " cat"), (None, None)]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert (last.choices, last.usage.total_tokens) == ([], 5)
    assert {chunk.object for chunk in [*chunks, last]} == {"chat.completion.chunk"}


def alike(fingerprint: str, *digests: str):
    """Return a script of a deterministic request. Each call has the next digest."""
    left = list(digests)

    async def script(request):
        yield {"accepted": pb.Accepted(prompt_tokens=3, system_fingerprint=fingerprint)}
        yield tokens(0, 0, [1], "dog")
        yield finished()
        yield completed(fingerprint=fingerprint, audit_digest=left.pop(0))

    return script


async def test_fingerprints_and_digests(gateway):
    """A deterministic request receives both. Other requests receive the fingerprint, if there is one."""
    extra = {"extra_body": {"deterministic": True}}
    gateway.fake.script = alike("x", "ab" * 32, "cd" * 32)
    done = await gateway.chat(**extra)
    assert gateway.fake.requests[0].deterministic
    assert (done.system_fingerprint, done.usage.audit_digest) == ("x", "ab" * 32)
    chunks = await gateway.streamed("chat", **USAGE, **extra)
    assert {chunk.system_fingerprint for chunk in chunks} == {"x"}
    assert chunks[-1].usage.audit_digest == "cd" * 32
    gateway.fake.script = alike("x", "ab" * 32, "cd" * 32)
    both = await gateway.complete(["a", "b"], **extra)
    assert both.system_fingerprint == "x"
    # the calls run concurrently: either may have the first digest
    digests = [sha256(bytes.fromhex(one * 32 + two * 32)).hexdigest() for one, two in (("ab", "cd"), ("cd", "ab"))]
    assert both.usage.audit_digest in digests
    gateway.fake.script = alike("x", "")
    done = await gateway.complete()
    assert (done.system_fingerprint, "audit_digest" in done.usage.model_dump()) == ("x", False)
    gateway.fake.script = alike("", "")
    assert (await gateway.chat()).system_fingerprint is None


async def test_of_several_prompts_the_longest_says_where_the_time_went(gateway):
    async def script(request):
        yield {"accepted": pb.Accepted(prompt_tokens=1)}
        yield finished()
        timings = common_pb2.Timings(queue_s=0.25, e2e_s=3.0 if request.text == "b" else 1.0)
        yield {"completed": pb.Completed(timings=timings)}

    gateway.fake.script = script
    done = await gateway.complete(["a", "b", "c"])
    assert (done.timings["queue_s"], done.timings["e2e_s"], done.timings["ttft_s"]) == (0.25, 3.0, 0.0)


async def thinking(request):
    """Yield two choices with thoughts."""
    yield {"accepted": pb.Accepted(prompt_tokens=9)}
    for choice, chunk, ids, text in ((0, 0, [1, 2], "a dog"), (0, 1, [], ""), (1, 2, [3], "cat")):
        yield {"thought": pb.Thought(choice=choice, chunk=chunk, ids=ids, text=text)}
    for choice in range(2):
        yield tokens(choice, 0, [1], "dog")
        yield finished(choice)
    yield completed(thinking_tokens=3)


THOUGHTS = [
    [{"chunk": 0, "text": "a dog", "token_ids": [1, 2]}, {"chunk": 1, "text": "", "token_ids": []}],
    [{"chunk": 2, "text": "cat", "token_ids": [3]}],
]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]


@pytest.mark.parametrize("asked", ["complete", "chat", "chat with tools"])
async def test_thoughts(gateway, asked):
    gateway.fake.script, path = thinking, asked.split()[0]
    extra = {"n": 2, "extra_body": {"thoughts": True, "think_while_decoding": False}}
    extra |= {"tools": TOOLS} if "tools" in asked else {}
    done = await getattr(gateway, path)(**extra)
    (request,) = gateway.fake.requests
    assert request.thoughts
    assert (request.HasField("think_while_decoding"), request.think_while_decoding) == (True, False)
    assert [choice.thoughts for choice in done.choices] == THOUGHTS
    assert (done.usage.thinking_tokens, done.usage.completion_tokens) == (3, 2)
    *chunks, last = await gateway.streamed(path, **USAGE, **extra)
    assert last.usage.thinking_tokens == 3
    seen: tuple[list[object], list[object]] = ([], [])
    for (choice,) in (chunk.choices for chunk in chunks):
        said = choice.model_dump()
        said = said.get("delta", said)
        assert not (said.get("thoughts") and (said.get("content") or said.get("text"))), "in a chunk of its own"
        seen[choice.index].extend(said.get("thoughts") or [said.get("content") or said.get("text")])
    assert [[part for part in parts if part] for parts in seen] == [[*THOUGHTS[0], "dog"], [*THOUGHTS[1], "dog"]]


async def test_nobody_is_shown_thoughts_that_were_not_asked_for(gateway):
    done = await gateway.complete()
    assert not gateway.fake.requests[0].HasField("thoughts")
    assert "thoughts" not in done.choices[0].model_dump()
    assert "thinking_tokens" not in done.usage.model_dump()


async def test_usage_throughout_a_stream(gateway):
    *chunks, last = await gateway.streamed("chat", n=2, **CONTINUOUS)
    used = [(chunk.choices[0].index, chunk.usage.completion_tokens) for chunk in chunks]
    assert used == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2), (0, 2), (1, 2)], "role, dog, cat, the end"
    for chunk, (_, count) in zip(chunks, used, strict=True):
        assert (chunk.usage.prompt_tokens, chunk.usage.total_tokens) == (3, 3 + count)
    assert (last.choices, last.usage.completion_tokens) == ([], 4)


async def test_usage_throughout_a_stream_of_several_prompts(gateway):
    async def script(request):
        yield {"accepted": pb.Accepted(prompt_tokens=len(request.text))}
        yield tokens(0, 0, [1], "")  # a part of a character: no text yet
        yield tokens(0, 1, [2, 3], "dog")
        yield finished()
        yield completed(prompt=len(request.text), new=3)

    gateway.fake.script = script
    *chunks, last = await gateway.streamed("complete", ["a", "bcde"], **CONTINUOUS)
    used = {(chunk.choices[0].index, chunk.usage.prompt_tokens, chunk.usage.total_tokens) for chunk in chunks}
    assert used == {(0, 1, 4), (1, 4, 7)}
    assert last.usage.total_tokens == 11


async def test_choices_begin_in_order(gateway):
    """The stream helper of the openai package takes the place of a choice from the order of their first chunks."""

    async def script(request):
        yield {"accepted": pb.Accepted(prompt_tokens=3)}
        for choice, word in ((2, "two"), (0, "zero"), (1, "one")):
            yield tokens(choice, 0, [1], word)
            yield finished(choice, EOS)
        yield completed(new=3)

    gateway.fake.script = script
    async with gateway.client.chat.completions.stream(model="m", messages=HELLO, n=3) as stream:
        chunks = [event.chunk.choices[0] async for event in stream if event.type == "chunk" and event.chunk.choices]
        done = await stream.get_final_completion()
    assert [(choice.index, choice.message.content) for choice in done.choices] == [(0, "zero"), (1, "one"), (2, "two")]
    begun = [chunk.index for chunk in chunks if chunk.delta.role]
    assert begun == [0, 1, 2]


async def test_choices(gateway):
    assert [choice.message.content for choice in (await gateway.chat(n=3)).choices] == ["dog cat"] * 3
    texts = ["", "", ""]
    for chunk in await gateway.streamed("chat", n=3):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["dog cat"] * 3
    assert [request.n for request in gateway.fake.requests] == [3, 3]
    done = await gateway.complete(["a", "b"], n=2)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert sorted(request.text for request in gateway.fake.requests[2:]) == ["a", "b"]
    assert done.usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("given", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}, {"type": "array"}),
    ],
    ids=lambda value: value["type"] if value else None,
)
async def test_response_format(gateway, given, schema):
    await gateway.chat(response_format=given)
    (request,) = gateway.fake.requests
    assert (json.loads(request.constraint.json_schema) if request.HasField("constraint") else None) == schema


async def test_chat_logprobs(gateway):
    done = await gateway.chat(logprobs=True, top_logprobs=4)
    first, second = done.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == (" dog", -0.5, list(b" dog"))
    found = [(top.token, top.bytes, top.logprob) for top in second.top_logprobs]
    likely, unlikely = [(" dog", list(b" dog"), -0.5), ("cat", list(b"cat"), -1.5)], ("é", list("é".encode()), -3.5)
    assert found == [*likely, ("\ufffd", list(HALF), -2.5), unlikely]
    assert gateway.fake.requests[0].logprobs == 4
    await gateway.chat(logprobs=True, top_logprobs=4)
    [asked] = gateway.fake.decoded
    assert sorted(asked) == [1, 2, 3, 4], "each once"


async def test_chat_logprobs_of_the_chosen_only(gateway):
    content = (await gateway.chat(logprobs=True)).choices[0].logprobs.content
    assert [(entry.token, entry.top_logprobs) for entry in content] == [(" dog", []), ("cat", [])]
    assert gateway.fake.requests[0].HasField("logprobs")
    chunks = [chunk.choices[0] for chunk in await gateway.streamed("chat", logprobs=True)]
    found = [entry.token for choice in chunks if choice.logprobs for entry in choice.logprobs.content]
    assert found == [" dog", "cat"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_completion_logprobs(gateway, streamed):
    answers = await gateway.streamed("complete", logprobs=2) if streamed else [await gateway.complete(logprobs=2)]
    pieces = [answer.choices[0].logprobs for answer in answers if answer.choices[0].logprobs]
    assert [token for piece in pieces for token in piece.tokens] == [" dog", "cat"]
    assert [offset for piece in pieces for offset in piece.text_offset] == [0, 3]  # "dog cat"
    assert [value for piece in pieces for value in piece.token_logprobs] == [-0.5, -0.5]
    assert pieces[0].top_logprobs[0] == {" dog": -0.5, "cat": -1.5}


@pytest.mark.parametrize("streamed", [False, True])
async def test_many_logprobs_are_written_in_a_thread(gateway, monkeypatch, streamed):
    """Otherwise all other requests wait."""
    threads, write = [], choices._text_logprobs

    def written(found):
        threads.append(threading.current_thread())
        return write(found)

    monkeypatch.setattr(choices, "_text_logprobs", written)
    monkeypatch.setattr("router.openai.logprobs.tokens._THREAD_TOKENS", 0)
    await (gateway.streamed("complete", logprobs=2) if streamed else gateway.complete(logprobs=2))
    assert threads
    assert threading.current_thread() not in threads


async def test_tokens_without_text_have_no_bytes(gateway):
    """A model may have more logits than its tokenizer has tokens. Others are a part of a character."""
    entry = common_pb2.TokenLogprobs(logprob=-1, top=[common_pb2.TopLogprob(token_id=i, logprob=-i) for i in (3, 9, 2)])
    gateway.plays(tokens(0, 0, [9], "", [entry]), finished(), completed())
    (found,) = (await gateway.chat(logprobs=True, top_logprobs=3)).choices[0].logprobs.content
    assert (found.token, found.bytes) == ("", None)
    assert [top.bytes for top in found.top_logprobs] == [list(HALF), None, list(b"cat")]
    done = await gateway.complete(logprobs=3)
    assert done.choices[0].logprobs.top_logprobs == [{"\ufffd": -3.0, "": -9.0, "cat": -2.0}]


async def test_the_sampled_token_is_among_the_best(gateway):
    entry = common_pb2.TokenLogprobs(logprob=-9, top=[common_pb2.TopLogprob(token_id=2, logprob=-1)])
    gateway.plays(tokens(0, 0, [1], " dog", [entry]), finished(), completed())
    done = await gateway.complete(logprobs=1)
    assert done.choices[0].logprobs.top_logprobs == [{"cat": -1.0, " dog": -9.0}]
    (found,) = (await gateway.chat(logprobs=True, top_logprobs=1)).choices[0].logprobs.content
    assert [(top.token, top.logprob) for top in found.top_logprobs] == [("cat", -1.0), (" dog", -9.0)]


def part(start: int, *ids: int) -> dict[str, Any]:
    """Return log-probabilities -1, -2, ... of prompt tokens. The alternatives of each are "cat" and "é"."""
    top = [common_pb2.TopLogprob(token_id=token_id, logprob=-0.5 * token_id) for token_id in (2, 4)]
    entries = [common_pb2.TokenLogprobs(logprob=-at, top=top if at else []) for at in range(start, start + len(ids))]
    ranks, rest = [3 * (at > 0) for at in range(start, start + len(ids))], {"from": start}
    return {"prompt_logprobs": common_pb2.PromptLogprobs(ids=ids, ranks=ranks, logprobs=entries, **rest)}


ACCEPTED = {"accepted": pb.Accepted(prompt_tokens=6)}
PARTS = [part(0, 5, 1, 3), part(3, 3, 4, 2)]  # "</s>", " dog", two halves of a character, "é", "cat"
ENTRY = common_pb2.TokenLogprobs(logprob=-0.25, top=[common_pb2.TopLogprob(token_id=4, logprob=-0.125)])
BEST = {"cat": -1, "é": -2}
SCORED: dict[str, list[Any]] = {
    "tokens": ["</s>", " dog", "\ufffd", "\ufffd", "é", "cat"],
    "token_logprobs": [None, -1, -2, -3, -4, -5],
    "top_logprobs": [None, BEST | {" dog": -1}, BEST | {"\ufffd": -2}, BEST | {"\ufffd": -3}, BEST, BEST],
}


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_echoed_prompt_is_the_beginning_of_the_answer(gateway, streamed):
    answer = [tokens(0, 0, [2], "cat", [ENTRY]), finished(), completed()]
    gateway.plays(ACCEPTED, *PARTS, *answer)
    asked = {"prompt": "dog\ufffd\ufffdécat", "echo": True, "logprobs": 2, "max_tokens": 1}
    answers = await gateway.streamed("complete", **asked) if streamed else [await gateway.complete(**asked)]
    choices = [answer.choices[0] for answer in answers]
    assert "".join(choice.text for choice in choices) == "dog\ufffd\ufffdécatcat"
    found = [choice.logprobs for choice in choices if choice.logprobs]
    assert [token for piece in found for token in piece.tokens] == [*SCORED["tokens"], "cat"]
    assert [value for piece in found for value in piece.token_logprobs] == [*SCORED["token_logprobs"], -0.25]
    assert [best for piece in found for best in piece.top_logprobs][:-1] == SCORED["top_logprobs"]
    assert [offset for piece in found for offset in piece.text_offset] == [0, 0, 3, 3, 4, 6, 9]
    (request,) = gateway.fake.requests
    assert (request.prompt_logprobs, request.logprobs, request.sampling.max_tokens) == (2, 2, 1)


async def test_an_echo_without_logprobs_needs_no_scores(gateway):
    gateway.plays(ACCEPTED, tokens(0, 0, [2], "cat"), tokens(1, 0, [4], "é"), finished(0), finished(1), completed())
    for prompt, text in (("x", "x"), ([1, 2], "dogcat")):
        done = await gateway.complete(prompt, echo=True, n=2)
        assert [choice.text for choice in done.choices] == [text + "cat", text + "é"]
    assert not any(request.HasField("prompt_logprobs") for request in gateway.fake.requests)


def lm_eval(choice: Any, context: int) -> tuple[float, bool]:
    """Return what lm-evaluation-harness reads from a choice (`local-completions`, `parse_logprobs`)."""
    values = choice.logprobs.token_logprobs[context:-1]
    best = [max(top.values()) for top in choice.logprobs.top_logprobs[context:-1]]
    return sum(values), values == best


@pytest.mark.parametrize("ends", [False, True])
async def test_requests_of_lm_eval(gateway, ends):
    """It drops the last entry, that of the one new token, even if that token is an end token without text."""
    end = pb.Finished(reason=EOS, matched_stop="5", logprobs=ENTRY)
    new = [{"finished": end}] if ends else [tokens(0, 0, [2], "cat", [ENTRY]), finished()]
    gateway.plays(ACCEPTED, *PARTS, *new, completed())
    asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    done = await gateway.complete([[5, 1, 3, 3, 4, 2]] * 2, **asked)
    for choice in done.choices:
        assert len(choice.logprobs.tokens) == len(choice.logprobs.text_offset) == 7
        assert choice.logprobs.top_logprobs[3] == {"cat": -1.0, "\ufffd": -3.0}, "as many as it asked for"
        assert lm_eval(choice, 2) == (-2 - 3 - 4 - 5, False)
        assert choice.text.endswith("catcat") != ends


async def test_without_new_tokens_only_the_prompt_comes_back(gateway):
    gateway.plays(ACCEPTED, *PARTS, finished(), completed(new=0))
    done = await gateway.complete("x", echo=True, logprobs=0, max_tokens=0)
    (choice,) = done.choices
    assert (choice.text, choice.finish_reason, done.usage.completion_tokens) == ("x", "length", 0)
    assert choice.logprobs.token_logprobs == SCORED["token_logprobs"]
    assert choice.logprobs.top_logprobs[1] == {" dog": -1.0}
    assert max(choice.logprobs.text_offset) <= 1, "offsets never exceed the text"


@pytest.mark.parametrize("top", [0, 1, 2])
async def test_prompt_logprobs_have_the_form_of_vllm(gateway, top):
    gateway.plays(ACCEPTED, *PARTS, tokens(0, 0, [2], "cat"), finished(), completed())
    for where in (
        (await gateway.complete("x", extra_body={"prompt_logprobs": top})).choices[0],
        await gateway.chat(extra_body={"prompt_logprobs": top}),
    ):
        found = where.prompt_logprobs
        dog = {"1": {"logprob": -1.0, "rank": 3, "decoded_token": " dog"}}
        cat = {"2": {"logprob": -1.0, "rank": 1, "decoded_token": "cat"}}
        acute = {"4": {"logprob": -2.0, "rank": 2, "decoded_token": "é"}}
        assert found[:2] == [None, dog | (cat if top else {}) | (acute if top > 1 else {})]
        assert next(iter(found[4])) == "4", "the token of the prompt comes first, and once"
        assert len(found) == 6
    assert [request.prompt_logprobs for request in gateway.fake.requests] == [top, top]
    many = {"accepted": pb.Accepted(prompt_tokens=1_000_000 // (2 * (top + 1)) + 1)}
    gateway.plays(many, *PARTS, finished(), completed())
    for field, more in (("prompt_logprobs", {"prompt_logprobs": top}), ("logprobs", {"logprobs": top, "echo": True})):
        found = f"{field}: at most 1000000 log-probabilities of prompts, got 10"
        with pytest.raises(openai.BadRequestError, match=found):
            await gateway.complete(["x", "x"], extra_body=more)
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs: only allowed without stream"):
        await gateway.complete("x", stream=True, extra_body={"prompt_logprobs": 1})


async def test_a_router_of_an_older_release_is_named(gateway):
    gateway.fake.older = True
    with pytest.raises(openai.InternalServerError, match="older release"):
        await gateway.chat(logprobs=True)


STATUS = {"InvalidRequest": 400, "UnknownModel": 404, "Unauthenticated": 401, "PermissionDenied": 403} | {
    "Unsupported": 501, "RateLimited": 429, "PromiseRefused": 429, "Overloaded": 503, "NoWorker": 503,
    "WorkerLost": 503, "DeadlineExceeded": 504, "Cancelled": 499, "EngineFault": 500,
}  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", STATUS)
async def test_errors(gateway, name, streamed):
    error = InvalidRequest.of("n", "too many") if name == "InvalidRequest" else getattr(errors, name)("because")
    gateway.plays(error)
    failed = await refused(openai.APIStatusError, gateway.chat(stream=streamed), str(error))
    assert (failed.status_code, failed.request_id) == (STATUS[name], "r1")
    assert failed.code
    assert failed.response.headers["x-should-retry"] == ("true" if error.retryable else "false")


async def test_retry_after(gateway):
    gateway.plays(Overloaded("full", 2.25))
    headers = (await refused(openai.InternalServerError, gateway.chat())).response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("3", "2250")


async def test_a_refused_promise_has_the_time_and_the_limits_that_can_be_promised(gateway):
    gateway.plays(errors.PromiseRefused("not now", 2.25, ttft_ms=350.5))
    failed = await refused(openai.RateLimitError, gateway.chat(extra_body={"ttft_ms": 200, "itl_ms": 9.5}), "not now")
    headers = failed.response.headers
    assert (headers["retry-after"], headers["baton-ttft-ms"], "baton-itl-ms" in headers) == ("3", "350.5", False)
    [request] = gateway.fake.requests
    assert (request.ttft_ms, request.itl_ms) == (200, 9.5)


async def test_the_client_tries_again(gateway):
    answer = gateway.fake.script

    async def script(request):
        if len(gateway.fake.requests) == 1:
            yield Overloaded("full", 0.01)
        async for step in answer(request):
            yield step

    gateway.fake.script, gateway.client.max_retries = script, 1
    assert (await gateway.chat()).choices[0].message.content == "dog cat"


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("chat", "messages"),
        ("chat.messages[0].role", "messages[0].role"),
        ("constraint", "response_format"),
        ("constraint.json_schema", "response_format.json_schema"),
        ("sampling.max_tokens", "max_completion_tokens"),
        ("sampling.logprobs", "top_logprobs"),
        ("logprobs", "top_logprobs"),
        ("cache_scope", "cache_salt"),
        ("client_tag", "user"),
        ("deterministic", "deterministic"),
    ],
)
async def test_a_refused_field_has_its_http_name(gateway, field, param):
    gateway.plays(InvalidRequest.of(field, "not supported by this version"))
    found = await refused(openai.BadRequestError, gateway.chat(max_completion_tokens=5))
    assert (found.param, found.code) == (param, "unsupported_parameter")


async def test_an_error_within_a_stream_is_the_last_event(gateway):
    gateway.plays(tokens(0, 0, [1], "dog"), errors.WorkerLost("gone"))
    body = json.dumps({"messages": HELLO, "stream": True}).encode()
    status, _, data = await gateway.raw("POST", "/v1/chat/completions", body)
    assert status == 200
    assert b'"content":"dog"' in data
    assert b'data: {"error":{"message":"gone","type":"server_error","param":null,"code":"worker_lost"}}\n\n' in data
    assert b"[DONE]" not in data


@pytest.mark.parametrize(
    "steps",
    [[ONE], [ONE, completed()], [ONE, finished()], [tokens(7, 0, [1], "x"), finished(7), completed()]],
    ids=["no end", "no reason", "no usage", "a choice too many"],
)
async def test_an_answer_that_is_not_complete_is_no_answer(gateway, steps):
    gateway.plays(*steps)
    assert (await refused(openai.InternalServerError, gateway.chat(), "router")).code == "engine_fault"


async def failing_at_b(request):
    """Fail for prompt "b" and never answer other prompts."""
    if request.text == "b":
        yield errors.EngineFault("broken")
    await asyncio.Event().wait()


async def test_the_first_failure_ends_all_prompts(gateway):
    gateway.fake.script = failing_at_b
    await refused(openai.InternalServerError, gateway.complete(["a", "b", "c"]), "broken")
    await until(lambda: gateway.fake.running == 0, "all calls are cancelled")


async def test_no_router():
    async with alone(target="127.0.0.1:1") as gateway:
        failed = await refused(openai.InternalServerError, gateway.chat(), "cannot reach the router: ")
        assert failed.code == "no_worker"
        assert (await gateway.raw("GET", "/health"))[0] == 200
        assert (await gateway.raw("GET", "/ready"))[0] == 503


async def test_the_credential_is_passed_on_if_a_header_can_carry_it(gateway):
    for asked in (gateway.chat(), gateway.client.models.list()):
        gateway.fake.metadata = {}
        await asked
        assert gateway.fake.metadata["authorization"] == "Bearer k"
    for key, words in ("\xfc", "must be printable ASCII"), ("k" * 4090, "at most 4096 characters, got 4097"):
        status, headers, error = await failed_raw(gateway, "GET", "/v1/models", authorization=f"Bearer {key}")
        assert (status, headers["www-authenticate"], error["code"]) == (401, "Bearer", "invalid_api_key")
        assert words in error["message"]


async def failed_raw(gateway, *args, **headers):
    status, found, body = await gateway.raw(*args, **headers)
    return status, found, json.loads(body)["error"]


def in_stream(**options):
    return {"stream": True, "stream_options": options}


@pytest.mark.parametrize(
    ("wrong", "param", "says"),
    [
        ({"temprature": 1}, "temprature", "unknown field; did you mean temperature"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"top_logprobs": 2}, "top_logprobs", "only allowed with logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed with stream"),
        (in_stream(continuous_usage_stats=True), "stream_options.continuous_usage_stats", "only allowed with include_"),
        (in_stream(include_usages=1), "stream_options.include_usages", "did you mean include_usage"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "equal to max_completion_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is required"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "'user'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "not supported"),
        ({"messages": [{"role": "user", "content": "x", "naem": 1}]}, "messages[0].naem", "did you mean name"),
        ({"temperature": "hot"}, "temperature", "number, got a string"),
        ({"n": 0}, "n", "greater than or equal to 1, got 0"),
        ({"logit_bias": {"dog": 1}}, "logit_bias", "token ids, got 'dog'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
async def test_wrong_fields(gateway, wrong, param, says):
    found = await refused(openai.BadRequestError, gateway.chat(extra_body=wrong), says)
    assert found.param == param
    assert gateway.fake.requests == []


@pytest.mark.parametrize(
    ("wrong", "param"),
    [({"echo": 1}, "echo"), ({"suffix": "x"}, "suffix"), ({"best_of": 2}, "best_of"), ({"prompt": []}, "prompt"),
     ({"prompt": ["a", 1]}, "prompt"), ({"prompt": ["x"] * 129}, "prompt"), ({"messages": HELLO}, "messages"),
     ({"logprobs": -1}, "logprobs")],
    ids=str,
)  # fmt: skip
async def test_wrong_fields_of_completions(gateway, wrong, param):
    assert (await refused(openai.BadRequestError, gateway.complete(extra_body=wrong))).param == param


async def test_values_that_ask_for_nothing(gateway):
    harmless = {"tools": [], "tool_choice": "none", "parallel_tool_calls": False, "store": False, "audio": None}
    await gateway.chat(extra_body=harmless)
    await gateway.complete(echo=False, suffix="", best_of=1)
    assert len(gateway.fake.requests) == 2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"prompt": "x",}', "line 1 column 15"),
        (b'{"prompt":\n "\xff"}', "valid JSON"),
        (b'{"temperature": NaN}', "line 1 column 17"),
        (b"[1]", "must be a JSON object"),
        (b"", "valid JSON"),
        (b"[" * 100_000, "valid JSON"),
    ],
    ids=["comma", "utf8", "nan", "list", "empty", "deep"],
)
async def test_what_is_no_json(gateway, body, says):
    status, _, error = await failed_raw(gateway, "POST", "/v1/completions", body)
    assert (status, error["param"]) == (400, "body")
    assert says in error["message"]


async def test_limits():
    async with alone(max_body=1000) as gateway:
        for size in (1001, 10_000, 100_000):
            status, headers, error = await failed_raw(gateway, "POST", "/v1/completions", b"x" * size)
            assert (status, headers["connection"]) == (413, "close")
            assert "at most 1000 bytes" in error["message"]
        fits = json.dumps({"prompt": "x" * 970}).encode()
        assert (await gateway.raw("POST", "/v1/completions", fits))[0] == 200
        status, headers, error = await failed_raw(gateway, "GET", "/health", x_long="x" * 20_000)
        assert (status, headers["connection"], error["code"]) == (431, "close", "headers_too_large")
        assert (await gateway.raw("GET", "/health"))[0] == 200


async def test_a_request_with_two_lengths_is_rejected_and_ends_its_connection(gateway):
    hidden = b"0\r\n\r\nGET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    reader, writer = await opened(gateway.address, "POST", "/v1/completions", hidden, transfer_encoding="chunked")
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b'"ambiguous_length"' in answer


@pytest.mark.parametrize(("names", "status"), [((), 403), (("Evil.example",), 200), (None, 200)])
async def test_without_tokens_a_foreign_name_reaches_nothing_on_a_loopback_listener(names, status):
    async with alone(names=names) as gateway:
        for method, path, body in (("POST", "/v1/completions", b'{"prompt": "x"}'), ("GET", "/version", b"")):
            found = await gateway.raw(method, path, body, host="evil.example:8000", origin="http://evil.example")
            assert found[0] == status


async def test_a_request_without_a_host_name_is_no_browsers(gateway):
    reader, writer = await asyncio.open_connection(*gateway.address.split(":"))
    writer.write(b"GET /health HTTP/1.0\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_a_page_of_another_site_may_only_link_to_the_dashboard(gateway):
    for path, mode, status in (("/version", "no-cors", 403), ("/", "navigate", 200), ("/live", "navigate", 403)):
        assert (await gateway.raw("GET", path, sec_fetch_site="cross-site", sec_fetch_mode=mode))[0] == status


async def test_open_connections_are_limited_and_a_client_beyond_the_limit_is_told_when_to_return(gateway, monkeypatch):
    rejected = list[str]()
    monkeypatch.setattr(BoundedProtocol, "most", 2)
    monkeypatch.setattr(gateway.http._server, "_rejected", rejected.append)
    first, second = [await asyncio.open_connection(*gateway.address.split(":")) for _ in range(2)]
    await until(lambda: len(gateway.http._server.server_state.connections) == 2, "both are accepted")
    status, headers, error = await failed_raw(gateway, "GET", "/version")
    assert (status, headers["retry-after"], headers["connection"], error["code"]) == (503, "1", "close", "overloaded")
    assert rejected == ["HTTP 503 overloaded"]
    first[1].close()
    second[1].close()
    await until(lambda: not gateway.http._server.server_state.connections, "both are gone")
    assert (await gateway.raw("GET", "/version"))[0] == 200


@pytest.mark.parametrize("later", [False, True])
async def test_headers_that_do_not_arrive_end_their_connection(gateway, monkeypatch, later):
    if later:
        reader, writer = await opened(gateway.address, "GET", "/version")
        await reader.readuntil(b"}")
    monkeypatch.setattr(BoundedProtocol, "headers_s", 0.0)
    if later:
        writer.write(b"GET /version HTTP/1.1\r\nx: ")
    else:
        reader, writer = await asyncio.open_connection(*gateway.address.split(":"))
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"request_timeout"' in answer


async def test_the_rest_of_a_body_after_the_answer_is_limited_too(gateway, monkeypatch):
    reader, writer = await opened(gateway.address, "POST", "/nothing", content_length="10")
    await reader.readuntil(b"}}")
    monkeypatch.setattr(BoundedProtocol, "headers_s", 0.0)
    writer.write(b"x")
    assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_a_burst_without_a_model_costs_one_call_for_it(gateway):
    asked = [gateway.raw("POST", "/v1/completions", b'{"prompt": "x"}') for _ in range(50)]
    assert {status for status, *_ in await asyncio.gather(*asked)} == {200}
    assert gateway.fake.listed == 1


async def test_leaving_within_the_body_is_no_fault_of_ours(gateway, caplog):
    _, writer = await opened(gateway.address, "POST", "/v1/completions", b"{", content_length="100")
    state = gateway.http._server.server_state
    await until(lambda: state.tasks, "it is being read")
    writer.close()
    await until(lambda: not state.tasks, "it is given up")
    assert not caplog.records


async def test_paths_methods_and_types(gateway):
    status, _, error = await failed_raw(gateway, "GET", "/v1/rerank")
    assert (status, error["code"]) == (404, "not_found")
    status, headers, error = await failed_raw(gateway, "GET", "/v1/completions")
    assert (status, headers["allow"], error["code"]) == (405, "POST", "method_not_allowed")
    status, _, error = await failed_raw(gateway, "POST", "/v1/completions", b"{}", content_type="text/plain")
    assert (status, error["param"]) == (415, "content-type")
    status, headers, error = await failed_raw(gateway, "POST", "/v1/completions", b"\x1f\x8b", content_encoding="gzip")
    assert (status, error["param"], headers["accept-encoding"]) == (415, "content-encoding", "identity")
    assert (await gateway.raw("GET", "/metrics"))[0] == 404
    assert (await gateway.raw("GET", "/version"))[2] == b'{"version":"1.2"}'
    assert (await gateway.client.models.retrieve("org/tiny")).max_model_len == 64


async def counted(gateway):
    """Return each metric that is not zero, without buckets and creation times."""
    text = (await gateway.raw("GET", "/metrics"))[2].decode()
    pairs = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("baton_")]
    return {n: float(value) for n, value in pairs if float(value) and not re.search("_bucket|_created|_info", n)}


async def test_metrics_of_a_gateway_alone():
    steps = [tokens(0, at, [1], "x") for at in range(3)]
    done = {"completed": pb.Completed(timings=common_pb2.Timings(queue_s=2, prefill_s=0.5, e2e_s=3))}
    async with alone(counts=Metrics("here", "1.2")) as gateway:
        gateway.plays(*steps, finished(), done)
        await gateway.chat()
        assert await gateway.streamed("chat")
        found = await counted(gateway)
    times = re.compile("(ttft|itl|e2e|generation)_seconds_sum")
    assert {name: value for name, value in found.items() if not times.search(name)} == {
        'baton_requests_total{outcome="finished"}': 2,
        "baton_ttft_seconds_count": 2,
        "baton_itl_seconds_count": 4,
        "baton_e2e_seconds_count": 2,
        "baton_queue_seconds_count": 2,
        "baton_queue_seconds_sum": 4,
        "baton_prefill_seconds_count": 2,
        "baton_prefill_seconds_sum": 1,
        "baton_generation_seconds_count": 2,
        "baton_output_tokens_total": 6,
    }


@pytest.mark.parametrize("streamed", [False, True])
async def test_metrics_of_what_does_not_finish(streamed):
    async with alone(counts=Metrics("here", "1.2")) as gateway:
        for error in (Overloaded("full", 1), errors.EngineFault("broken")):
            gateway.plays(error)
            await refused(openai.InternalServerError, gateway.chat(stream=streamed))
        gateway.plays(ONE, errors.NoWorker("gone"))
        await refused(openai.APIError, gateway.streamed("chat"))
        await refused(openai.BadRequestError, gateway.chat(extra_body={"n": 0}))
        gateway.fake.script = failing_at_b
        asking = asyncio.create_task(gateway.chat(stream=streamed))
        await until(lambda: gateway.fake.running == 1, "it runs")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: gateway.fake.running == 0, "it is cancelled")
        assert await counted(gateway) == {
            'baton_requests_total{outcome="failed"}': 2,
            'baton_requests_total{outcome="refused"}': 2,
            'baton_requests_total{outcome="cancelled"}': 1,
            'baton_refusals_total{reason="Overloaded"}': 1,
            'baton_refusals_total{reason="InvalidRequest"}': 1,
            "baton_output_tokens_total": 1,
        }


async def streaming(gateway, **options):
    """Open a connection and request a streamed completion."""
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    return await opened(gateway.address, "POST", "/v1/completions", body, **options)


@pytest.mark.parametrize(("headers", "comments"), [({}, b": waiting\n\n"), ({"accept": EVENTS}, b": waiting\n")])
async def test_keep_alive_while_nothing_comes(headers, comments):
    """Parsers such as the openai package's keep an id, and take an empty line after it for an event without data."""
    held = asyncio.Event()

    async def script(request):
        await held.wait()
        yield errors.NoWorker("none came")

    async with alone(keep_alive_s=0.02) as gateway:
        gateway.fake.script = script
        reader, writer = await streaming(gateway, connection="close", **headers)
        for _ in range(3):
            await reader.readuntil(comments + b"\r\n")
        held.set()
        assert b'data: {"error":{"message":"none came"' in await reader.read()
        writer.close()


async def test_keep_alive_while_only_the_prompt_is_scored():
    """Its log-probabilities are sent together, once all of them have come."""
    seen = asyncio.Event()

    async def script(request):
        yield {"accepted": pb.Accepted(prompt_tokens=1_000_000)}
        for at in itertools.count():
            if seen.is_set():
                yield errors.NoWorker("that was long")
            yield part(at, 1)

    async with alone(keep_alive_s=0.1) as gateway:
        gateway.fake.script = script
        body = json.dumps({"prompt": "x", "stream": True, "echo": True, "logprobs": 0}).encode()
        reader, writer = await opened(gateway.address, "POST", "/v1/completions", body)
        async with asyncio.timeout(scaled(20)):
            for _ in range(2):
                await reader.readuntil(b": waiting\n\n\r\n")
        seen.set()
        await reader.readuntil(b"that was long")
        writer.close()


@pytest.mark.parametrize(("accept", "ids"), [("*/*", False), ("application/json, Text/Event-Stream;q=0.9", True)])
async def test_only_clients_that_accept_events_get_ids(gateway, accept, ids):
    """Load generators of vLLM and SGLang take each line that is no comment for `data: ` and JSON."""
    gateway.plays(tokens(0, 0, [1], "x"), finished(), completed())
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    *_, data = await gateway.raw("POST", "/v1/completions", body, accept=accept)
    assert (b"id: " in data) == ids
    assert data.count(b"data: ") == 3


async def test_a_client_that_does_not_read_is_given_up():
    async def script(request):
        for start in itertools.count():
            yield tokens(0, start, [1], "x" * 100_000)

    async with alone(stall_s=0.1) as gateway:
        gateway.fake.script = script
        _, writer = await streaming(gateway, limit=1000)
        await until(lambda: gateway.fake.running == 1, "it runs")
        await until(lambda: gateway.fake.running == 0, "it is given up")
        writer.close()


def test_a_lost_router_is_told_how_many_positions_came():
    """`baton gateway` continues a stream at another router, which sends the rest only."""
    request = pb.GenerateRequest(text="x", prompt_logprobs=1, n=1)
    received = _Received(request, "", Upstream([], retries=True))
    for step in (ACCEPTED, PARTS[0]):
        assert received.is_new(pb.GenerateEvent(request_id="r1", **step))
    stub: Any = SimpleNamespace(Resume=lambda message, metadata: message)
    message: Any = received.call(stub, ())
    assert (message.request_id, message.prompt_logprobs_received, message.exact) == ("r1", 3, False)
