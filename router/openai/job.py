"""Translation of typed bodies to router calls. `/v1/completions` makes one call per prompt; choices keep the order of
the prompts. `/v1/chat/completions` makes one call; the router renders the chat template.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from baton.client._retry import RESUMABLE_S
from baton.errors import InvalidRequest, Violation
from baton.limits import MAX_HTTP_COUNTS
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from router.openai.choices import ChatFormat, ChoiceFormat, CompletionFormat, Reading
from router.openai.errors import Json
from router.openai.formats.forced import calls_or, forced_schema
from router.openai.formats.wire import AnswerWire
from router.openai.formats.wire import json_text as _json
from router.openai.logprobs.prompt import Wanted
from router.openai.schema import ChatBody, Common, CompletionBody, Message, Prompt, StreamOptions, TokenizeBody, Tool
from router.openai.upstream import EventId, Rename, wrong_id

_SAMPLING = frozenset(common_pb2.Sampling.DESCRIPTOR.fields_by_name) - {"max_tokens", "top_k", "seed", "logit_bias"}
_EVENT_ID = re.compile(r"([A-Za-z0-9_-]{1,64})((?:\+[A-Za-z0-9_-]{0,64})*):([0-9]{1,9}(?:\.[0-9]{1,9})*)", re.ASCII)
_FORMAT = "response_format.json_schema.schema"
_NAMES = {"cache_scope": "cache_salt", "client_tag": "user"}


@dataclass(frozen=True, slots=True)
class Job:
    """The calls of one HTTP request. Choice c of call i is choice i * n + c of the answer."""

    requests: Sequence[pb.GenerateRequest]
    format: ChoiceFormat
    rename: Rename
    n: int
    stream: bool
    usage: bool  # in the last chunk of a stream, and null in earlier ones, as OpenAI does
    running_usage: bool  # also in each earlier chunk, of its choice so far
    logprobs: bool
    thoughts: bool
    wire: AnswerWire = field(default_factory=AnswerWire)
    returns: Wanted = field(default_factory=Wanted)  # of the prompts

    @property
    def has_ids(self) -> bool:
        """Whether events have ids, which list all calls. A record of a stream has no prompt."""
        return self.stream and self.wire.resumable and self.slots <= MAX_HTTP_COUNTS and not self.returns.echo

    @property
    def slots(self) -> int:
        """Numbers of events in an `EventId`."""
        return len(self.requests) * self.n * (1 + self.thoughts) + 1


def event_id(job: Job, value: str) -> EventId:
    """Return the event that the header `last-event-id` names. Raises InvalidRequest."""
    if not job.has_ids:
        most = (MAX_HTTP_COUNTS - 1) // (1 + job.thoughts)
        allowed = f"only allowed with stream: true and without echo, for at most {most} choices"
        raise InvalidRequest(wrong_id(value, allowed))
    calls = len(job.requests)
    if (found := _EVENT_ID.fullmatch(value)) is not None:
        counts = tuple(map(int, found[3].split(".")))
        names = tuple(found[2].split("+")[1:]) or (found[1],)
        event = EventId(found[1], names, counts)
        if len(names) == calls and len(counts) == job.slots and not any(event.lacks_name(i) for i in range(calls)):
            return event
    form = "REQUEST" if calls == 1 else f"REQUEST and {calls} times +REQUEST"
    allowed = f"must be the id of an event of this request: {form}, a colon, and {job.slots} counts with dots between"
    raise InvalidRequest(wrong_id(value, allowed))


def chat_job(body: ChatBody, tool_form: str = "", reasoning_form: str = "") -> Job:
    """Return the call for a chat body. `tool_form` and `reasoning_form` are the model's. Raises InvalidRequest."""
    given = body.max_completion_tokens is not None
    request = _base_request(body, body.max_completion_tokens if given else body.max_tokens)
    request.chat.CopyFrom(_chat(body, body.offered))
    if body.reasoning_effort is not None:
        request.chat.reasoning_effort = body.reasoning_effort
    schema = _schema(body, tool_form)
    if schema is not None:
        request.constraint.json_schema = _json(schema, "tools" if body.forced else _FORMAT)
    if body.logprobs:
        request.logprobs = body.top_logprobs or 0
    names = _names("max_completion_tokens" if given else "max_tokens", _constrained_by(body))
    read = body.offered if tool_form != "none" or body.forced else []
    tools = {tool.function.name: tool.function.parameters or {} for tool in read}
    shown = ChatFormat(Reading(reasoning_form, tool_form, tools, body.parallel_tool_calls is not False))
    returns = Wanted(vllm_top=body.prompt_logprobs)
    if returns.top is not None:
        request.prompt_logprobs = returns.top
    logprobs = bool(body.logprobs)
    return _job(body, [request], shown, lambda _, field: _http_name(field, names), logprobs=logprobs, returns=returns)


