"""Parses a client's request into a complete `ParsedRequest`, or rejects it with the name of every wrong field.

Defaults of unset fields:
- `max_tokens`: the rest of the model's length, but at most 16 unless the prompt is a chat. A set value that exceeds the
  model's length is rejected with both numbers, never clipped.
- `seed`: derived from the idempotency key or the request's name, so that all workers of the request have the same one.
- temperature, top_p, top_k, min_p, repetition_penalty: the model's, by its generation_config.json.
- `think_while_decoding`: as in the cluster file, but off for deterministic requests. For a model that
  does not think, `router.request.lifecycle.fitted` turns it off.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TypeAlias, TypeVar

from baton import limits
from baton.core import Constraint, Sampling, SequenceSpec
from baton.errors import TOO_LONG, InvalidRequest, Overloaded, UnknownModel, Violation
from baton.receipts.issuer import Issuer
from baton.rpc import convert
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import inference_pb2 as pb
from baton.structured_output import Grammars
from baton.tokenizer import Tokenizer
from router.parsing.chat import Chats
from router.parsing.model_forms import REASONING, ends_in_reasoning, opens_reasoning
from router.parsing.ranges import Promise, promise_of, wrong_ranges
from router.parsing.receipts import issuer_for, receipt_violations

DEFAULT_MAX_TOKENS = 16
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_THREAD_CHARS = 4096  # longer texts are tokenized in a thread, to keep the event loop free

Converted = TypeVar("Converted")
_Get = Callable[[pb.GenerateRequest], int]
# Caps that are checked before anything is computed: field, size, maximum, unit.
_CAPS: tuple[tuple[str, _Get, int, str], ...] = (
    ("text", lambda m: len(m.text), limits.MAX_TEXT_CHARS, "characters"),
    ("token_ids", lambda m: len(m.token_ids.ids), limits.MAX_PROMPT_IDS, "tokens"),
    ("client_tag", lambda m: len(m.client_tag), limits.MAX_CLIENT_TAG_CHARS, "characters"),
    ("idempotency_key", lambda m: len(m.idempotency_key), limits.MAX_IDEMPOTENCY_KEY_CHARS, "characters"),
    ("n", lambda m: m.n, limits.MAX_CHOICES, "choices"),
    ("cache_scope", lambda m: len(m.cache_scope), limits.MAX_CACHE_SCOPE_CHARS, "characters"),
    ("sampling.stop_token_ids", lambda m: len(m.sampling.stop_token_ids), limits.MAX_STOP_TOKEN_IDS, "ids"),
)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A complete, checked request. `received` has the client's tokens of each choice; they are empty in a new request.
    `spell` decodes thoughts, and is None if the client does not want them.
    """

    spec: SequenceSpec
    received: tuple[tuple[int, ...], ...]
    determinism: str  # system fingerprint of the deterministic stream to resume, else ""
    resumable_s: float  # how long decode workers continue it without a router
    thinks: tuple[str, ...]  # set fields that need a model that thinks
    spell: Callable[[Sequence[int]], str] | None
    wants_spans: bool
    defaults: common_pb2.Sampling | None  # of parameters that the request left out
    exact: bool  # only repeat the record of the stream
    in_reasoning: bool  # the prompt ends inside opened reasoning
    scored: int  # prompt tokens whose log-probabilities the client has
    issuer: Issuer | None  # of the receipt that the client wants
    promise: Promise


