"""Translation of a Responses body to a chat body."""

from __future__ import annotations

from collections.abc import Sequence

from router.openai.errors import Json
from router.openai.formats.wire import json_text
from router.openai.job import Job, chat_job, http_names, translated
from router.openai.parsing import validated
from router.openai.responses_api.answer import ResponsesWire
from router.openai.responses_api.schema import (
    CallItem,
    Item,
    MessageItem,
    NamedChoice,
    OutputItem,
    Part,
    ReasoningItem,
    ResponsesBody,
    ResponsesTool,
    TextFormat,
)
from router.openai.schema import ChatBody

_SAME = (
    "model",
    "temperature",
    "top_p",
    "stream",
    "parallel_tool_calls",
    "user",
    "chat_template_kwargs",
    "seed",
    "top_k",
    "receipt",
)
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}


def responses_job(body: ResponsesBody, tool_form: str, reasoning_form: str) -> Job:
    """Return the job of chat for a body, with answers in the form of this API. Raises InvalidRequest."""
    asked = body.model_dump(include={*_SAME}, exclude_none=True)
    messages, names = _messages(body)
    asked |= {"messages": messages, "max_completion_tokens": body.max_output_tokens}
    if body.tools:
        asked["tools"] = [_tool(tool) for tool in body.tools]
    if isinstance(choice := body.tool_choice, NamedChoice):
        asked["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        asked["tool_choice"] = choice
    asked["reasoning_effort"] = (body.reasoning or {}).get("effort")
    if body.text is not None and body.text.format is not None:
        asked["response_format"] = _format(body.text.format)
    with http_names(names):
        job = chat_job(validated(asked, ChatBody), tool_form, reasoning_form)
    wire = ResponsesWire(body)
    json_text([wire.asked], "body")  # as deep as in the answer
    return translated(job, wire, names)


def _messages(body: ResponsesBody) -> tuple[list[Json], dict[str, str]]:
    """Return the messages of chat, and the fields of the body by those of chat."""
    found: list[Json] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    names, reasoning = {"messages[0]": "instructions"} if found else {}, ""  # reasoning of the next message
    for number, item in enumerate(body.input):
        names[f"messages[{len(found)}].tool_call_id"] = f"input[{number}].call_id"
        names[f"messages[{len(found)}]"] = f"input[{number}]"
        if isinstance(item, ReasoningItem):
            reasoning = _text(item.content or item.summary or ())
            continue
        _add(found, item, {"reasoning_content": reasoning} if reasoning else {})
        reasoning = ""
    return found, names | _NAMES


def _add(found: list[Json], item: Item, reasoning: Json) -> None:
    """Add an item; calls after a message of the assistant, or after other calls, are a part of it."""
    match item:
        case MessageItem():
            own = reasoning if item.role == "assistant" else {}
            found.append({"role": item.role, "content": _text(item.content)} | own)
        case OutputItem():
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        case CallItem():
            if reasoning or not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""} | reasoning)
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            found[-1].setdefault("tool_calls", []).append(call)


def _text(parts: Sequence[Part]) -> str:
    return "\n".join(part.text for part in parts)


def _tool(tool: ResponsesTool) -> Json:
    fields = {"name", "description", "parameters", "strict"}
    return {"type": "function", "function": tool.model_dump(include=fields, exclude_none=True)}


def _format(wanted: TextFormat) -> Json:
    if wanted.type != "json_schema" and wanted.shape is None:
        return {"type": wanted.type}
    shape = {"name": wanted.name, "strict": wanted.strict, "schema": wanted.shape}
    return {"type": wanted.type, "json_schema": shape}
