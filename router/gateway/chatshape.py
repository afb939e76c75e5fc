"""Objects of type chat.completion and chat.completion.chunk."""

from __future__ import annotations

from collections.abc import Sequence

from router.gateway.job import Json
from router.gateway.texts import Scored, bytes_of


class ChatShape:
    """Choices that are text."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, scored: Sequence[Scored] | None, reason: str) -> Json:
        """A whole choice."""
        return {"index": index, "message": message_of(text), "logprobs": logprobs_of(scored), "finish_reason": reason}

    def opening(self, index: int) -> Json | None:
        """Who speaks."""
        return delta(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str, scored: Sequence[Scored] | None, offset: int) -> list[Json]:
        """Some text."""
        return [delta(index, {"content": text}) | {"logprobs": logprobs_of(scored)}]

    def thought(self, index: int, thought: Json) -> Json:
        """A thought, without text."""
        return delta(index, {"thoughts": [thought]})

    def ending(self, index: int, reason: str) -> list[Json]:
        """The reason, without text."""
        return [delta(index, {}) | {"finish_reason": reason}]


def message_of(content: str | None, calls: Sequence[Json] = ()) -> Json:
    """What the assistant says, and calls."""
    message = {"role": "assistant", "content": content, "refusal": None}
    return message | {"tool_calls": [*calls]} if calls else message


def delta(index: int, added: Json) -> Json:
    """A choice of a chunk."""
    return {"index": index, "delta": added, "logprobs": None, "finish_reason": None}


def logprobs_of(scored: Sequence[Scored] | None) -> Json | None:
    """The `logprobs` of a choice."""
    if scored is None:
        return None
    content = [
        _entry(each.text, each.logprob) | {"top_logprobs": [_entry(text, value) for text, value in each.top]}
        for each in scored
    ]
    return {"content": content, "refusal": None}


def _entry(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": bytes_of(text)}