class RequestParser:
    """Parses the requests to `model` or one of its `aliases`. `think_while_decoding`, `resumable_s` and `defaults`, the
    model's of sampling, are for unset fields.
    """

    def __init__(  # noqa: PLR0913 (each is a setting of the router)
        self,
        tokenizer: Tokenizer,
        model: str,
        *,
        think_while_decoding: bool = False,
        resumable_s: float = 0.0,
        aliases: tuple[str, ...] = (),
        defaults: common_pb2.Sampling | None = None,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        issuer: Issuer | None = None,
    ) -> None:
        self.tokenizer, self._names = tokenizer, (model, *aliases)
        self.defaults = defaults or common_pb2.Sampling()
        self.chats = Chats.of(tokenizer)
        self.tool_form = self.chats.tool_form if tool_parser == "auto" else tool_parser
        forms = {"auto": self.chats.reasoning_form, "none": ""}
        self.reasoning_form = forms.get(reasoning_parser, reasoning_parser)
        self.limiter = ParseLimiter()
        self._grammars, self._issuer = Grammars(tokenizer), issuer
        self._thinks_by_default, self._resumable_s = think_while_decoding, resumable_s

    async def parse(
        self,
        message: pb.ResumeRequest,
        name: str,
        max_model_len: int | None,
        limited: Callable[[SequenceSpec], SequenceSpec] = lambda spec: spec,
    ) -> ParsedRequest:
        """Return the complete request. `name` is its id; `limited` applies the limits of the caller's token.
        `max_model_len` is None until a worker reports it; until then workers reject long requests. Raises UnknownModel,
        Overloaded, or InvalidRequest with every wrong field.
        """
        request = message.request
        with self.limiter.one_more(message):
            seed, resumes = seed_of(request.idempotency_key or name), bool(message.request_id)
            found, in_reasoning = await self._spec(request, max_model_len, seed, resumes=resumes)
            spec = limited(found)
            received = _received(message, spec, self.tokenizer.vocab_size)
            if spec.constraint is not None and any(received):
                await asyncio.to_thread(self._grammars.check_known, spec.constraint, received)
        thinking_fields = ("thoughts", request.thoughts), ("think_while_decoding", request.think_while_decoding)
        return ParsedRequest(
            spec,
            tuple(received),
            determinism=message.system_fingerprint if spec.deterministic else "",
            resumable_s=request.resumable_s if request.HasField("resumable_s") else self._resumable_s,
            thinks=tuple(field for field, value in thinking_fields if value),
            spell=self.tokenizer.decode if request.thoughts else None,
            wants_spans=request.trace or request.kv_lengths,
            defaults=_left_out(self.defaults, request.sampling, spec.sampling.max_tokens),
            exact=message.exact,
            in_reasoning=in_reasoning,
            scored=message.prompt_logprobs_received,
            issuer=issuer_for(spec, self._issuer) if request.receipt else None,
            promise=promise_of(request),
        )

    async def _spec(
        self, message: pb.GenerateRequest, max_model_len: int | None, seed: int, *, resumes: bool = False
    ) -> tuple[SequenceSpec, bool]:
        """Return a complete spec: tokens within the vocabulary, all sampling set, output within the model's length. It
        comes with whether the prompt ends inside reasoning.
        """
        self.check_model(message.model)
        violations = list(_violations(message))
        violations += receipt_violations(message, self._issuer) if message.receipt else ()
        logprobs = message.logprobs if message.HasField("logprobs") else None
        whole = common_pb2.Sampling(max_tokens=2**31 - 1 if message.HasField("chat") else DEFAULT_MAX_TOKENS)
        whole.MergeFrom(self.defaults)
        whole.MergeFrom(message.sampling)
        sampling = _converted(lambda: convert.sampling_from_pb(whole, logprobs), violations)
        constraint = _constraint(message, violations)
        if message.WhichOneof("prompt") is None:
            violations.append(Violation("prompt", "one of text, token_ids and chat must be set"))
        if sampling is None or violations:
            raise InvalidRequest(*violations)
        await self._check(constraint)
        prompt, in_reasoning = await self._prompt(message)
        if in_reasoning and constraint is not None:
            constraint = replace(constraint, after=REASONING[self.reasoning_form][1])
            await self._check(constraint)
        violations += _outside_vocabulary(prompt, sampling, self.tokenizer.vocab_size)
        violations += [
            *_does_not_fit(prompt, message, max_model_len, resumes=resumes),
            *_too_many_scores(len(prompt), message),
        ]
        if violations:
            raise InvalidRequest(*violations)
        if sampling.seed is None:
            sampling = replace(sampling, seed=seed)
        if max_model_len is not None and not message.sampling.HasField("max_tokens"):
            left = max_model_len - len(prompt)
            sampling = replace(sampling, max_tokens=left if message.HasField("chat") else min(DEFAULT_MAX_TOKENS, left))
        thinks = self._thinks_by_default and not message.deterministic
        if message.HasField("think_while_decoding"):
            thinks = message.think_while_decoding
        rest = constraint, message.deterministic, thinks, convert.asked_prompt_logprobs(message), message.kv_lengths
        return SequenceSpec(prompt, sampling, (), message.priority, message.cache_scope, *rest), in_reasoning

    async def _check(self, constraint: Constraint | None) -> None:
        if constraint is not None:
            await asyncio.to_thread(self._grammars.check, constraint)

    async def _prompt(self, message: pb.GenerateRequest) -> tuple[tuple[int, ...], bool]:
        """Return the prompt, and whether it ends inside reasoning."""
        field, in_reasoning = message.WhichOneof("prompt"), False
        special = message.add_special_tokens if message.HasField("add_special_tokens") else None
        if field == "token_ids":
            prompt = list(message.token_ids.ids)
        elif field == "chat":
            text = await self.chats.prompt(message.chat)
            in_reasoning = ends_in_reasoning(text, self.reasoning_form)
            if message.chat.continue_final_message:
                given = message.chat.messages[-1].content
                in_reasoning = in_reasoning or opens_reasoning(given, self.reasoning_form)
            prompt = await self._encoded(text, added=special is True)
        else:
            prompt = await self._encoded(message.text, added=special is not False)
        if not prompt:
            raise InvalidRequest.of(field or "prompt", "must not be empty")
        return tuple(prompt), in_reasoning

    async def encode(self, source: str | pb.ChatMessages, special: bool | None = None) -> list[int]:
        """Return the token ids of a text or a conversation, computed in a thread if it is long. The tokenizer adds
        `special` tokens; None means to a text only. Raises InvalidRequest like `Chats.prompt`.
        """
        is_chat = isinstance(source, pb.ChatMessages)
        text = await self.chats.prompt(source) if isinstance(source, pb.ChatMessages) else source
        return await self._encoded(text, added=not is_chat if special is None else special)

    async def _encoded(self, text: str, *, added: bool) -> list[int]:
        """Return the token ids, with the special tokens that the tokenizer adds if these are `added`."""
        encode = self.tokenizer.encode if added else self.tokenizer.encode_plain
        return encode(text) if len(text) <= _THREAD_CHARS else await asyncio.to_thread(encode, text)

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, computed in a thread if there are many."""
        few = len(ids) <= _THREAD_CHARS
        return self.tokenizer.decode(list(ids)) if few else await asyncio.to_thread(self.tokenizer.decode, list(ids))

    def check_model(self, name: str) -> None:
        """Check the requested model; "" means the served one. Raises UnknownModel with its name."""
        if name not in {"", *self._names}:
            shown, served = name[: limits.MAX_SHOWN_MODEL_CHARS], " or ".join(map(repr, self._names))
            raise UnknownModel(f"model {shown!r} is not served; this router serves {served}")

    def check_tokenize(self, message: pb.TokenizeRequest) -> None:
        self.check_model(message.model)
        if (size := len(message.text)) > limits.MAX_TEXT_CHARS:
            raise InvalidRequest.of("text", f"at most {limits.MAX_TEXT_CHARS} characters, got {size}")

    def check_detokenize(self, message: pb.DetokenizeRequest) -> None:
        self.check_model(message.model)
        violations = [] if message.pieces else _outside("ids", message.ids, self.tokenizer.vocab_size)
        if (size := len(message.ids)) > limits.MAX_DETOKENIZE_IDS:
            violations.append(Violation("ids", f"at most {limits.MAX_DETOKENIZE_IDS} tokens, got {size}"))
        if violations:
            raise InvalidRequest(*violations)


def seed_of(text: str) -> int:
    """Return 63 bits that depend only on `text`, so that a request resumed or sent again with its key has the same."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1


