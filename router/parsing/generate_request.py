"""Parses a `GenerateRequest` into a `SequenceSpec`, or rejects it with the name of every wrong field.

Defaults of unset fields:
- `max_tokens`: the rest of the model's length, but at most 16 unless the prompt is a chat. A set value that exceeds the
  model's length is rejected with both numbers, never clipped.
- `seed`: the argument of `parse`, so that all workers of the request have the same one.
- `think_while_decoding`: as in the cluster file, but off for deterministic requests. `thoughts.fitted` turns it off for
  a model that does not think.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

from baton.core import Constraint, Sampling, SequenceSpec
from baton.errors import InvalidRequest, Overloaded, UnknownModel, Violation
from baton.limits import (
    MAX_CACHE_SCOPE_CHARS,
    MAX_CHOICES,
    MAX_CLIENT_TAG_CHARS,
    MAX_IDEMPOTENCY_KEY_CHARS,
    MAX_PRIORITY,
    MAX_PROMPT_IDS,
    MAX_READ_AT_ONCE,
    MAX_READ_BYTES,
    MAX_RESUMABLE_S,
    MAX_SHOWN_MODEL_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_SYSTEM_FINGERPRINT_CHARS,
    MAX_TEXT_CHARS,
)
from baton.rpc import convert
from baton.rpc.convert import constraint_from_pb
from baton.rpc.v1 import inference_pb2 as pb
from baton.structured_output import Grammars
from baton.tokenizer import Tokenizer
from router.parsing.chat import NO_CHATS, Chats

DEFAULT_MAX_TOKENS = 16
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_THREAD_CHARS = 4096  # longer texts are tokenized in a thread, to keep the event loop free

_Get = Callable[[pb.GenerateRequest], int]
# Caps that are checked before anything is computed: field, size, maximum, unit.
_CAPS: tuple[tuple[str, _Get, int, str], ...] = (
    ("text", lambda m: len(m.text), MAX_TEXT_CHARS, "characters"),
    ("token_ids", lambda m: len(m.token_ids.ids), MAX_PROMPT_IDS, "tokens"),
    ("client_tag", lambda m: len(m.client_tag), MAX_CLIENT_TAG_CHARS, "characters"),
    ("idempotency_key", lambda m: len(m.idempotency_key), MAX_IDEMPOTENCY_KEY_CHARS, "characters"),
    ("n", lambda m: m.n, MAX_CHOICES, "choices"),
    ("cache_scope", lambda m: len(m.cache_scope), MAX_CACHE_SCOPE_CHARS, "characters"),
    ("sampling.stop_token_ids", lambda m: len(m.sampling.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids"),
)


async def parse(
    message: pb.GenerateRequest,
    tokenizer: Tokenizer,
    model: str,
    max_model_len: int | None,
    chats: Chats = NO_CHATS,
    grammars: Grammars | None = None,
    *,
    seed: int,
    while_decoding: bool = False,
) -> SequenceSpec:
    """Return a complete spec: tokens within the vocabulary, all sampling set, output within the model's length.
    `model` is the served model. `max_model_len` is None until a worker reports it; until then workers reject long
    requests. `seed` and `while_decoding` are the defaults of unset fields. `chats` renders conversations, `grammars`
    checks constraints. Raises UnknownModel, or InvalidRequest with every wrong field.
    """
    check_model(message.model, model)
    sampling, violations = _sampling(message)
    constraint, wrong = _constraint(message)
    violations = [
        *_choices(message),
        *_priority(message),
        *_lasting(message),
        *_bits_or_thoughts(message),
        *_too_large(message),
        *violations,
        *wrong,
    ]
    if message.WhichOneof("prompt") is None:
        violations.append(Violation("prompt", "one of text, token_ids and chat must be set"))
    if sampling is None or violations:
        raise InvalidRequest(*violations)
    if constraint is not None:
        await asyncio.to_thread((grammars or Grammars(tokenizer)).check, constraint)
    prompt = await _prompt(message, tokenizer, chats)
    wrong = [
        *_outside_vocabulary(prompt, sampling, tokenizer.vocab_size),
        *_does_not_fit(prompt, message, max_model_len),
    ]
    if wrong:
        raise InvalidRequest(*wrong)
    if sampling.seed is None:
        sampling = replace(sampling, seed=seed)
    sampling = _completed(sampling, message, len(prompt), max_model_len)
    rest = (constraint, message.deterministic, _thinks_on(message, while_decoding))
    return SequenceSpec(prompt, sampling, (), message.priority, message.cache_scope, *rest)


def resumed_name(message: pb.ResumeRequest) -> str:
    """Return the name of the stream to resume, or "" if there is none or it is invalid and must not be echoed."""
    return message.request_id if _REQUEST_ID.fullmatch(message.request_id) else ""


def check_resumes(message: pb.ResumeRequest) -> None:
    """Check that a Resume has a valid stream name and the original request. Raises InvalidRequest."""
    wrong = []
    if not _REQUEST_ID.fullmatch(message.request_id):
        wrong.append(Violation("request_id", "must be that of the stream: 1 to 64 of the characters A-Z a-z 0-9 _ -"))
    if not message.HasField("request"):
        wrong.append(Violation("request", "must be the original one"))
    if len(message.system_fingerprint) > MAX_SYSTEM_FINGERPRINT_CHARS:
        text = f"at most {MAX_SYSTEM_FINGERPRINT_CHARS} characters, got {len(message.system_fingerprint)}"
        wrong.append(Violation("system_fingerprint", text))
    if message.request.deterministic and any(one.ids for one in message.received) and not message.system_fingerprint:
        text = "must be that of the stream: a deterministic request goes on only where its bits are the same"
        wrong.append(Violation("system_fingerprint", text))
    if wrong:
        raise InvalidRequest(*wrong)


def received_of(message: pb.ResumeRequest, spec: SequenceSpec, vocab_size: int) -> list[tuple[int, ...]]:
    """Return the client's tokens of each choice. Raises InvalidRequest if they cannot belong to the request."""
    found = [tuple(ids.ids) for ids in message.received]
    choices, most = choices_of(message.request), spec.sampling.max_tokens
    wrong = [violation for ids in found for violation in outside("received", ids, vocab_size)]
    if len(found) > choices:
        wrong.append(Violation("received", f"of {choices} choices at most, got {len(found)}"))
    if any(len(ids) > most for ids in found):
        wrong.append(Violation("received", f"at most max_tokens ({most}) of each choice"))
    if wrong:
        raise InvalidRequest(*wrong)
    return found + [()] * (choices - len(found))