TOKENIZED = {
    "chat.continue_final_message": "continue_final_message",
    "text": "prompt",
    "ids": "tokens",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat": "messages",
}


@contextmanager
def http_names(names: dict[str, str]) -> Iterator[None]:
    """Replace protocol fields in an InvalidRequest of the block by their HTTP `names`."""
    try:
        yield
    except InvalidRequest as error:
        named = (Violation(_http_name(each.field, names), each.description) for each in error.violations)
        raise InvalidRequest(*named) from None


def translated(job: Job, wire: AnswerWire, names: dict[str, str]) -> Job:
    """Return a job of chat for another API: `names` are its fields by those of chat."""

    def rename(number: int, field: str) -> str:
        return _http_name(job.rename(number, field), names)

    return replace(job, wire=wire, rename=rename, usage=True)


def tokenize_call(body: TokenizeBody) -> pb.TokenizeRequest:
    """Return the call for a body of `/tokenize`. Raises InvalidRequest."""
    if body.messages is None:
        text = body.prompt or ""
        return pb.TokenizeRequest(model=body.model or "", text=text, add_special_tokens=body.add_special_tokens)
    chat = _chat(body, body.tools or ())
    return pb.TokenizeRequest(model=body.model or "", chat=chat, add_special_tokens=body.add_special_tokens)


def _chat(body: ChatBody | TokenizeBody, tools: Sequence[Tool]) -> pb.ChatMessages:
    called, kwargs = dict[str, str](), body.chat_template_kwargs
    chat = pb.ChatMessages(
        add_generation_prompt=body.add_generation_prompt, continue_final_message=body.continue_final_message
    )
    for message in body.messages or ():
        called |= {call.id: call.function.name for call in message.tool_calls or ()}  # ids may come again
        chat.messages.append(_turn(message, called.get(message.tool_call_id or "")))
    if tools:
        chat.tools = _json([_shown(tool) for tool in tools], "tools")
    if kwargs is not None:
        chat.template_kwargs = _json(kwargs, "chat_template_kwargs")
    return chat


def completion_job(body: CompletionBody) -> Job:
    """Return the calls for a completion body, one per prompt."""
    prompts: list[Prompt] = body.prompt

    def rename(number: int, field: str) -> str:
        here = f"prompt[{number}]" if prompts[1:] else "prompt"
        names = _constraint_names(body.wanted_text[0]) if body.wanted_text else {}
        names |= {} if body.prompt_logprobs == returns.top else {"prompt_logprobs": "logprobs"}
        return _http_name(field, names | {"text": here, "token_ids": here, "prompt": here})

    base = _base_request(body, body.max_tokens)
    if body.logprobs is not None:
        base.logprobs = body.logprobs
    returns = Wanted(bool(body.echo), body.logprobs if body.echo else None, body.prompt_logprobs)
    if returns.top is not None:
        base.prompt_logprobs = returns.top
    requests = [_with_prompt(base, prompt) for prompt in prompts]
    return _job(body, requests, CompletionFormat(), rename, logprobs=body.logprobs is not None, returns=returns)


def _job(
    body: Common,
    requests: list[pb.GenerateRequest],
    shown: ChoiceFormat,
    rename: Rename,
    *,
    logprobs: bool,
    returns: Wanted,
) -> Job:
    options = body.stream_options or StreamOptions()
    return Job(
        requests, format=shown, rename=rename, n=body.n or 1, stream=bool(body.stream), logprobs=logprobs,
        usage=bool(options.include_usage or body.receipt), running_usage=bool(options.continuous_usage_stats),
        thoughts=bool(body.thoughts), returns=returns,
    )  # fmt: skip


def _base_request(body: Common, max_tokens: int | None) -> pb.GenerateRequest:
    """Return a request without prompt, logprobs and constraint. Fields that the body omits stay unset."""
    sampling = common_pb2.Sampling(
        **body.model_dump(include=set(_SAMPLING), exclude_none=True),
        logit_bias={int(token_id): value for token_id, value in (body.logit_bias or {}).items()},
        max_tokens=max_tokens,
        top_k=0 if body.top_k == -1 else body.top_k,  # other APIs use -1 for "off"
        seed=None if body.seed is None else body.seed % 2**64,
    )
    return pb.GenerateRequest(
        model=body.model or "",
        sampling=sampling,
        constraint=_constraint(body),
        client_tag=body.user or "",
        resumable_s=RESUMABLE_S if body.stream else 0.0,
        n=body.n,
        deterministic=body.deterministic,
        receipt=body.receipt,
        thoughts=body.thoughts,
        think_while_decoding=body.think_while_decoding,
        priority=body.priority,
        ttft_ms=body.ttft_ms,
        itl_ms=body.itl_ms,
        cache_scope=body.cache_salt,
        add_special_tokens=body.add_special_tokens,
    )


