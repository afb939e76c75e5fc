"""Renders a conversation to the text of a prompt, with the model's chat template."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import NamedTuple, TypeAlias, cast

import structlog

from baton.errors import InvalidRequest, Violation
from baton.limits import (
    MAX_CHAT_BYTES,
    MAX_CHAT_MESSAGES,
    MAX_HTTP_NAME_CHARS,
    MAX_HTTP_TOOLS,
    MAX_ROLE_CHARS,
    MAX_STATUS_VIOLATIONS,
    MAX_TEMPLATE_SECONDS,
)
from baton.rpc.v1 import inference_pb2 as pb
from baton.tokenizer import Tokenizer
from router.parsing.chat_template import MARK, Template, TemplateFailed
from router.parsing.model_forms import reasoning_form

log = structlog.get_logger(__name__)
Json: TypeAlias = dict[str, object]

_THREAD_BYTES = 4096  # longer conversations are rendered in a thread, to keep the event loop free
_PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # as in `transformers`
_NO_CALLS = "the model's chat template does not support tool calls"
_GIVEN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class Chats:
    """The chat templates of one model, named `default` and optionally `tool_use`, or the reason why it has none."""

    def __init__(
        self, templates: dict[str, Template], special: dict[str, str], missing: str = "", reasoning_form: str = ""
    ) -> None:
        self._templates, self._special, self.reasoning_form = templates, special, reasoning_form
        self._missing = missing or "the model has no chat template; send text or token_ids"
        for template in templates.values():
            template.probe(special)

    @staticmethod
    def of(tokenizer: Tokenizer) -> Chats:
        """Load the templates of the tokenizer's folder. A broken template is reported when a request needs it."""
        if tokenizer.folder is None:
            return Chats({"default": Template(_PLAIN)}, {})
        try:
            config = _read_object(tokenizer.folder / "tokenizer_config.json")
            special = _read_object(tokenizer.folder / "special_tokens_map.json") | config
            sources = _sources(tokenizer.folder, config)
            templates = {name: Template(source) for name, source in sources.items()}
            reasoning = reasoning_form(sources.values(), lambda text: tokenizer.token_id(text) is not None)
            return Chats(templates, _special_tokens(special), reasoning_form=reasoning)
        except (TemplateFailed, OSError, ValueError) as error:
            log.warning("chat_template_unusable", reason=str(error)[:500])
            return Chats({}, {}, f"the model's chat template cannot be used: {str(error)[:500]}")

    @property
    def tool_form(self) -> str:
        """The `Template.tool_form` of the template that renders conversations with tools."""
        found = self._templates.get("tool_use") or self._templates.get("default")
        return found.tool_form if found else ""

    async def prompt(self, chat: pb.ChatMessages) -> str:
        """Return the rendered prompt. Raises InvalidRequest with the wrong fields, or with the template's error."""
        if chat.ByteSize() <= _THREAD_BYTES:
            return self._prompt(chat)
        return await asyncio.to_thread(self._prompt, chat)

    def _prompt(self, chat: pb.ChatMessages) -> str:
        if not self._templates:
            raise InvalidRequest.of("chat", self._missing)
        if (size := chat.ByteSize()) > MAX_CHAT_BYTES:
            raise InvalidRequest.of("chat", f"at most {MAX_CHAT_BYTES} bytes, got {size}")
        tools = _loads(chat.tools) if chat.HasField("tools") else []
        given = cast("dict[str, object]", _loads(chat.template_kwargs) if chat.HasField("template_kwargs") else {})
        if violations := list(_violations(chat, tools, given)):
            raise InvalidRequest(*violations)
        with_calls = any(message.tool_calls or message.role == "tool" for message in chat.messages)
        template = self._template("tool_use" if tools or with_calls else "default")
        if violations := [*_unsupported(chat, tools, template), *self._unknown(given, template)]:
            raise InvalidRequest(*violations)
        continues = chat.continue_final_message
        wanted = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues
        if chat.reasoning_effort and "reasoning_effort" in template.variables:
            given = {"reasoning_effort": chat.reasoning_effort} | given
        tools = tools or ([] if template is self._templates.get("tool_use") else None)  # that one expects a list
        variables = self._special | given | {"tools": tools, "documents": None, "add_generation_prompt": wanted}
        try:
            text = _rendered(template, variables, chat)
            text = _until_mark(text) if continues else text
            text.encode()
        except TemplateFailed as error:
            raise InvalidRequest.of("chat", f"the model's chat template rejects it: {error}") from error
        except UnicodeEncodeError:
            raise InvalidRequest.of(
                "chat", "its JSON contains half a surrogate pair, which is not valid text"
            ) from None
        return text

    def _template(self, name: str) -> Template:
        found = self._templates.get(name) or self._templates.get("default")
        if found is None:
            raise InvalidRequest.of("chat", "the model's chat templates have no default; set tools, or send text")
        return found

    def _unknown(self, given: dict[str, object], template: Template) -> list[Violation]:
        own = template.variables - _GIVEN - self._special.keys()
        text = f"is not a variable of the model's chat template; it has {', '.join(sorted(own)) or 'none'}"
        wrong = islice((name[:64] for name in given if name not in own), MAX_STATUS_VIOLATIONS)  # that a client sees
        return [Violation("chat.template_kwargs", f"{name!r} {text}") for name in wrong]


