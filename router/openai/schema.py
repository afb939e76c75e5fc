"""The bodies of `/v1/completions` and `/v1/chat/completions`, with tools and past tool calls.

All bodies are frozen, closed (an unknown field is rejected by name) and strict (a number is not a string). The router
checks ranges of sampling parameters; here only values that the gRPC protocol cannot carry are rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from baton.limits import MAX_CHAT_MESSAGES, MAX_CHOICES, MAX_HTTP_NAME_CHARS, MAX_HTTP_PROMPTS, MAX_HTTP_TOOLS


class Body(BaseModel):
    """Base of all bodies: closed, strict and frozen."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    tags: ClassVar[frozenset[str]] = frozenset()  # kinds of items, which pydantic adds to the places of mistakes

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, value: object) -> object:
        """Omit unknown fields that are null: clients send the defaults of all fields of other servers."""
        if not isinstance(value, dict) or None not in value.values():
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: each for name, each in value.items() if each is not None or name in known}


_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}", re.ASCII)
_CHOICE = 'must be none, auto, required, or {"type": "function", "function": {"name": ...}}'


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError("must be 1 to 128 of the characters A-Z a-z 0-9 _ -")
    return value


def _of_object(value: dict[str, Any]) -> dict[str, Any]:
    if value.get("type", "object") != "object":
        raise ValueError("must be a JSON schema of type object")
    return value


