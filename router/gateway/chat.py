"""`/v1/chat/completions`: one call; the model's template is the router's business."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from baton.rpc.v1 import inference_pb2 as pb
from router.gateway.job import Job, Json, base_request, http_name, usage_of
from router.gateway.schema import ChatBody, Message, ResponseFormat
from router.gateway.texts import Scored, bytes_of


class ChatShape:
    """Objects of type chat.completion and chat.completion.chunk."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, text: str, scored: Sequence[Scored] | None, reason: str) -> Json:
        """A whole choice."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": _logprobs(scored), "finish_reason": reason}

    def opening(self, index: int) -> Json | None:
        """Who speaks."""
        return _delta(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, text: str, scored: Sequence[Scored] | None, offset: int) -> Json:
        """Some text."""
        return _delta(index, {"content": text}) | {"logprobs": _logprobs(scored)}

    def ending(self, index: int, reason: str) -> Json:
        """The reason, without text."""
        return _delta(index, {}) | {"finish_reason": reason}


def chat_job(body: ChatBody) -> Job:
    """What `body` asks for."""
    given = body.max_completion_tokens is not None
    limit = "max_completion_tokens" if given else "max_tokens"
    names = {
        "chat.messages": "messages",
        "chat": "messages",
        "text": "messages",
        "token_ids": "messages",
        "prompt": "messages",
        "constraint": "response_format",
        "logprobs": "top_logprobs",
        "max_tokens": limit,
    }
    request = base_request(body, body.max_completion_tokens if given else body.max_tokens)
    request.chat.messages.extend(_turn(message) for message in body.messages)
    _constrain(request, body.response_format)
    if body.logprobs:
        request.logprobs = body.top_logprobs or 0
    return Job(
        requests=[request],
        shape=ChatShape(),
        rename=lambda _, field: http_name(field, names),
        n=body.n or 1,
        stream=bool(body.stream),
        usage=usage_of(body.stream_options),
        logprobs=bool(body.logprobs),
    )


def _turn(message: Message) -> pb.ChatMessage:
    role = "system" if message.role == "developer" else message.role  # templates know the older name
    return pb.ChatMessage(role=role, content=message.content)


def _constrain(request: pb.GenerateRequest, wanted: ResponseFormat | None) -> None:
    if wanted is None or wanted.type == "text":
        return
    schema = wanted.json_schema.shape if wanted.json_schema else {"type": "object"}
    request.constraint.json_schema = orjson.dumps(schema).decode()


def _delta(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _logprobs(scored: Sequence[Scored] | None) -> Json | None:
    if scored is None:
        return None
    content = [
        _entry(each.text, each.logprob) | {"top_logprobs": [_entry(text, value) for text, value in each.top]}
        for each in scored
    ]
    return {"content": content, "refusal": None}


def _entry(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": bytes_of(text)}
