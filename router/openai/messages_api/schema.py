"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from itertools import takewhile
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from baton.limits import MAX_CHAT_MESSAGES, MAX_HTTP_TOOLS
from router.openai.schema import Body, CalledName, Int32


class _Block(Body):
    cache_control: dict[str, Any] | None = None  # a hint: prompts are always cached


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Text(_Block):
    """A piece of text."""

    type: Literal["text"]
    text: str
    citations: list[None] | None = None


Texts: TypeAlias = Annotated[list[Text], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Text])]


class Thinking(_Block):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUse(_Block):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: CalledName
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class ToolResult(_Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


Block: TypeAlias = Annotated[Text | Thinking | ToolUse | ToolResult, Field(discriminator="type")]
_KINDS = {"user": (Text, ToolResult), "assistant": (Text, Thinking, ToolUse)}


class Turn(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant"]
    content: Annotated[list[Block], BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])]

    @model_validator(mode="after")
    def _kinds_fit(self) -> Turn:
        wrong = [block.type for block in self.content if not isinstance(block, _KINDS[self.role])]
        if wrong:
            raise ValueError(f"content: {wrong[0]} is not allowed with role {self.role}")
        return self


class Tool(_Block):
    """A function."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None


class ToolChoice(Body):
    """Whether a call is optional."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _is_named(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is required with type tool and not allowed with other types")
        return self


class Format(Body):
    """The format of the answer's text."""

    type: Literal["json_schema"]
    shape: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Format of the answer, and a hint without effect."""

    format: Format | None = None
    effort: str | None = None


class CountBody(Body):
    """Body of `POST /v1/messages/count_tokens`: the fields that make the prompt."""

    tags = frozenset({"text", "thinking", "tool_use", "tool_result"})

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_CHAT_MESSAGES)]
    system: Texts | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_HTTP_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: dict[str, Any] | None = None  # a hint without effect: the model and its template decide
    cache_control: dict[str, Any] | None = None  # a hint: prompts are always cached
    output_config: OutputConfig | None = None

    @model_validator(mode="after")
    def _results_have_calls(self) -> CountBody:
        called = set[str]()
        for place, turn in enumerate(self.messages):
            for number, block in enumerate(turn.content):
                if isinstance(block, ToolUse):
                    called.add(block.id)
                elif isinstance(block, ToolResult) and block.tool_use_id not in called:
                    where = f"messages[{place}].content[{number}].tool_use_id"
                    raise ValueError(f"{where}: must be the id of a tool_use in an earlier message")
        last = takewhile(lambda turn: turn.role == self.messages[-1].role, reversed(self.messages))  # they are one turn
        if any(isinstance(block, ToolUse) for turn in last for block in turn.content):
            raise ValueError("messages: the last one must not have a tool_use: send its tool_result too")
        return self


class MessagesBody(CountBody):
    """Body of `POST /v1/messages`."""

    max_tokens: Int32
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    receipt: bool | None = None