def _arguments(value: str) -> str:
    try:
        found = json.loads(value or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("must be a string that contains a JSON object")
    return value


class Function(Body):
    """A callable function. Without `parameters` it takes none."""

    name: Annotated[str, AfterValidator(_name)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_of_object)] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; the only kind is a function."""

    type: Literal["function"]
    function: Function


CalledName = Annotated[str, Field(max_length=MAX_HTTP_NAME_CHARS)]


class CalledFunction(Body):
    """A past call by the model; `arguments` is JSON. `parsed_arguments` of the openai package has no effect."""

    name: CalledName
    arguments: Annotated[str, AfterValidator(_arguments)]
    parsed_arguments: Any = None


class ToolCall(Body):
    """A call in an earlier answer. `index` is left from a stream."""

    id: str
    index: int | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


def _tool_choice(value: object) -> object:
    """Return `tool_choice` with a function as a list of its name, and other choices unchanged. Raises ValueError."""
    if value is None or value in ("none", "auto", "required"):
        return value
    given = without_nulls(value)
    function = without_nulls(given.get("function"))
    if {*given} != {"type", "function"} or given["type"] != "function" or {*function} != {"name"}:
        raise ValueError(_CHOICE)
    if not isinstance(function["name"], str):
        raise ValueError(_CHOICE)
    return [function["name"]]


def without_nulls(value: object) -> dict[str, Any]:
    """Return an object without its nulls, which count as omitted; {} for other values."""
    return {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else {}


def _check_choice(tools: Sequence[Tool], choice: object) -> None:
    names = [tool.function.name for tool in tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ValueError(f"tools[{place}].function.name: must be unique among tools")
    if choice in (None, "none", "auto"):
        return
    if not names:
        raise ValueError("tool_choice: only allowed with tools")
    if isinstance(choice, list) and choice[0] not in names:
        raise ValueError(f"tool_choice: must name one of tools: {', '.join(names)}")


_ID_LIMIT = 2**32

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=_ID_LIMIT)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Prompt: TypeAlias = str | list[int]
Stop: TypeAlias = Annotated[
    list[str],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=str | list[str]),
]
_ID_LIST = {"type": "array", "items": {"type": "integer"}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        _ID_LIST,
        {"type": "array", "items": _ID_LIST},
    ]
}
_PROMPT = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"


def _by_id(value: dict[str, float]) -> dict[str, float]:
    for key in value:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < _ID_LIMIT):
            raise ValueError(f"keys must be token ids, got {key[:32]!r}")
    return value


def _ids(value: object) -> bool:
    return isinstance(value, list) and all(type(each) is int and 0 <= each < _ID_LIMIT for each in value)


def _prompts(value: object) -> list[Prompt]:
    """Return a list of prompts from any of the accepted forms. Raises ValueError."""
    if isinstance(value, str) or (_ids(value) and value):
        return [value]  # type: ignore[list-item]  # checked above
    if not isinstance(value, list) or not value:
        raise ValueError(_PROMPT if value != [] else "must not be empty")
    if not (all(isinstance(each, str) for each in value) or all(_ids(each) for each in value)):
        raise ValueError(_PROMPT)
    if len(value) > MAX_HTTP_PROMPTS:
        raise ValueError(f"must be at most {MAX_HTTP_PROMPTS} prompts, got {len(value)}")
    return value


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage in each chunk; load generators count tokens by it
    include_obfuscation: Literal[False] | None = None


# vLLM's older fields, and the same of `structured_outputs`.
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def _json_schema(value: object) -> object:
    if value is None or isinstance(value, dict | str):
        return value
    raise ValueError("must be an object or a string")


DefaultOff = Annotated[Literal[False] | None, AfterValidator(lambda _: None)]  # equal whether it is given or not


class StructuredOutputs(Body):
    """vLLM's constraints of an answer's text; exactly one is set."""

    json_schema: Annotated[dict[str, Any] | str | None, Field(alias="json"), BeforeValidator(_json_schema)] = None
    regex: str | None = None
    choice: list[str] | None = None
    json_object: Literal[True] | None = None
    grammar: str | None = None
    structural_tag: None = None
    disable_fallback: DefaultOff = None
    disable_any_whitespace: DefaultOff = None
    disable_additional_properties: DefaultOff = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        kinds = self.json_schema, self.regex, self.choice, self.json_object, self.grammar
        if sum(value is not None for value in kinds) != 1:
            raise ValueError("must have exactly one of json, regex, choice, json_object and grammar")
        return self


class Common(Body):
    """Fields of both endpoints: OpenAI's first, then extensions."""

    model: str | None = None
    max_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | None = None
    seed: Seed | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], AfterValidator(_by_id)] | None = None
    user: str | None = None
    # hints of OpenAI's API, which change no token
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    # extensions
    top_k: Int32 | None = None
    min_p: float | None = None
    min_tokens: Int32 | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[TokenId] | None = None
    cache_salt: str | None = None
    priority: Int32 | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    deterministic: bool | None = None
    receipt: bool | None = None
    thoughts: bool | None = None
    think_while_decoding: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[dict[str, Any] | str | None, BeforeValidator(_json_schema)] = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    @property
    def wanted_text(self) -> tuple[str, StructuredOutputs] | None:
        """The constraint of vLLM's fields and the name of its field, or None."""
        return next(iter(self._constraints()), None)

    @model_validator(mode="after")
    def _has_one_constraint(self) -> Common:
        given = list(self._constraints())
        for name, value in given[1:]:  # clients of several versions of vLLM send the same constraint in both forms
            if value != given[0][1]:
                raise ValueError(f"{name}: cannot be combined with {given[0][0]}")
        return self

    def _constraints(self) -> Iterator[tuple[str, StructuredOutputs]]:
        if self.structured_outputs is not None:
            yield "structured_outputs", self.structured_outputs
        for name, key in _GUIDED.items():
            if (value := self.model_dump(include={name})[name]) is not None:
                yield name, StructuredOutputs.model_validate({key: value})

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed with stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: only allowed without stream")
        options = self.stream_options or StreamOptions()
        if options.continuous_usage_stats and not options.include_usage:
            raise ValueError("stream_options.continuous_usage_stats: only allowed with include_usage: true")
        return self


