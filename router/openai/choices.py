"""Formats of the choices of an answer: completions, and chat with reasoning and tool calls."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeAlias

from router.openai.errors import Json
from router.openai.formats.answer import ReadAnswer, reader_of, whole
from router.openai.formats.calls import FORMS, Tools
from router.openai.formats.text import Arguments, Call, Part, Reasoning, Source
from router.openai.logprobs.tokens import Scored, TokenText


class CompletionFormat:
    """Choices of `text_completion` objects: `choice` of an unstreamed answer, the others of chunks. `opening` is the
    first delta of a choice, if any. `piece` returns no choice while it holds the text back. `ending` returns that text,
    then the finish reason. The same text of the same `request_id` always gives the same choices, so that a stream can
    be resumed.
    """

    request_id, opened, reasons = "", False, False

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"  # of the answer's id; names of the objects

    def in_reasoning(self, index: int) -> bool:
        return False

    def read(self, index: int, text: str) -> None:
        pass

    def stopped(self, index: int, stop: str) -> None:
        pass

    def choice(self, index: int, text: str, scored: Sequence[Scored] | None, reason: str) -> Json:
        return _text_choice(index, text, scored, reason)

    def opening(self, index: int) -> Json | None:
        return None

    def piece(self, index: int, text: str, scored: Sequence[Scored] | None) -> list[Json]:
        return [_text_choice(index, text, scored, None)]

    def thought(self, index: int, thought: Json) -> Json:
        return _text_choice(index, "", None, None) | {"thoughts": [thought]}

    def add_prompts(self, answer: Json, prompts: Sequence[object]) -> None:
        """Add the log-probabilities of each call's prompt to the whole answer."""
        each = len(answer["choices"]) // len(prompts)
        for place, choice in enumerate(answer["choices"]):
            choice["prompt_logprobs"] = prompts[place // each]

    def ending(self, index: int, reason: str) -> list[Json]:
        return [_text_choice(index, "", None, reason)]


def _text_choice(index: int, text: str, scored: Sequence[Scored] | None, reason: str | None) -> Json:
    logprobs = None if scored is None else _text_logprobs(scored)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _text_logprobs(scored: Sequence[Scored]) -> Json:
    return {
        "tokens": [each.token.text for each in scored],
        "token_logprobs": [each.logprob for each in scored],
        "top_logprobs": [_best(each) for each in scored],
        "text_offset": [each.offset for each in scored],
    }


def _best(scored: Scored) -> dict[str, float] | None:
    """Return log-probabilities by text, also of the token itself, or None for the first token of a prompt. Several
    tokens may share a text; the likeliest is kept.
    """
    if scored.logprob is None:
        return None
    best: dict[str, float] = {}
    for token, logprob in (*scored.top, (scored.token, scored.logprob)):
        best.setdefault(token.text, logprob)
    return best


@dataclass(frozen=True, slots=True)
class Reading:
    """How the text of a model is read: its forms of reasoning and of calls, and the functions that it may call."""

    reasoning: str = ""
    form: str = ""
    tools: Tools = field(default_factory=dict)
    parallel: bool = True  # otherwise only the first call counts


class ChatFormat:
    """Choices of `chat.completion` objects and chunks. See `CompletionFormat`. `opened` is set if the prompt ends
    inside reasoning.
    """

    request_id, opened = "", False

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, reading: Reading | None = None) -> None:
        self._reading = reading or Reading()
        self.reasons = bool(self._reading.reasoning)
        self._plain = not self.reasons and not self._reading.tools
        self._readers: dict[int, Source] = {}  # by choice
        self._parts = defaultdict[int, list[Part]](list)  # of answers that are not streamed
        self._counts: Counter[int] = Counter()  # calls of each choice
        self._last: dict[int, list[str]] = {}  # arguments of the last call of each choice that has calls
        self._stops: dict[int, str] = {}  # the stop strings that ended choices

    def in_reasoning(self, index: int) -> bool:
        return not self._plain and self._reader(index).thinking

    def read(self, index: int, text: str) -> None:
        """Read a piece of an answer that is not streamed."""
        if not self._plain:
            self._parts[index] += self._reader(index).feed(text)

    def stopped(self, index: int, stop: str) -> None:
        """Note the stop string that ended a choice."""
        self._stops[index] = stop

    def choice(self, index: int, text: str, scored: Sequence[Scored] | None, reason: str) -> Json:
        found = ReadAnswer(content=text)
        if not self._plain:
            found = whole([*self._parts[index], *self._end(index, reason)])
        message: Json = {"role": "assistant", "content": found.content, "refusal": None}
        if found.reasoning:
            message |= _reasoning(found.reasoning)
        calls = found.calls if self._reading.parallel else found.calls[:1]
        if calls:
            shown = [self._call(call, arguments, f"{index} {at}") for at, (call, arguments) in enumerate(calls)]
            message |= {"content": found.content or None, "tool_calls": shown}
            self._last[index] = [calls[-1][1]]
        logprobs, finish = _chat_logprobs(scored), self._reason(index, reason)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def opening(self, index: int) -> Json | None:
        return _delta(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str, scored: Sequence[Scored] | None) -> list[Json]:
        """Return deltas for text and calls as soon as they are certain."""
        parts = [text] if self._plain else self._reader(index).feed(text)
        deltas = self._deltas(index, parts)
        if not scored:
            return deltas
        deltas = deltas or [_delta(index, {"content": ""})]
        return [deltas[0] | {"logprobs": _chat_logprobs(scored)}, *deltas[1:]]

    def thought(self, index: int, thought: Json) -> Json:
        return _delta(index, {"thoughts": [thought]})

    def add_prompts(self, answer: Json, prompts: Sequence[object]) -> None:
        [answer["prompt_logprobs"]] = prompts

    def ending(self, index: int, reason: str) -> list[Json]:
        deltas = [] if self._plain else self._deltas(index, self._end(index, reason))
        return [*deltas, _delta(index, {}) | {"finish_reason": self._reason(index, reason)}]

    def _end(self, index: int, reason: str) -> list[Part]:
        """Return the parts that waited. A stop string cuts a call, unless it has a mark that ends calls."""
        stop, marks = self._stops.get(index, ""), FORMS.get(self._reading.form, FORMS["json"]).close
        cut = bool(stop) and not any(mark in stop for mark in marks)
        return self._reader(index).end(cut=cut or reason == "length")

    def _reason(self, index: int, reason: str) -> str:
        """Return the finish reason: not `tool_calls` if a stop string cut the last call."""
        called = index in self._last and not (index in self._stops and not _is_json("".join(self._last[index])))
        return "tool_calls" if called and reason == "stop" else reason

    def _reader(self, index: int) -> Source:
        if index not in self._readers:
            reading = self._reading
            self._readers[index] = reader_of(reading.reasoning, reading.form, reading.tools, opened=self.opened)
        return self._readers[index]

    def _deltas(self, index: int, parts: Sequence[Part]) -> list[Json]:
        found = list[Json]()
        for part in parts:
            if (added := self._added(index, part)) is None:
                continue
            if isinstance(part, Arguments) and found and "id" in found[-1].get("tool_calls", ({},))[0]:
                found[-1]["tool_calls"][0]["function"]["arguments"] = part.text
            else:
                found.append(added)
        return [_delta(index, added) for added in found]

    def _added(self, index: int, part: Part) -> Json | None:
        """Return the content of a delta for `part`, or None if it belongs to a call that does not count."""
        if isinstance(part, str):
            return {"content": part}
        if isinstance(part, Reasoning):
            return _reasoning(part.text)
        self._counts[index] += isinstance(part, Call)
        place = self._counts[index] - 1
        if place and not self._reading.parallel:
            return None
        if isinstance(part, Call):
            self._last[index] = []
            return {"tool_calls": [{"index": place, **self._call(part, "", f"{index} {place}")}]}
        self._last[index].append(part.text)
        return {"tool_calls": [{"index": place, "function": {"arguments": part.text}}]}

    def _call(self, call: Call, arguments: str, place: str) -> Json:
        name = blake2b(f"{self.request_id} {place}".encode(), digest_size=16).hexdigest()
        # Mistral's templates accept exactly nine letters and digits.
        name = call.id or (name[:9] if self._reading.form == "mistral" else f"call_{name[:24]}")
        return {"id": name, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _reasoning(text: str) -> Json:
    return {"reasoning_content": text, "reasoning": text}  # the older and the newer name of vLLM


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _delta(index: int, added: Json) -> Json:
    return {"index": index, "delta": added, "logprobs": None, "finish_reason": None}


def _chat_logprobs(scored: Sequence[Scored] | None) -> Json | None:
    if scored is None:
        return None
    content = []
    for each in scored:
        own, best = _entry(each.token, each.logprob), [_entry(token, value) for token, value in each.top]
        found = not best or each.token in [token for token, _ in each.top]  # without alternatives, none were requested
        content.append(own | {"top_logprobs": best if found else [*best, own]})
    return {"content": content, "refusal": None}


def _entry(token: TokenText, logprob: float | None) -> Json:
    return {"token": token.text, "logprob": logprob, "bytes": list(token.raw) or None}


ChoiceFormat: TypeAlias = CompletionFormat | ChatFormat