def _until_mark(text: str) -> str:
    """Return the text before the mark at the end of the last message. A template may have removed white space there."""
    before, mark, after = text.rpartition(_CONTINUED.rstrip())
    if not mark:
        raise TemplateFailed("it does not write the content of the last message, so that cannot be continued")
    return before if after.startswith(" ") else before.rstrip()


def _violations(chat: pb.ChatMessages, tools: object, given: object) -> Iterator[Violation]:
    """Yield the errors of a conversation that do not depend on the template."""
    if not 1 <= len(chat.messages) <= MAX_CHAT_MESSAGES:
        yield Violation("chat.messages", f"must have 1 to {MAX_CHAT_MESSAGES} messages, got {len(chat.messages)}")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        yield Violation("chat.tools", "must be a JSON array of objects")
    elif len(tools) > MAX_HTTP_TOOLS:
        yield Violation("chat.tools", f"at most {MAX_HTTP_TOOLS} tools, got {len(tools)}")
    if not isinstance(given, dict):
        yield Violation("chat.template_kwargs", "must be a JSON object")
    if chat.continue_final_message and chat.add_generation_prompt:
        yield Violation("chat.continue_final_message", "cannot be combined with add_generation_prompt: true")
    for place, message in enumerate(chat.messages[:MAX_CHAT_MESSAGES]):
        yield from _message_violations(f"chat.messages[{place}]", message)


def _message_violations(place: str, message: pb.ChatMessage) -> Iterator[Violation]:
    if not 1 <= len(message.role) <= MAX_ROLE_CHARS:
        yield Violation(f"{place}.role", f"must have 1 to {MAX_ROLE_CHARS} characters")
    if len(message.name) > MAX_HTTP_NAME_CHARS:
        yield Violation(f"{place}.name", f"at most {MAX_HTTP_NAME_CHARS} characters, got {len(message.name)}")
    for number, call in enumerate(message.tool_calls):
        if not isinstance(_loads(call.arguments or "{}"), dict):
            yield Violation(f"{place}.tool_calls[{number}].arguments", "must be a JSON object")


def _unsupported(chat: pb.ChatMessages, tools: object, template: Template) -> Iterator[Violation]:
    """Yield the parts of a conversation that the template would drop."""
    if tools and "tools" not in template.variables:  # a field is not enough: Phi-4-mini reads `message.tools`
        yield Violation("chat.tools", "the model's chat template does not support tools")
    with_calls = [place for place, message in enumerate(chat.messages) if message.tool_calls]
    if with_calls and not template.mentions("tool_calls"):
        yield Violation(f"chat.messages[{with_calls[0]}].tool_calls", _NO_CALLS)


