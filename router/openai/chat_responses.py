"""Chat choices with and without tool calls, as `chat.completion` and `chat.completion.chunk` objects."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from router.openai.job import Json
from router.openai.logprobs import Scored, bytes_of
from router.openai.tool_calls import Call, CallReader, Part


class ChatShape:
    """Text-only chat choices."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, scored: Sequence[Scored] | None, reason: str) -> Json:
        """Return a whole choice."""
        return {"index": index, "message": message_of(text), "logprobs": logprobs_of(scored), "finish_reason": reason}

    def opening(self, index: int) -> Json | None:
        """Return the delta with the role."""
        return delta(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str, scored: Sequence[Scored] | None, offset: int) -> list[Json]:
        """Return a delta with text."""
        return [delta(index, {"content": text}) | {"logprobs": logprobs_of(scored)}]

    def thought(self, index: int, thought: Json) -> Json:
        """Return a delta with a thought and no text."""
        return delta(index, {"thoughts": [thought]})

    def ending(self, index: int, reason: str) -> list[Json]:
        """Return a delta with the finish reason and no text."""
        return [delta(index, {}) | {"finish_reason": reason}]


def message_of(content: str | None, calls: Sequence[Json] = ()) -> Json:
    """Return an assistant message with text and tool calls."""
    message = {"role": "assistant", "content": content, "refusal": None}
    return message | {"tool_calls": [*calls]} if calls else message


def delta(index: int, added: Json) -> Json:
    """Return a choice of a chunk."""
    return {"index": index, "delta": added, "logprobs": None, "finish_reason": None}


def logprobs_of(scored: Sequence[Scored] | None) -> Json | None:
    """Return the `logprobs` of a choice."""
    if scored is None:
        return None
    content = [
        _entry(each.text, each.logprob) | {"top_logprobs": [_entry(text, value) for text, value in each.top]}
        for each in scored
    ]
    return {"content": content, "refusal": None}


def _entry(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": bytes_of(text)}


@dataclass(slots=True)
class _Reading:
    """State of one choice."""

    reader: CallReader
    calls: int = 0


@dataclass(slots=True)
class ToolShape:
    """Like `ChatShape`, with tool calls. `form` is the model's call syntax, `names` are the offered functions."""

    form: str
    names: Collection[str]
    parallel: bool = True
    prefix: str = "chatcmpl-"
    whole: str = "chat.completion"
    chunk: str = "chat.completion.chunk"
    _readings: dict[int, _Reading] = field(default_factory=dict)

    def choice(self, index: int, text: str, scored: Sequence[Scored] | None, reason: str) -> Json:
        """Return a whole choice."""
        reader = CallReader(self.form, self.names)
        parts = [*reader.feed(text), *reader.end()]
        calls = self._shown([part for part in parts if isinstance(part, Call)], 0)
        said = "".join(part for part in parts if isinstance(part, str))
        message = message_of(said or None, calls) if calls else message_of(said)
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs_of(scored),
            "finish_reason": _reason(reason, len(calls)),
        }

    def opening(self, index: int) -> Json | None:
        """Return the delta with the role."""
        return delta(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str, scored: Sequence[Scored] | None, offset: int) -> list[Json]:
        """Return deltas for confirmed text and complete calls; text that may become a call is held back."""
        deltas = self._deltas(index, self._reading(index).reader.feed(text))
        if not scored:
            return deltas
        deltas = deltas or [delta(index, {"content": ""})]
        return [deltas[0] | {"logprobs": logprobs_of(scored)}, *deltas[1:]]

    def thought(self, index: int, thought: Json) -> Json:
        """Return a delta with a thought and no text."""
        return delta(index, {"thoughts": [thought]})

    def ending(self, index: int, reason: str) -> list[Json]:
        """Return the text that was held back, then the finish reason."""
        reading = self._reading(index)
        deltas = self._deltas(index, reading.reader.end())
        return [*deltas, delta(index, {}) | {"finish_reason": _reason(reason, reading.calls)}]

    def _reading(self, index: int) -> _Reading:
        return self._readings.setdefault(index, _Reading(CallReader(self.form, self.names)))

    def _deltas(self, index: int, parts: Sequence[Part]) -> list[Json]:
        deltas, reading = [], self._reading(index)
        for part in parts:
            if isinstance(part, str):
                deltas.append(delta(index, {"content": part}))
                continue
            shown = self._shown([part], reading.calls)
            deltas += [delta(index, {"tool_calls": [{"index": reading.calls, **call}]}) for call in shown]
            reading.calls += len(shown)
        return deltas

    def _shown(self, calls: Sequence[Call], before: int) -> list[Json]:
        """Return the calls as JSON; without `parallel` only the first of the choice."""
        most = len(calls) if self.parallel else 1 - before
        return [self._call(call) for call in calls[: max(0, most)]]

    def _call(self, call: Call) -> Json:
        name = uuid4().hex  # Mistral's templates accept exactly nine letters and digits
        name = name[:9] if self.form == "mistral" else f"call_{name[:24]}"
        return {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reason(reason: str, calls: int) -> str:
    return "tool_calls" if calls and reason == "stop" else reason