async def check_received(grammars: Grammars, spec: SequenceSpec, received: list[tuple[int, ...]]) -> None:
    """Check received tokens against the constraint. Raises InvalidRequest."""
    if spec.constraint is not None and any(received):
        await asyncio.to_thread(grammars.check_known, spec.constraint, received)


def choices_of(message: pb.GenerateRequest) -> int:
    """Return the number of choices; 1 if unset."""
    return message.n if message.HasField("n") else 1


def check_model(name: str, served: str) -> None:
    """Check the requested model; "" means the served one. Raises UnknownModel with its name."""
    if name not in {"", served}:
        raise UnknownModel(f"model {name[:MAX_SHOWN_MODEL_CHARS]!r} is not served here; {served!r} is")


def check_text(text: str) -> None:
    """Check the length of a text to tokenize. Raises InvalidRequest."""
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequest.of("text", f"at most {MAX_TEXT_CHARS} characters, got {len(text)}")


async def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of `text`. Long texts are tokenized in a thread."""
    return tokenizer.encode(text) if len(text) <= _THREAD_CHARS else await asyncio.to_thread(tokenizer.encode, text)


async def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of `ids`. Many ids are decoded in a thread."""
    few = len(ids) <= _THREAD_CHARS
    return tokenizer.decode(list(ids)) if few else await asyncio.to_thread(tokenizer.decode, list(ids))


async def encode_chat(tokenizer: Tokenizer, chats: Chats, chat: pb.ChatMessages) -> list[int]:
    """Return the token ids of a conversation. Raises InvalidRequest like `Chats.prompt`."""
    text = await chats.prompt(chat)
    if len(text) <= _THREAD_CHARS:
        return tokenizer.encode_rendered(text)
    return await asyncio.to_thread(tokenizer.encode_rendered, text)


def _sampling(message: pb.GenerateRequest) -> tuple[Sampling | None, list[Violation]]:
    try:
        logprobs = message.logprobs if message.HasField("logprobs") else None
        return convert.sampling_from_pb(message.sampling, logprobs), []
    except InvalidRequest as error:
        return None, list(error.violations)


def _constraint(message: pb.GenerateRequest) -> tuple[Constraint | None, list[Violation]]:
    if not message.HasField("constraint"):
        return None, []
    try:
        constraint = constraint_from_pb(message.constraint)
    except InvalidRequest as error:
        return None, list(error.violations)
    asked = {"sampling.min_tokens": message.sampling.min_tokens, "sampling.ignore_eos": message.sampling.ignore_eos}
    why = "cannot go with a constraint, which says where an answer ends"
    return constraint, [Violation(field, why) for field, value in asked.items() if value]


def _choices(message: pb.GenerateRequest) -> list[Violation]:
    return [Violation("n", "must be at least 1, got 0")] * (message.HasField("n") and not message.n)


def _priority(message: pb.GenerateRequest) -> list[Violation]:
    text = f"must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, got {message.priority}"
    return [Violation("priority", text)] * (abs(message.priority) > MAX_PRIORITY)