def _constraint(body: Common) -> pb.Constraint | None:
    """Return the constraint of vLLM's fields. A schema may be JSON in a string, too."""
    if body.wanted_text is None:
        return None
    field, wanted = body.wanted_text
    if wanted.regex is not None:
        return pb.Constraint(regex=wanted.regex)
    if wanted.grammar is not None:
        return pb.Constraint(grammar=wanted.grammar)
    if wanted.choice is not None:
        return pb.Constraint(choices=pb.Choices(texts=wanted.choice))
    shape = {"type": "object"} if wanted.json_schema is None else wanted.json_schema
    return pb.Constraint(json_schema=shape if isinstance(shape, str) else _json(shape, field))


def _constrained_by(body: ChatBody) -> str:
    """Return the HTTP field that the call's constraint comes from."""
    if body.forced:
        return "tools"
    return "response_format" if body.wanted_text is None else body.wanted_text[0]


def _http_name(field: str, more: dict[str, str]) -> str:
    """Map a protocol field to its HTTP field: `sampling.top_p` to `top_p`, `cache_scope` to `cache_salt`."""
    name = field.removeprefix("spec.").removeprefix("sampling.")
    for known, http in (_NAMES | more).items():
        if name == known or name.startswith((f"{known}.", f"{known}[")):
            return http + name.removeprefix(known)
    return name


def _constraint_names(field: str) -> dict[str, str]:
    """Return the HTTP names of a constraint's protocol fields. Only `structured_outputs` has fields for its kinds."""
    if field == "structured_outputs":
        return {"constraint.json_schema": f"{field}.json", "constraint.choices": f"{field}.choice", "constraint": field}
    kinds = ("regex", "choices", "grammar", *["json_schema"] * (field != "response_format"))
    return {**{f"constraint.{kind}": field for kind in kinds}, "constraint": field}


def _names(limit: str, constraint: str) -> dict[str, str]:
    """Return the HTTP names of the protocol fields of a chat request, of `max_tokens` and of its constraint."""
    wanted = _constraint_names(constraint)
    prompt = {
        "chat.continue_final_message": "continue_final_message",
        "chat.messages": "messages",
        "chat.tools": "tools",
        "chat.template_kwargs": "chat_template_kwargs",
    }
    prompt |= dict.fromkeys(("chat", "text", "token_ids", "prompt"), "messages")
    return wanted | prompt | {"logprobs": "top_logprobs", "max_tokens": limit}


def _shown(tool: Tool) -> Json:
    """Return a tool for chat templates, with `parameters` always set: some templates read them without a check."""
    shown: Json = tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
    shown["function"].setdefault("parameters", {"type": "object", "properties": {}})
    return shown


def _turn(message: Message, name: str | None) -> pb.ChatMessage:
    """Return a chat message. `name` is the function that a tool message answers; some templates need it. The name in
    the message has precedence.
    """
    role = "system" if message.role == "developer" else message.role  # templates use the older name
    own = message.name if message.name is not None else name
    turn = pb.ChatMessage(role=role, content=message.content, name=own, tool_call_id=message.tool_call_id)
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        turn.reasoning = reasoning
    for call in message.tool_calls or ():
        turn.tool_calls.add(id=call.id, name=call.function.name, arguments=call.function.arguments)
    return turn


def _schema(body: ChatBody, tool_form: str) -> object:
    """Return the schema of the answer, or None if unconstrained. A forced call takes precedence over a text format. If
    a call is optional, the answer is a call or text in the format.
    """
    if body.forced:
        return forced_schema([tool.function for tool in body.forced], tool_form, body.parallel_tool_calls)
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    content = wanted.json_schema.shape if wanted.json_schema else {"type": "object"}
    if not body.offered or tool_form == "none":
        return content
    _json(content, _FORMAT)  # rejects what is too deep to be moved
    return calls_or(content, [tool.function for tool in body.offered], tool_form, body.parallel_tool_calls)


def _with_prompt(base: pb.GenerateRequest, prompt: Prompt) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    request.CopyFrom(base)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
        request.token_ids.SetInParent()
    return request
