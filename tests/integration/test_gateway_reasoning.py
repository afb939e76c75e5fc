"""Reasoning over HTTP, with the `openai` package: in answers, streams, usage and history."""

import pytest

from baton.rpc.v1 import inference_pb2 as pb
from router.parsing import chat
from tests.integration.gateway_support import EOS, HELLO, USAGE, asking, spoken
from tests.integration.test_gateway_tools import CALL, WEATHER

DRAFT = f"Maybe: <tool_call>\n{CALL}\n</tool_call> no, ask first"
ASKED = f"<think>\n{DRAFT}\n</think>\n\nWhich city?"


@pytest.fixture
async def gateway(gateway):
    gateway.fake.reasoning_form, gateway.fake.tool_form = "think", "hermes"
    return gateway


async def streamed(gateway, **options):
    """Return the reasoning, content, calls, finish reason and reasoning tokens of a stream."""
    reasoning, content, names, reason, usage = "", "", list[str](), None, None
    for chunk in await gateway.streamed("chat", **options, **USAGE):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta
            assert getattr(delta, "reasoning", None) == getattr(delta, "reasoning_content", None)
            reasoning += getattr(delta, "reasoning_content", None) or ""
            content += delta.content or ""
            names += [call.function.name for call in delta.tool_calls or () if call.id]
            reason = choice.finish_reason or reason
    assert usage is not None
    return reasoning, content, names, reason, usage.completion_tokens_details.reasoning_tokens


@pytest.mark.parametrize("tools", [{}, {"tools": [WEATHER]}])
@pytest.mark.parametrize(("size", "tokens"), [(1, len(f"\n{DRAFT}\n</think>") + 1), (5, 22), (1000, 0)])
async def test_a_thought_is_no_answer(gateway, tools, size, tokens):
    """A call inside a thought is a draft. A token counts as reasoning if a thought is open before it or after it."""
    gateway.plays(*spoken(ASKED, EOS, size))
    done = await gateway.chat(**tools)
    message, used = done.choices[0].message, done.usage.completion_tokens_details.reasoning_tokens
    assert (message.reasoning_content, message.reasoning) == (DRAFT, DRAFT)
    assert (message.content, message.tool_calls, done.choices[0].finish_reason) == ("Which city?", None, "stop")
    assert used == tokens
    assert await streamed(gateway, **tools) == (DRAFT, "Which city?", [], "stop", tokens)


async def test_a_thought_that_the_prompt_opened(gateway):
    steps = [{"accepted": pb.Accepted(prompt_tokens=3, in_reasoning=True)}, *spoken(f"Hm.</think>{CALL}", size=1)]
    gateway.plays(*steps)
    done = await gateway.chat(tools=[WEATHER])
    choice = done.choices[0]
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", None)
    assert (choice.message.tool_calls[0].function.name, choice.finish_reason) == ("weather", "tool_calls")
    assert done.usage.completion_tokens_details.reasoning_tokens == len("Hm.</think>")
    found = await streamed(gateway, tools=[WEATHER])
    assert found == ("Hm.", "", ["weather"], "tool_calls", len("Hm.</think>"))


async def test_a_router_reports_a_thought_that_the_prompt_opened(make, monkeypatch):
    """Its workers get the constraint of the answer after the thought."""
    monkeypatch.setattr(chat, "_PLAIN", "{{ messages[0].content }}")
    cluster = await make(http="127.0.0.1:0", reasoning_parser="think")
    async with asking(cluster.router.http) as client:
        for content, role, opened in (
            ("<think>", "user", True),
            ("x", "user", False),
            ("<think>x", "user", False),
            ("<think>\nI was", "assistant", True),
            ("<think>a</think>b", "assistant", False),
            ("<think>a</think>b\n <think>c", "assistant", True),
            ("the mark <think> begins", "assistant", False),
        ):
            asked = [{"role": role, "content": content}]
            more = {"extra_body": {"continue_final_message": role == "assistant"}}
            done = await client.chat(asked, max_tokens=4, response_format={"type": "json_object"}, **more)
            message = done.choices[0].message
            assert (message.content, getattr(message, "reasoning_content", "")) == (
                ("", "<0><1><2><3>!") if opened else ("<0><1><2><3>!", "")
            )
            constraint = cluster.prefill[0].specs[-1].constraint
            assert (list(constraint.after), constraint.json_schema) == (["</think>"] * opened, '{"type":"object"}')


async def test_without_a_form_nothing_is_reasoning(gateway):
    gateway.fake.reasoning_form = ""
    gateway.plays(*spoken(ASKED))
    done = await gateway.chat()
    assert (done.choices[0].message.content, done.usage.completion_tokens_details) == (ASKED, None)


async def test_reasoning_is_sent_back(gateway):
    gateway.plays(*spoken(ASKED))
    message = (await gateway.chat()).choices[0].message
    await gateway.chat([*HELLO, message.model_dump(), *HELLO])
    _, said, _ = gateway.fake.requests[1].chat.messages
    assert (said.reasoning, said.content) == (DRAFT, "Which city?")
