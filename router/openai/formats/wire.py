"""The form in which an answer is sent: as OpenAI's chat and completions, or translated for another API."""

from __future__ import annotations

import orjson

from baton.errors import InvalidRequest
from router.openai.errors import Json, Problem


def json_text(value: object, field: str) -> str:
    """Return `value` as JSON. Raises InvalidRequest naming `field` if it is nested too deeply."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # orjson reads 1024 levels and writes 254
        raise InvalidRequest.of(field, "is nested too deeply") from None


def receipt_of(answer: Json) -> Json:
    """Return the receipt in an answer as a member for the answer of another API. Empty without one."""
    return {"receipt": answer["receipt"]} if "receipt" in answer else {}


class AnswerWire:
    """OpenAI's own form. Subclasses translate answers of chat with one choice; they belong to one answer."""

    resumable = True  # whether events have ids
    id_headers: tuple[str, ...] = ("x-request-id",)
    matched_stop = ""  # the stop string that ended the answer

    def whole(self, answer: Json) -> Json:
        """Return the whole answer."""
        return answer

    def event(self, chunk: Json) -> bytes:
        """Return the events for a chunk."""
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def done(self) -> bytes:
        """Return the last event."""
        return b"data: [DONE]\n\n"

    def problem(self, problem: Problem) -> Problem:
        """Return an error in the form of this API."""
        return problem

    def failed(self, problem: Problem) -> bytes:
        """Return the event of an error within a stream."""
        return b"data: " + problem.body() + b"\n\n"