def resumed_name(message: pb.ResumeRequest) -> str:
    """Return the name of the stream to resume, or "" if there is none or it is invalid and must not be echoed."""
    return message.request_id if _REQUEST_ID.fullmatch(message.request_id) else ""


def check_resumes(message: pb.ResumeRequest) -> None:
    """Check that a Resume has a valid stream name and the original request. Raises InvalidRequest."""
    wrong = []
    if not _REQUEST_ID.fullmatch(message.request_id):
        wrong.append(Violation("request_id", "must be the id of the stream: 1 to 64 of the characters A-Z a-z 0-9 _ -"))
    if not message.HasField("request"):
        wrong.append(Violation("request", "must be the request that began the stream"))
    if len(message.system_fingerprint) > limits.MAX_SYSTEM_FINGERPRINT_CHARS:
        text = f"at most {limits.MAX_SYSTEM_FINGERPRINT_CHARS} characters, got {len(message.system_fingerprint)}"
        wrong.append(Violation("system_fingerprint", text))
    if message.request.deterministic and any(one.ids for one in message.received) and not message.system_fingerprint:
        text = "must be that of the stream, because only workers with this fingerprint continue it with equal results"
        wrong.append(Violation("system_fingerprint", text))
    if wrong:
        raise InvalidRequest(*wrong)


