"""Translation of a Messages body to a chat body, and of names of fields in errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from router.openai.errors import Json
from router.openai.formats.wire import json_text
from router.openai.job import Job, chat_job, http_names, translated
from router.openai.messages_api.answer import MessagesWire
from router.openai.messages_api.schema import CountBody, MessagesBody, Text, Thinking, Tool, ToolResult, ToolUse, Turn
from router.openai.parsing import validated
from router.openai.schema import ChatBody, TokenizeBody

_NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def messages_job(body: MessagesBody, tool_form: str, reasoning_form: str) -> Job:
    """Return the job of chat for a body, with answers in the form of this API. Raises InvalidRequest."""
    asked = _prompt(body) | {
        "model": body.model,
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stream": body.stream,
        "receipt": body.receipt,
    }
    if (choice := body.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        asked["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
        asked["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    if body.output_config is not None and body.output_config.format is not None:
        shape = {"name": "answer", "schema": body.output_config.format.shape}
        asked["response_format"] = {"type": "json_schema", "json_schema": shape}
    given = {name: value for name, value in asked.items() if value is not None}
    names = field_names(body)
    with http_names(names):
        job = chat_job(validated(given, ChatBody), tool_form, reasoning_form)
    return replace(translated(job, MessagesWire(), names), running_usage=True)


def field_names(body: CountBody) -> dict[str, str]:
    """Return the fields of a body by those of its chat, where a system text and each result of a call is a message."""
    names = dict(_NAMES)
    for place in range(len(body.tools or ())):
        names[f"tools[{place}].function.parameters"] = f"tools[{place}].input_schema"
        names[f"tools[{place}].function"] = f"tools[{place}]"
    places = ["system"] * bool(body.system and _texts(body.system))
    places += [f"messages[{number}]" for number, turn in _turns(body.messages) for _ in _messages(turn)]
    return names | {f"messages[{number}]": place for number, place in enumerate(places)}


def count_body(body: CountBody) -> TokenizeBody:
    """Return the call of `/tokenize` for the prompt. Raises InvalidRequest."""
    asked = _prompt(body)
    if body.tool_choice is not None and body.tool_choice.type == "none":
        asked["tools"] = None
    return validated(asked | {"model": body.model}, TokenizeBody)


def _prompt(body: CountBody) -> Json:
    system = _texts(body.system) if body.system else ""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [message for _, turn in _turns(body.messages) for message in _messages(turn)]
    tools = [_tool(tool) for tool in body.tools] if body.tools else None
    continued = True if body.messages[-1].role == "assistant" else None  # the answer's beginning is given
    return {"messages": messages, "tools": tools, "continue_final_message": continued}


def _turns(turns: Sequence[Turn]) -> Iterator[tuple[int, Turn]]:
    """Yield the turns, each with the place of its first part. Consecutive ones of one role are one, as in Anthropic's
    API: many templates demand that roles alternate.
    """
    for _, group in groupby(enumerate(turns), key=lambda each: each[1].role):
        (place, first), *rest = group
        yield place, first.model_copy(update={"content": [*first.content, *(b for _, t in rest for b in t.content)]})


def _messages(turn: Turn) -> Iterator[Json]:
    """Yield the messages of a turn; each result of a call is one."""
    blocks = turn.content
    for block in blocks:
        if isinstance(block, ToolResult):
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _texts(block.content or ())}
    text = _texts([block for block in blocks if isinstance(block, Text)])
    if turn.role == "user":
        if text or not any(isinstance(block, ToolResult) for block in blocks):
            yield {"role": "user", "content": text}
        return
    message: Json = {"role": "assistant", "content": text}
    if calls := [_call(block) for block in blocks if isinstance(block, ToolUse)]:
        message["tool_calls"] = calls
    if thoughts := [block.thinking for block in blocks if isinstance(block, Thinking)]:
        message["reasoning_content"] = "\n".join(thoughts)
    yield message


def _texts(blocks: Sequence[Text]) -> str:
    return "\n".join(block.text for block in blocks)


def _call(block: ToolUse) -> Json:
    function = {"name": block.name, "arguments": json_text(block.input, "messages")}
    return {"id": block.id, "type": "function", "function": function}


def _tool(tool: Tool) -> Json:
    function = {"name": tool.name, "parameters": tool.input_schema}
    return {"type": "function", "function": function | ({"description": tool.description} if tool.description else {})}