class _Form(NamedTuple):
    """The form in which a template gets messages."""

    decoded: bool = True  # arguments of calls as objects
    parts: bool = False  # contents as lists of parts
    none: bool = False  # None as the content of calls without one


def _rendered(template: Template, variables: Json, chat: pb.ChatMessages) -> str:
    """Render in the usual form. A template that drops texts or calls gets them in the form in which it does not."""
    began, continues = monotonic(), chat.continue_final_message
    if continues:
        given, chat = chat, pb.ChatMessages()
        chat.CopyFrom(given)
        chat.messages[-1].content += _CONTINUED
    form, text = _with_contents(template, variables, chat)
    dropped = _dropped_call(template, variables, chat, form)
    if dropped is None:
        return text
    for asked, other in _other_forms(chat, form, splits=not (continues and chat.messages[-1].tool_calls)):
        if monotonic() - began > MAX_TEMPLATE_SECONDS:
            break
        with suppress(TemplateFailed):
            text = _written(template, variables, asked, other)
            if _dropped_call(template, variables, asked, other) is None:
                return text
    raise InvalidRequest.of(f"chat.messages[{dropped}].tool_calls", f"{_NO_CALLS} here, it drops one of them")


def _other_forms(chat: pb.ChatMessages, form: _Form, *, splits: bool) -> Iterator[tuple[pb.ChatMessages, _Form]]:
    """Yield forms in which a template may write calls that it drops in the usual one."""
    none = form._replace(none=True)
    yield chat, none
    for contents in (False, True) if splits else ():
        split = _split(chat, contents=contents)
        yield split, form
        yield split, none


def _split(chat: pb.ChatMessages, *, contents: bool) -> pb.ChatMessages:
    """Return a conversation with one call in a message, before its results: gpt-oss writes only the first call of a
    message. `contents`: a content next to calls has its own message, because DeepSeek-V3 writes no call next to one.
    """
    groups = list[list[pb.ChatMessage]]()  # a message, and the results that directly follow it
    for message in chat.messages:
        if message.role == "tool" and groups and groups[-1][0].tool_calls:
            groups[-1].append(message)
        else:
            groups.append([message])
    split = pb.ChatMessages()
    for group in groups:
        split.messages.extend(_one_call_each(*group, contents=contents))
    return split


def _one_call_each(message: pb.ChatMessage, *results: pb.ChatMessage, contents: bool) -> Iterator[pb.ChatMessage]:
    apart = bool(contents and message.content and message.tool_calls)
    if len(message.tool_calls) < 2 and not apart:
        yield from (message, *results)
        return
    by_call = dict[str, list[pb.ChatMessage]]()
    for result in results:
        by_call.setdefault(result.tool_call_id, []).append(result)
    said = pb.ChatMessage()
    said.CopyFrom(message)
    del said.tool_calls[:]
    if apart:
        yield said
    for number, call in enumerate(message.tool_calls):
        one = pb.ChatMessage(role=message.role)
        if number == 0 and not apart:
            one.CopyFrom(said)  # its reasoning, too
        one.tool_calls.append(call)
        yield one
        yield from by_call.pop(call.id, ())
    for left in by_call.values():
        yield from left


def _with_contents(template: Template, variables: Json, chat: pb.ChatMessages) -> tuple[_Form, str]:
    """Render with contents as texts. If the template takes none, and fails or drops the last one, try parts."""
    usual, parts = _Form(), _Form(parts=True)
    if template.takes_texts:
        return usual, _written(template, variables, chat, usual)
    marked = pb.ChatMessages()
    marked.CopyFrom(chat)
    last = next((message for message in reversed(marked.messages) if message.content.strip()), None)
    if last is None:
        return usual, _written(template, variables, chat, usual)
    last.content += MARK
    for form in (usual, parts):
        with suppress(TemplateFailed):
            if MARK in _written(template, variables, marked, form):
                return form, _written(template, variables, chat, form)
    return usual, _written(template, variables, chat, usual)  # the template changes texts