def _received(message: pb.ResumeRequest, spec: SequenceSpec, vocab_size: int) -> list[tuple[int, ...]]:
    """Return the client's tokens of each choice. Raises InvalidRequest if they cannot belong to the request."""
    found = [tuple(ids.ids) for ids in message.received]
    choices, most = message.request.n if message.request.HasField("n") else 1, spec.sampling.max_tokens
    if len(found) > choices:
        raise InvalidRequest.of("received", f"at most {choices} choices, got {len(found)}")
    wrong = [violation for ids in found for violation in _outside("received", ids, vocab_size)]
    scored, total = message.prompt_logprobs_received, 0 if spec.prompt_logprobs is None else len(spec.prompt)
    if scored > total or (scored < total and (any(found) or message.exact)):
        text = f"must be {total}" if any(found) or message.exact else f"must be at most {total}"
        wrong.append(Violation("prompt_logprobs_received", f"{text}, got {scored}"))
    if any(len(ids) > most for ids in found):
        wrong.append(Violation("received", f"at most max_tokens ({most}) for each choice"))
    if wrong:
        raise InvalidRequest(*wrong)
    return found + [()] * (choices - len(found))


def _left_out(
    defaults: common_pb2.Sampling, sampling: common_pb2.Sampling, max_tokens: int
) -> common_pb2.Sampling | None:
    """Return the defaults of fields that `sampling` does not set, or None if there are none. `max_tokens` is one of
    them: it depends on the workers that are known now.
    """
    added = common_pb2.Sampling()
    added.CopyFrom(defaults)
    added.max_tokens = max_tokens
    for field, _ in sampling.ListFields():
        added.ClearField(field.name)  # type: ignore[arg-type]  # the stub lists the names
    return added if added.ListFields() else None


def _converted(convert_it: Callable[[], Converted], violations: list[Violation]) -> Converted | None:
    """Return a part of the message as a value, or add its violations and return None."""
    try:
        return convert_it()
    except InvalidRequest as error:
        violations += error.violations
        return None


def _constraint(message: pb.GenerateRequest, violations: list[Violation]) -> Constraint | None:
    if not message.HasField("constraint"):
        return None
    found = _converted(lambda: convert.constraint_from_pb(message.constraint), violations)
    violations += _against_constraint(message.sampling) if found is not None else []
    return found


