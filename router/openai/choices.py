"""Formats of the choices of an answer: completions, chat, and chat with tool calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any, TypeAlias

from router.openai.tool_calls import Call, CallReader, Part
from router.openai.upstream import Scored, bytes_of

Json = dict[str, Any]


class CompletionFormat:
    """Choices of `text_completion` objects: `choice` of an unstreamed answer, the others of chunks. `opening` is the
    first delta of a choice, if any. `piece` returns no choice while it holds the text back. `ending` returns that text,
    then the finish reason. `offset` counts the characters of the choice's earlier tokens. The same text of the same
    `request_id` always gives the same choices, so that a stream can be resumed.
    """

    request_id = ""

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"  # of the answer's id; names of the objects

    def choice(self, index: int, text: str, scored: Sequence[Scored] | None, reason: str) -> Json:
        return _text_choice(index, text, scored, 0, reason)

    def opening(self, index: int) -> Json | None:
        return None

    def piece(self, index: int, text: str, scored: Sequence[Scored] | None, offset: int) -> list[Json]:
        return [_text_choice(index, text, scored, offset, None)]

    def thought(self, index: int, thought: Json) -> Json:
        return _text_choice(index, "", None, 0, None) | {"thoughts": [thought]}

    def ending(self, index: int, reason: str) -> list[Json]:
        return [_text_choice(index, "", None, 0, reason)]


def _text_choice(index: int, text: str, scored: Sequence[Scored] | None, offset: int, reason: str | None) -> Json:
    logprobs = None if scored is None else _text_logprobs(scored, offset)
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _text_logprobs(scored: Sequence[Scored], offset: int) -> Json:
    offsets = list(accumulate((len(each.text) for each in scored), initial=offset))
    return {
        "tokens": [each.text for each in scored],
        "token_logprobs": [each.logprob for each in scored],
        "top_logprobs": [_best(each.top) for each in scored],
        "text_offset": offsets[:-1],
    }


def _best(top: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return log-probabilities by text. Several tokens may share a text; the likeliest is kept."""
    best: dict[str, float] = {}
    for text, logprob in top:
        best.setdefault(text, logprob)
    return best


class ChatFormat:
    """Choices of `chat.completion` objects and chunks, without tool calls. See `CompletionFormat`."""

    request_id = ""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, scored: Sequence[Scored] | None, reason: str) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": _chat_logprobs(scored), "finish_reason": reason}

    def opening(self, index: int) -> Json | None:
        return _delta(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str, scored: Sequence[Scored] | None, offset: int) -> list[Json]:
        return [_delta(index, {"content": text}) | {"logprobs": _chat_logprobs(scored)}]

    def thought(self, index: int, thought: Json) -> Json:
        return _delta(index, {"thoughts": [thought]})

    def ending(self, index: int, reason: str) -> list[Json]:
        return [_delta(index, {}) | {"finish_reason": reason}]


def _delta(index: int, added: Json) -> Json:
    return {"index": index, "delta": added, "logprobs": None, "finish_reason": None}


def _chat_logprobs(scored: Sequence[Scored] | None) -> Json | None:
    if scored is None:
        return None
    content = [
        _entry(each.text, each.logprob) | {"top_logprobs": [_entry(text, value) for text, value in each.top]}
        for each in scored
    ]
    return {"content": content, "refusal": None}


def _entry(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": bytes_of(text)}


class ToolFormat(ChatFormat):
    """Chat choices with tool calls. `form` is the model's call syntax, `names` are the offered functions."""

    def __init__(self, form: str, names: Collection[str], *, parallel: bool) -> None:
        self._form, self._names, self._parallel = form, names, parallel
        self._readers: dict[int, CallReader] = {}  # by choice
        self._counts: Counter[int] = Counter()  # calls of each choice

    def choice(self, index: int, text: str, scored: Sequence[Scored] | None, reason: str) -> Json:
        reader = CallReader(self._form, self._names)
        parts = [*reader.feed(text), *reader.end()]
        content = "".join(part for part in parts if isinstance(part, str))
        calls = self._shown(index, [part for part in parts if isinstance(part, Call)], 0)
        choice = super().choice(index, content, scored, _reason(reason, len(calls)))
        if calls:
            choice["message"] |= {"content": content or None, "tool_calls": calls}
        return choice

    def piece(self, index: int, text: str, scored: Sequence[Scored] | None, offset: int) -> list[Json]:
        """Return deltas for confirmed text and complete calls; text that may become a call is held back."""
        deltas = self._deltas(index, self._reader(index).feed(text))
        if not scored:
            return deltas
        deltas = deltas or [_delta(index, {"content": ""})]
        return [deltas[0] | {"logprobs": _chat_logprobs(scored)}, *deltas[1:]]

    def ending(self, index: int, reason: str) -> list[Json]:
        deltas = self._deltas(index, self._reader(index).end())
        return [*deltas, *super().ending(index, _reason(reason, self._counts[index]))]

    def _reader(self, index: int) -> CallReader:
        return self._readers.setdefault(index, CallReader(self._form, self._names))

    def _deltas(self, index: int, parts: Sequence[Part]) -> list[Json]:
        deltas = []
        for part in parts:
            if isinstance(part, str):
                deltas.append(_delta(index, {"content": part}))
                continue
            for call in self._shown(index, [part], self._counts[index]):
                deltas.append(_delta(index, {"tool_calls": [{"index": self._counts[index], **call}]}))
                self._counts[index] += 1
        return deltas

    def _shown(self, index: int, calls: Sequence[Call], before: int) -> list[Json]:
        """Return the calls as JSON; without `parallel` only the first of the choice, which has `before` calls."""
        most = len(calls) if self._parallel else 1 - before
        return [self._call(call, f"{index} {before + at}") for at, call in enumerate(calls[: max(0, most)])]

    def _call(self, call: Call, place: str) -> Json:
        name = blake2b(f"{self.request_id} {place}".encode(), digest_size=16).hexdigest()
        # Mistral's templates accept exactly nine letters and digits.
        name = name[:9] if self._form == "mistral" else f"call_{name[:24]}"
        return {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reason(reason: str, calls: int) -> str:
    return "tool_calls" if calls and reason == "stop" else reason


ChoiceFormat: TypeAlias = CompletionFormat | ChatFormat