def _dropped_call(template: Template, variables: Json, chat: pb.ChatMessages, form: _Form) -> int | None:
    """Return the first message with a call that the template does not write, or None. Names get marks for this, because
    they may also be in `tools`.
    """
    if not any(message.tool_calls for message in chat.messages):
        return None
    marked, places = pb.ChatMessages(), list[int]()
    marked.CopyFrom(chat)
    for place, message in enumerate(marked.messages):
        for call in message.tool_calls:
            call.name += f"{MARK}{len(places):06d}"
            places.append(place)
    try:
        text = _written(template, variables, marked, form)
    except TemplateFailed:  # it may check names
        return None
    written = {int(number) for number in re.findall(rf"{MARK}(\d{{6}})", text)}
    return next((place for number, place in enumerate(places) if number not in written), None)


def _written(template: Template, variables: Json, chat: pb.ChatMessages, form: _Form) -> str:
    """Render with the arguments of calls as objects, or else as the JSON text that some templates take."""
    objects, texts = ([_message(m, form._replace(decoded=each)) for m in chat.messages] for each in (True, False))
    try:
        return template.render(variables | {"messages": objects})
    except TemplateFailed:
        if objects != texts:
            with suppress(TemplateFailed):  # the first error is about the usual form
                return template.render(variables | {"messages": texts})
        raise


def _message(message: pb.ChatMessage, form: _Form) -> Json:
    """Return a message in the form of OpenAI's API, as templates expect it."""
    role = "system" if message.role == "developer" else message.role  # templates use the older name
    found: Json = {"role": role, "content": message.content}
    if form.none and message.tool_calls and not message.content:
        found["content"] = None
    elif form.parts:
        found["content"] = [_Part(type="text", text=message.content)]
    if message.HasField("name"):
        found["name"] = message.name
    if message.HasField("tool_call_id"):
        found["tool_call_id"] = message.tool_call_id
    if message.HasField("reasoning"):
        found["reasoning_content"] = found["reasoning"] = message.reasoning
        if not (message.content and message.tool_calls):  # gpt-oss rejects reasoning with both
            found["thinking"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [_call(call, form.decoded) for call in message.tool_calls]
    return found


class _Part(dict[str, object]):
    """A part of a content. A template that writes it as it is takes texts."""

    def __repr__(self) -> str:
        raise TemplateFailed("it writes a part of a content as it is")


class _Object(dict[str, object]):
    """Arguments of a call. A template that writes them as they are takes JSON text."""

    def __str__(self) -> str:
        raise TemplateFailed("it writes an object without tojson")


def _call(call: pb.ToolCall, decoded: bool) -> dict[str, object]:
    text = call.arguments or "{}"
    function = {"name": call.name, "arguments": _Object(cast("Json", _loads(text))) if decoded else text}
    return {"id": call.id, "type": "function", "function": function}


def _loads(text: str) -> object:
    """Decode JSON. Return None if it is invalid."""
    try:
        return cast("object", json.loads(text))
    except (ValueError, RecursionError):
        return None


def _sources(folder: Path, config: dict[str, object]) -> dict[str, str]:
    """Return the text of each template by name. Own files have precedence over tokenizer_config.json, all of it, and
    that over chat_template.json, the file of a processor.
    """
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (single := folder / "chat_template.jinja").is_file():
        files["default"] = single
    if files:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    entry = config.get("chat_template") or _read_object(folder / "chat_template.json").get("chat_template")
    if entry is None or isinstance(entry, str):
        return {"default": entry} if entry else {}
    try:
        return {str(each["name"]): str(each["template"]) for each in cast("list[dict[str, object]]", entry)}
    except (TypeError, KeyError):
        raise ValueError("chat_template must be a text, or a list of objects with name and template") from None


def _special_tokens(config: dict[str, object]) -> dict[str, str]:
    """Return `bos_token`, `eos_token` and similar entries. Each value is a text, or an object with `content`."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _read_object(path: Path) -> dict[str, object]:
    value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} must hold a JSON object")
    return value