def _lasting(message: pb.GenerateRequest) -> list[Violation]:
    text = f"must be between 0 and {MAX_RESUMABLE_S} seconds, got {message.resumable_s}"
    return [] if 0 <= message.resumable_s <= MAX_RESUMABLE_S else [Violation("resumable_s", text)]  # rejects NaN, too


def _bits_or_thoughts(message: pb.GenerateRequest) -> list[Violation]:
    asked = message.deterministic and message.think_while_decoding
    return [Violation("think_while_decoding", "cannot be combined with deterministic")] * asked


def _thinks_on(message: pb.GenerateRequest, default: bool) -> bool:
    if message.HasField("think_while_decoding"):
        return message.think_while_decoding
    return default and not message.deterministic


def _too_large(message: pb.GenerateRequest) -> list[Violation]:
    sizes = ((field, size(message), most, unit) for field, size, most, unit in _CAPS)
    return [Violation(field, f"at most {most} {unit}, got {size}") for field, size, most, unit in sizes if size > most]


async def _prompt(message: pb.GenerateRequest, tokenizer: Tokenizer, chats: Chats) -> tuple[int, ...]:
    field = message.WhichOneof("prompt")
    if field == "chat":
        prompt = tuple(await encode_chat(tokenizer, chats, message.chat))
    else:
        prompt = tuple(message.token_ids.ids if field == "token_ids" else await encode(tokenizer, message.text))
    if not prompt:
        raise InvalidRequest.of(field or "prompt", "must not be empty")
    return prompt


def _outside_vocabulary(prompt: tuple[int, ...], sampling: Sampling, vocab_size: int) -> list[Violation]:
    biased = [token_id for token_id, _ in sampling.logit_bias]
    groups = {"token_ids": prompt, "sampling.stop_token_ids": sampling.stop_token_ids, "sampling.logit_bias": biased}
    return [violation for field, ids in groups.items() for violation in outside(field, ids, vocab_size)]


def outside(field: str, ids: Collection[int], vocab_size: int) -> list[Violation]:
    """Return at most one violation: the largest token id of `field`, if it is outside the vocabulary."""
    worst = max(ids, default=0)
    return [Violation(field, f"token id {worst} is outside the vocabulary of {vocab_size}")] * (worst >= vocab_size)


def _does_not_fit(prompt: tuple[int, ...], message: pb.GenerateRequest, most: int | None) -> list[Violation]:
    field = message.WhichOneof("prompt") or "prompt"
    if most is None:
        return []
    if len(prompt) + 1 > most:
        return [Violation(field, f"{len(prompt)} tokens and one more do not fit the model's length of {most}")]
    asked = message.sampling.max_tokens
    if message.sampling.HasField("max_tokens") and len(prompt) + asked > most:
        text = f"{len(prompt)} prompt tokens + {asked} exceed the model's length of {most}"
        return [Violation("sampling.max_tokens", f"{text}: at most {most - len(prompt)}")]
    return []


def _completed(sampling: Sampling, message: pb.GenerateRequest, prompt: int, most: int | None) -> Sampling:
    if message.sampling.HasField("max_tokens") or most is None:
        return sampling
    room = most - prompt
    return replace(sampling, max_tokens=room if message.HasField("chat") else min(DEFAULT_MAX_TOKENS, room))


RETRY_S = 1.0
SMALL_BYTES = 4096  # smaller messages are parsed on the event loop, so never concurrently

Message: TypeAlias = pb.ResumeRequest | pb.TokenizeRequest | pb.DetokenizeRequest


class ParseLimiter:
    """Limits concurrent parsing, which happens before the queue and shares threads. Small messages without a constraint
    always pass, so the gateway can convert tokens to text during an answer.
    """

    def __init__(self, at_once: int = MAX_READ_AT_ONCE, most_bytes: int = MAX_READ_BYTES) -> None:
        self._at_once, self._most_bytes = at_once, most_bytes
        self._requests = self._bytes = 0

    @contextmanager
    def one_more(self, message: Message) -> Iterator[None]:
        """Count `message` while it is parsed. Raises Overloaded beyond the limit, but never for a single message."""
        size = message.ByteSize()
        if not needs_thread(message, size):
            yield
            return
        if self._requests >= self._at_once or (self._requests and self._bytes + size > self._most_bytes):
            raise Overloaded(f"{self._requests} requests are being read, of {self._bytes} bytes", RETRY_S)
        self._requests += 1
        self._bytes += size
        try:
            yield
        finally:
            self._requests -= 1
            self._bytes -= size


def needs_thread(message: Message, size: int) -> bool:
    """Return whether parsing `size` bytes may take long."""
    constrained = isinstance(message, pb.ResumeRequest) and message.request.HasField("constraint")
    return constrained or size > SMALL_BYTES
