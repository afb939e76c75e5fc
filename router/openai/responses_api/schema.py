"""The body of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from baton.limits import MAX_CHAT_MESSAGES, MAX_HTTP_TOOLS
from router.openai.schema import Body, CalledName, Int32, Seed, without_nulls

_STORED = "not supported by this server, because it stores no responses; send the earlier items in input"


class Part(Body):
    """A piece of text."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _as_items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Parts: TypeAlias = Annotated[list[Part], BeforeValidator(_as_parts)]


class _Item(Body):
    id: str | None = None
    status: str | None = None


class MessageItem(_Item):
    """A message; those of an earlier answer can be sent back."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    phase: str | None = None


class CallItem(_Item):
    """A call in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: CalledName
    arguments: str
    namespace: str | None = None
    caller: dict[str, Any] | None = None


class OutputItem(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts
    caller: dict[str, Any] | None = None


class ReasoningItem(_Item):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: list[Part] | None = None
    content: list[Part] | None = None
    encrypted_content: str | None = None


def _kind(value: object) -> object:
    given = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "message" if given is None else given


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class ResponsesTool(Body):
    """A function."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None


def _choice(value: Any) -> Any:
    if value in (None, "none", "auto", "required"):
        return value
    named = without_nulls(value)
    if {*named} == {"type", "name"} and named["type"] == "function" and isinstance(named["name"], str):
        return named
    raise ValueError('must be none, auto, required, or {"type": "function", "name": ...}')


class NamedChoice(Body):
    """The function to call."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """Format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    shape: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextOptions(Body):
    """Format of the answer's text, and a hint."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesStream(Body):
    """Options of a stream."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Body):
    """Body of `POST /v1/responses`."""

    tags = frozenset({"message", "function_call", "function_call_output", "reasoning"})

    model: str | None = None
    input: Annotated[
        list[Item],
        Field(min_length=1, max_length=MAX_CHAT_MESSAGES),
        BeforeValidator(
            _as_items,
            json_schema_input_type=str | Annotated[list[Item], Field(min_length=1, max_length=MAX_CHAT_MESSAGES)],
        ),
    ]
    instructions: str | None = None
    max_output_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: ResponsesStream | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_HTTP_TOOLS)] | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedChoice | None, BeforeValidator(_choice)] = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    user: str | None = None
    # hints, which change no token
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    truncation: Literal["disabled"] | None = None
    # accepted only with the value of no effect
    background: Literal[False] | None = None
    conversation: Any = None
    previous_response_id: Any = None
    top_logprobs: Literal[0] | None = None
    # extensions
    chat_template_kwargs: dict[str, Any] | None = None
    seed: Seed | None = None
    top_k: Int32 | None = None
    receipt: bool | None = None

    @model_validator(mode="after")
    def _needs_no_store(self) -> ResponsesBody:
        for name, value in (("previous_response_id", self.previous_response_id), ("conversation", self.conversation)):
            if value is not None:
                raise ValueError(f"{name}: {_STORED}")
        return self