def _against_constraint(sampling: common_pb2.Sampling) -> list[Violation]:
    fields = {"sampling.min_tokens": sampling.min_tokens, "sampling.ignore_eos": sampling.ignore_eos}
    text = "cannot be used with a constraint, which decides where an answer ends"
    words = "cannot be used with a constraint, which may allow no other token"
    found = [Violation(field, text) for field, value in fields.items() if value]
    return found + [Violation("sampling.bad_words", words)] * bool(sampling.bad_words)


def _violations(message: pb.GenerateRequest) -> Iterator[Violation]:
    """Yield the wrong fields that can be found without the model."""
    if message.HasField("n") and not message.n:
        yield Violation("n", "must be at least 1, got 0")
    yield from wrong_ranges(message)
    if message.constraint.after:
        yield Violation("constraint.after", "is only set by the router")
    if message.deterministic and message.think_while_decoding:
        yield Violation("think_while_decoding", "cannot be combined with deterministic")
    for field, size_of, most, unit in _CAPS:
        if (size := size_of(message)) > most:
            yield Violation(field, f"at most {most} {unit}, got {size}")


def _outside_vocabulary(prompt: tuple[int, ...], sampling: Sampling, vocab_size: int) -> list[Violation]:
    biased = [token_id for token_id, _ in sampling.logit_bias]
    groups = {"token_ids": prompt, "sampling.stop_token_ids": sampling.stop_token_ids, "sampling.logit_bias": biased}
    return [violation for field, ids in groups.items() for violation in _outside(field, ids, vocab_size)]


def _outside(field: str, ids: Collection[int], vocab_size: int) -> list[Violation]:
    """Return at most one violation: the largest token id of `field`, if it is outside the vocabulary."""
    worst = max(ids, default=0)
    return [Violation(field, f"token id {worst} is outside the vocabulary of {vocab_size}")] * (worst >= vocab_size)


def _does_not_fit(
    prompt: tuple[int, ...], message: pb.GenerateRequest, most: int | None, *, resumes: bool
) -> list[Violation]:
    """Return the violation of the workers' length. The `max_tokens` of a resumed stream was right when it began."""
    field = message.WhichOneof("prompt") or "prompt"
    if most is None:
        return []
    if len(prompt) + bool(message.sampling.max_tokens or not message.sampling.HasField("max_tokens")) > most:
        return [Violation(field, f"{TOO_LONG} {most} tokens; the prompt has {len(prompt)} and needs one more")]
    asked = message.sampling.max_tokens
    if not resumes and message.sampling.HasField("max_tokens") and len(prompt) + asked > most:
        text = f"{TOO_LONG} {most} tokens; {len(prompt)} prompt tokens + {asked} exceed it"
        return [Violation("sampling.max_tokens", f"{text}: at most {most - len(prompt)}")]
    return []


def _too_many_scores(tokens: int, message: pb.GenerateRequest) -> Iterator[Violation]:
    most, each = limits.MAX_PROMPT_SCORES, message.prompt_logprobs + 1
    if message.HasField("prompt_logprobs") and tokens * each > most:
        text = f"at most {most} log-probabilities of the prompt, got {tokens * each}: {tokens} prompt tokens x {each}"
        yield Violation("prompt_logprobs", text)


RETRY_S = 1.0
SMALL_BYTES = 4096  # smaller messages are parsed on the event loop, so never concurrently

Message: TypeAlias = pb.ResumeRequest | pb.TokenizeRequest | pb.DetokenizeRequest


class ParseLimiter:
    """Limits concurrent parsing, which happens before the queue and shares threads. Small messages without a constraint
    always pass, so the gateway can convert tokens to text during an answer.
    """

    def __init__(self, at_once: int = limits.MAX_READ_AT_ONCE, most_bytes: int = limits.MAX_READ_BYTES) -> None:
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
            raise Overloaded(f"{self._requests} requests of {self._bytes} bytes are being parsed", RETRY_S)
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
