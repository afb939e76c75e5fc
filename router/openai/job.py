"""The router calls of one HTTP request, and the interface that formats their answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from router.openai.logprobs import Scored
from router.openai.schema import Common, StreamOptions

_SAMPLING = frozenset(common_pb2.Sampling.DESCRIPTOR.fields_by_name) - {"max_tokens", "top_k", "seed", "logit_bias"}
_NAMES = {"cache_scope": "cache_salt", "client_tag": "user"}

Json = dict[str, Any]


def as_json(message: Message) -> Json:
    """Return a dict that includes default-valued fields, so clients need not know the defaults."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


class InStream(Enum):
    """Placement of usage in a stream."""

    NOWHERE = 0
    AT_THE_END = 1  # and null in earlier chunks, as OpenAI does
    THROUGHOUT = 2  # each chunk has the usage of its choice so far, the last one the total


class Shape(Protocol):
    """Format of the choices of one endpoint. `offset` counts the characters of the choice's earlier tokens."""

    prefix: str  # of the answer's id
    whole: str  # name of the object
    chunk: str

    def choice(self, index: int, text: str, scored: Sequence[Scored] | None, reason: str) -> Json:
        """Return a choice of an unstreamed answer."""

    def opening(self, index: int) -> Json | None:
        """Return the first delta of a choice, or None."""

    def piece(self, index: int, text: str, scored: Sequence[Scored] | None, offset: int) -> list[Json]:
        """Return the choices for new text; empty if the text is held back."""

    def thought(self, index: int, thought: Json) -> Json:
        """Return a choice that has only a thought."""

    def ending(self, index: int, reason: str) -> list[Json]:
        """Return the text that was held back, then the finish reason."""


@dataclass(frozen=True, slots=True)
class Job:
    """The calls of one HTTP request. Choice c of call i is choice i * n + c of the answer."""

    requests: Sequence[pb.GenerateRequest]
    shape: Shape
    rename: Callable[[int, str], str]
    n: int
    stream: bool
    usage: InStream
    logprobs: bool
    thoughts: bool


def usage_of(options: StreamOptions | None) -> InStream:
    """Return the usage placement that the stream options request."""
    if options is None or not options.include_usage:
        return InStream.NOWHERE
    return InStream.THROUGHOUT if options.continuous_usage_stats else InStream.AT_THE_END


def base_request(body: Common, max_tokens: int | None) -> pb.GenerateRequest:
    """Return a request without prompt, logprobs and constraint. Fields that the body omits stay unset."""
    given = body.model_dump(include=set(_SAMPLING), exclude_none=True)
    bias = {int(token_id): value for token_id, value in (body.logit_bias or {}).items()}
    sampling = common_pb2.Sampling(**given, logit_bias=bias)
    if max_tokens is not None:
        sampling.max_tokens = max_tokens
    if body.top_k is not None:
        sampling.top_k = 0 if body.top_k == -1 else body.top_k  # other APIs use -1 for "off"
    if body.seed is not None:
        sampling.seed = body.seed % 2**64
    request = pb.GenerateRequest(model=body.model or "", sampling=sampling, client_tag=body.user or "")
    request.resumable_s = 0.0  # an HTTP answer cannot be resumed
    _set_options(request, body)
    return request


def _set_options(request: pb.GenerateRequest, body: Common) -> None:
    if body.n is not None:
        request.n = body.n
    if body.deterministic is not None:
        request.deterministic = body.deterministic
    if body.thoughts is not None:
        request.thoughts = body.thoughts
    if body.think_while_decoding is not None:
        request.think_while_decoding = body.think_while_decoding
    if body.priority is not None:
        request.priority = body.priority
    if body.cache_salt is not None:
        request.cache_scope = body.cache_salt


def http_name(field: str, more: dict[str, str]) -> str:
    """Map a protocol field to its HTTP field: `sampling.top_p` to `top_p`, `cache_scope` to `cache_salt`."""
    name = field.removeprefix("spec.").removeprefix("sampling.")
    for known, http in (_NAMES | more).items():
        if name == known or name.startswith((f"{known}.", f"{known}[")):
            return http + name.removeprefix(known)
    return name