class CompletionBody(Common):
    """Body of `POST /v1/completions`."""

    prompt: Annotated[Any, AfterValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    best_of: Int32 | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _best_is_all(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError(f"best_of: not supported unless it equals n ({self.n or 1}), got {self.best_of}")
        return self


def _joined(value: object) -> object:
    """Join text parts with newlines, as vLLM does for templates that expect a string. Raises ValueError. Clients of
    several APIs send `cache_control`, a hint: prompts are always cached.
    """
    if not isinstance(value, list):
        return value
    parts = [
        {name: each for name, each in part.items() if each is not None and name != "cache_control"}
        for part in value
        if isinstance(part, dict)
    ]
    if len(parts) < len(value) or any(set(part) != {"type", "text"} or part["type"] != "text" for part in parts):
        raise ValueError('parts must be {"type": "text", "text": ...}; other kinds are not supported')
    if not all(isinstance(part["text"], str) for part in parts):
        raise ValueError("the text of a part must be a string")
    return "\n".join(part["text"] for part in parts)


class Message(Body):
    """One message. The fields that must be null occur when clients send an earlier answer back. `parsed` (of the openai
    package), `sender` and `tool_name` (of Swarm) have no effect.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[dict[str, Any]] | None)]
    name: Annotated[str | None, Field(max_length=MAX_HTTP_NAME_CHARS)] = None
    refusal: None = None
    annotations: list[None] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None
    sender: str | None = None
    tool_name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Annotated[str | None, Field(validate_default=True)] = None

    @model_validator(mode="before")
    @classmethod
    def _calls_need_no_words(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("tool_calls") and value.get("content") is None:
            return value | {"content": ""}
        return value

    @field_validator("tool_calls")
    @classmethod
    def _of_the_assistant(cls, value: list[ToolCall] | None, info: ValidationInfo) -> list[ToolCall] | None:
        if value and info.data.get("role", "assistant") != "assistant":
            raise ValueError("only allowed with role assistant")
        return value

    @field_validator("tool_call_id")
    @classmethod
    def _of_a_tool(cls, value: str | None, info: ValidationInfo) -> str | None:
        if (value is None) == (info.data.get("role") == "tool"):
            raise ValueError("required with role tool and not allowed with other roles")
        return value


class DetokenizeBody(Body):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[TokenId]


class JsonSchema(Body):
    """The schema of an answer."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    shape: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """Format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is required with type json_schema and not allowed with other types")
        return self


class ChatBody(Common):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_CHAT_MESSAGES)]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_HTTP_TOOLS)] | None = None
    tool_choice: Annotated[
        Any, AfterValidator(_tool_choice), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})
    ] = None
    parallel_tool_calls: bool | None = None
    # vLLM's
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    @property
    def offered(self) -> list[Tool]:
        """Tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced(self) -> list[Tool]:
        """Tools of which the model must call one; empty if a call is optional."""
        if isinstance(self.tool_choice, list):
            return [tool for tool in self.offered if tool.function.name == self.tool_choice[0]]
        return self.offered if self.tool_choice == "required" else []

    @model_validator(mode="after")
    def _fields_fit(self) -> ChatBody:
        _check_choice(self.tools or [], self.tool_choice)
        wanted = self.response_format is not None and self.response_format.type != "text"
        if self.wanted_text is not None and (wanted or self.offered):
            other = "response_format" if wanted else "tools"
            raise ValueError(f"{self.wanted_text[0]}: cannot be combined with {other}")
        called = set[str]()
        for place, message in enumerate(self.messages):
            called |= {call.id for call in message.tool_calls or ()}
            if message.tool_call_id is not None and message.tool_call_id not in called:
                raise ValueError(f"messages[{place}].tool_call_id: must be the id of a call in an earlier message")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only allowed with logprobs: true")
        if None not in {self.max_tokens, self.max_completion_tokens} and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: must be omitted or equal to max_completion_tokens")
        return self


class TokenizeBody(Body):
    """Body of `POST /tokenize`: a text, or a chat that the template of the model renders."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_CHAT_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_HTTP_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _is_text_or_chat(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: exactly one of prompt and messages must be set")
        chat = "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"
        if self.prompt is not None and (wrong := [name for name, value in self if name in chat and value is not None]):
            raise ValueError(f"{wrong[0]}: only allowed with messages")
        return self
