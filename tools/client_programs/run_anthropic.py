import json

from anthropic import Anthropic
from check import BASE, CITY, KEY, MODEL, check

client = Anthropic(base_url=BASE, api_key=KEY, max_retries=0)
ask = [{"role": "user", "content": "The capital of France is"}]


@check("message")
def _():
    return client.messages.create(model=MODEL, messages=ask, max_tokens=8).content[0].text


@check("stream")
def _():
    with client.messages.stream(model=MODEL, messages=ask, max_tokens=8) as stream:
        return stream.get_final_message().usage.output_tokens


@check("tools")
def _():
    tool = {"name": "weather", "description": "the weather", "input_schema": CITY}
    reply = client.messages.create(model=MODEL, messages=ask, max_tokens=64, tools=[tool], tool_choice={"type": "any"})
    return reply.stop_reason == "tool_use"


SYSTEM = [{"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}}]
TOOLS = [
    {"name": name, "description": f"the tool {name}", "input_schema": CITY, "cache_control": {"type": "ephemeral"}}
    for name in ("Read", "Grep", "Bash")
]
AGENT = {"model": MODEL, "system": SYSTEM, "tools": TOOLS}


def results(calls, failed=()):
    """Return the user's turn: a result for each call, some of them errors, then more text."""
    blocks = [
        {"type": "tool_result", "tool_use_id": call.id, "is_error": place in failed, "content": [text("not found")]}
        for place, call in enumerate(calls)
    ]
    return {"role": "user", "content": [*blocks, text("go on")]}


def text(words):
    return {"type": "text", "text": words}


def turn(messages, choice):
    """Stream one turn, check its events and its usage, add it to `messages`, and return its calls."""
    kinds, parts = [], {}
    with client.messages.stream(**AGENT, messages=messages, max_tokens=48, tool_choice=choice) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                parts[event.index] = parts.get(event.index, "") + event.delta.partial_json
        message = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop"), kinds
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(message.content), kinds
    for place, block in enumerate(message.content):
        if block.type == "tool_use":
            assert json.loads(parts[place]) == block.input, (parts[place], block.input)
    assert message.usage.output_tokens > 0
    messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
    return [block for block in message.content if block.type == "tool_use"]


@check("tool loop of an agent")
def _():
    """Three streamed turns with forced calls and their results, then a turn of text."""
    messages, counts = [{"role": "user", "content": [text("Where is Paris?")]}], []
    for choice in (
        {"type": "any"},
        {"type": "tool", "name": "Bash"},
        {"type": "any", "disable_parallel_tool_use": True},
    ):
        calls = turn(messages, choice)
        assert [call.name for call in calls[:1]] in (["Read"], ["Grep"], ["Bash"]), calls
        assert choice["type"] != "tool" or calls[0].name == "Bash", calls
        assert len(calls) == 1 or "disable_parallel_tool_use" not in choice, calls
        messages.append(results(calls, failed={0}))
        counts.append(client.messages.count_tokens(**AGENT, messages=messages).input_tokens)
    assert counts == sorted(set(counts)), counts
    final = client.messages.create(**AGENT, messages=messages, max_tokens=4, tool_choice={"type": "none"})
    return final.stop_reason in {"end_turn", "max_tokens"} and final.usage.input_tokens > 0


@check("parallel tool results")
def _():
    """A turn with two calls and both results, whose prompt has as many tokens as it is counted."""
    uses = [
        {"type": "tool_use", "id": f"toolu_{place}", "name": name, "input": {"city": "Rome"}}
        for place, name in enumerate(("Read", "Grep"))
    ]
    calls = [type("Call", (), use) for use in uses]
    messages = [*ask, {"role": "assistant", "content": [text("Both."), *uses]}, results(calls, failed={1})]
    given = {**AGENT, "messages": messages}
    counted, reply = client.messages.count_tokens(**given).input_tokens, client.messages.create(**given, max_tokens=4)
    usage = reply.usage
    total = usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted == total, (counted, usage)
    return True
