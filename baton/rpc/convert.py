"""Conversion between protobuf messages and `baton.core`: `x_to_pb` builds a message, `x_from_pb` a valid value.

No other module builds or reads messages of these types. Every `x_from_pb` raises `InvalidRequest` naming the field, for
any sender. On internal services the caller then ends the stream or rejects the handoff. Floats of `Sampling` and
log-probabilities are 32 bit on the wire; all processes compute with the received value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from itertools import count
from operator import attrgetter

from baton.core import (
    LEFT_OUT,
    BlockCounts,
    Channel,
    Constraint,
    Finish,
    FinishReason,
    HandoffId,
    Incarnation,
    KVLayout,
    LeftOut,
    Load,
    Pace,
    PromptPart,
    PromptToken,
    Role,
    Sampling,
    SequenceSpec,
    ThinkingState,
    Thought,
    Token,
    TokenLogprobs,
    WorkerInfo,
    WorkerRef,
)
from baton.errors import InvalidRequest
from baton.limits import MAX_LOGPROBS, MAX_PRIORITY
from baton.rpc.v1 import common_pb2 as common
from baton.rpc.v1 import inference_pb2 as inference
from baton.rpc.v1 import worker_pb2 as worker
from baton.tracing.trace import Span


def constraint_to_pb(value: Constraint | None) -> inference.Constraint | None:
    """Convert a constraint. None leaves the field unset."""
    if value is None:
        return None
    if value.kind == "choices":
        return inference.Constraint(choices=inference.Choices(texts=value.texts), after=value.after)
    return inference.Constraint(**{value.kind: value.texts[0]}, after=value.after)  # type: ignore[arg-type]


def constraint_from_pb(message: inference.Constraint) -> Constraint:
    """Read a constraint. Raises InvalidRequest if it has no kind or is too large."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest.of("constraint", "one of json_schema, regex, choices and grammar must be set")
    if kind == "choices":
        return Constraint(kind, tuple(message.choices.texts), tuple(message.after))
    texts = {"json_schema": message.json_schema, "regex": message.regex, "grammar": message.grammar}
    return Constraint(kind, (texts[kind],), tuple(message.after))


_REASONS = {reason: common.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}
_REASONS_BACK = {number: reason for reason, number in _REASONS.items()}
_DTYPES = ("float32", "bfloat16", "float16", "int8")
_SAMPLING_LISTS = ("stop", "stop_token_ids", "logit_bias", "bad_words")
_SAMPLING = tuple(field.name for field in fields(Sampling) if field.name not in {"logit_bias", "logprobs"})
_SAMPLING_OF = attrgetter(*_SAMPLING)


def require(ok: object, field: str, description: str) -> None:
    """Raise InvalidRequest naming `field` unless `ok`."""
    if not ok:
        raise InvalidRequest.of(field, description)


def incarnation_to_pb(value: Incarnation) -> common.Incarnation:
    """Convert; the fields have the same names."""
    return common.Incarnation(epoch=value.epoch, counter=value.counter)


def incarnation_from_pb(message: common.Incarnation) -> Incarnation:
    """Read an incarnation; any two numbers are valid."""
    return Incarnation(message.epoch, message.counter)


def ref_to_pb(value: WorkerRef) -> common.WorkerRef:
    """Convert; the fields have the same names."""
    incarnation = incarnation_to_pb(value.incarnation)
    return common.WorkerRef(worker_id=value.worker_id, incarnation=incarnation, address=value.address)


def ref_from_pb(message: common.WorkerRef, field: str = "ref") -> WorkerRef:
    """Read a worker reference. Raises InvalidRequest, with prefix `field`, if a part is missing."""
    require(message.worker_id, f"{field}.worker_id", "must not be empty")
    require(message.HasField("incarnation"), f"{field}.incarnation", "must be set")
    require(message.address, f"{field}.address", "must not be empty")
    return WorkerRef(message.worker_id, incarnation_from_pb(message.incarnation), message.address)


def handoff_to_pb(value: HandoffId) -> common.HandoffId:
    """Convert; the fields have the same names."""
    return common.HandoffId(request_id=value.request_id, attempt=value.attempt)


def handoff_from_pb(message: common.HandoffId) -> HandoffId:
    """Read a handoff id. Raises InvalidRequest without a request id or with attempt 0, as attempts count from 1."""
    require(message.request_id, "handoff.request_id", "must not be empty")
    require(message.attempt >= 1, "handoff.attempt", "must be at least 1")
    return HandoffId(message.request_id, message.attempt)


def sampling_to_pb(value: Sampling) -> common.Sampling:
    """Set every field except a `seed` of None. `logprobs` is in GenerateRequest or SequenceSpec instead."""
    given = dict(zip(_SAMPLING, _SAMPLING_OF(value), strict=True))  # `asdict` would copy deeply
    return common.Sampling(logit_bias=dict(value.logit_bias), **given)


def sampling_from_pb(message: common.Sampling, logprobs: int | None = None) -> Sampling:
    """Read sampling parameters; unset fields get defaults. Raises InvalidRequest naming every invalid field."""
    given = {field.name: value for field, value in message.ListFields() if field.name not in _SAMPLING_LISTS}
    return Sampling(
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        bad_words=tuple(message.bad_words),
        logprobs=logprobs,
        **given,
    )


def spec_to_pb(value: SequenceSpec) -> worker.SequenceSpec:
    """Convert a spec. The router must set the seed first: workers reject a sampled request without it."""
    return worker.SequenceSpec(
        prompt=value.prompt,
        known=value.known,
        sampling=sampling_to_pb(value.sampling),
        logprobs=value.sampling.logprobs,
        priority=value.priority,
        cache_scope=value.cache_scope,
        constraint=constraint_to_pb(value.constraint),
        deterministic=value.deterministic,
        think_while_decoding=value.think_while_decoding,
        prompt_logprobs=value.prompt_logprobs,
        kv_lengths=value.kv_lengths,
    )


def spec_from_pb(message: worker.SequenceSpec) -> SequenceSpec:
    """Read a spec. Raises InvalidRequest without a prompt or a required seed, or if a field is out of range."""
    logprobs = message.logprobs if message.HasField("logprobs") else None
    sampling = sampling_from_pb(message.sampling, logprobs)
    require(message.prompt, "spec.prompt", "must have at least one token")
    # Without it the two workers of a handoff would use different seeds.
    require(sampling.temperature == 0 or sampling.seed is not None, "spec.sampling.seed", "must be set by the router")
    require(abs(message.priority) <= MAX_PRIORITY, "spec.priority", f"must be within {MAX_PRIORITY} of 0")
    prompt, known = tuple(message.prompt), tuple(message.known)
    constraint = constraint_from_pb(message.constraint) if message.HasField("constraint") else None
    rest = (message.priority, message.cache_scope, constraint, message.deterministic, message.think_while_decoding)
    return SequenceSpec(prompt, sampling, known, *rest, asked_prompt_logprobs(message), message.kv_lengths)


def asked_prompt_logprobs(message: worker.SequenceSpec | inference.GenerateRequest) -> int | None:
    """Read the field of this name. Raises InvalidRequest if it is out of range."""
    if not message.HasField("prompt_logprobs"):
        return None
    text = f"must be between 0 and {MAX_LOGPROBS}, got {message.prompt_logprobs}"
    require(message.prompt_logprobs <= MAX_LOGPROBS, "prompt_logprobs", text)
    return message.prompt_logprobs


def prompt_part_to_pb(part: PromptPart) -> common.PromptLogprobs:
    """Convert a scored part of a prompt."""
    scores = [common.TokenLogprobs() if t.logprobs is None else token_logprobs_to_pb(t.logprobs) for t in part.tokens]
    found = common.PromptLogprobs(ids=[t.token_id for t in part.tokens], ranks=[t.rank for t in part.tokens])
    found.logprobs.extend(scores)
    setattr(found, "from", part.start)  # a keyword in Python
    return found


def prompt_part_from_pb(message: common.PromptLogprobs) -> PromptPart:
    """Read a scored part of a prompt. Raises InvalidRequest if the parallel arrays differ in length."""
    ids, ranks, scores = message.ids, message.ranks, message.logprobs
    require(len(ids) == len(ranks) == len(scores), "prompt_logprobs", "its arrays differ in length")
    rows = zip(ids, ranks, scores, strict=True)
    tokens = (PromptToken(i, rank, token_logprobs_from_pb(score) if rank else None) for i, rank, score in rows)
    return PromptPart(getattr(message, "from"), tuple(tokens))


def token_logprobs_to_pb(value: TokenLogprobs) -> common.TokenLogprobs:
    """Convert; the order of `top` is kept."""
    top = [common.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in value.top]
    return common.TokenLogprobs(logprob=value.logprob, top=top)


def token_logprobs_from_pb(message: common.TokenLogprobs) -> TokenLogprobs:
    """Read; the order of `top` is kept."""
    return TokenLogprobs(message.logprob, tuple((top.token_id, top.logprob) for top in message.top))


def _first_index(tokens: Sequence[Token]) -> int:
    first = tokens[0].index if tokens else 0
    if tokens[1:] and any(token.index != index for index, token in enumerate(tokens, first)):
        raise ValueError(f"token indices are not consecutive: {[token.index for token in tokens]}")
    return first


def _all_logprobs(tokens: Sequence[Token]) -> list[common.TokenLogprobs]:
    found = [token_logprobs_to_pb(token.logprobs) for token in tokens if token.logprobs is not None]
    if len(found) not in {0, len(tokens)}:
        raise ValueError("logprobs must be on every token of a message or on none")
    return found


def tokens_to_pb(tokens: Sequence[Token]) -> worker.OutputTokens:
    """Convert one step's tokens of one choice. Raises ValueError if indices have gaps or only some have logprobs."""
    message = worker.OutputTokens()
    fill_tokens(message, tokens)
    return message


def fill_tokens(message: worker.OutputTokens, tokens: Sequence[Token]) -> None:
    """Do the same as `tokens_to_pb`, without a copy, into a message that is part of another."""
    first = _first_index(tokens)
    message.ids.extend([token.token_id for token in tokens])
    message.texts.extend([token.text for token in tokens])
    if logprobs := _all_logprobs(tokens):
        message.logprobs.extend(logprobs)
    setattr(message, "from", first)  # a keyword in Python


def tokens_from_pb(message: worker.OutputTokens) -> list[Token]:
    """Read tokens. Raises InvalidRequest if the parallel arrays differ in length."""
    ids, texts, logprobs = message.ids, message.texts, message.logprobs
    if len(texts) != len(ids):
        raise InvalidRequest.of("tokens.texts", f"must have {len(ids)} entries, has {len(texts)}")
    first: int = getattr(message, "from")
    if not logprobs:  # the usual case, on the path of every token
        if len(ids) == 1:
            return [Token(first, ids[0], texts[0])]
        return [Token(index, token_id, text) for index, token_id, text in zip(count(first), ids, texts, strict=False)]
    if len(logprobs) != len(ids):
        raise InvalidRequest.of("tokens.logprobs", f"must be empty or have {len(ids)} entries")
    rows = zip(count(first), ids, texts, map(token_logprobs_from_pb, logprobs), strict=False)
    return [Token(*row) for row in rows]


def tokens_to_public_pb(tokens: Sequence[Token], choice: int = 0, *, recorded: bool = False) -> inference.Tokens:
    """Convert tokens for a client, with one text for all. Raises ValueError as `tokens_to_pb`."""
    return inference.Tokens(
        choice=choice,
        ids=[token.token_id for token in tokens],
        text="".join(token.text for token in tokens),
        logprobs=_all_logprobs(tokens),
        lengths=[len(token.text) for token in tokens] if tokens[1:] else [],
        recorded=recorded,
        **{"from": _first_index(tokens)},
    )


def tail_to_public_pb(text: str, start: int, choice: int = 0) -> inference.Tokens:
    """Convert text that comes without a token, after `start` tokens."""
    message = inference.Tokens(choice=choice, text=text)
    setattr(message, "from", start)  # a keyword in Python
    return message


def finish_reason_to_pb(value: FinishReason) -> common.FinishReason.ValueType:
    """Convert a reason. Public and internal services share the enum."""
    return _REASONS[value]


def finish_reason_from_pb(number: common.FinishReason.ValueType) -> FinishReason:
    """Read a reason. Raises InvalidRequest if this version does not have it."""
    require(number in _REASONS_BACK, "finish.reason", f"unknown reason {number}")
    return _REASONS_BACK[number]


def finish_to_pb(value: Finish) -> worker.OutputFinish:
    """Convert a finish. The tail is internal: a client gets it as text."""
    scores = None if value.logprobs is None else token_logprobs_to_pb(value.logprobs)
    return worker.OutputFinish(reason=_REASONS[value.reason], matched=value.matched, tail=value.tail, logprobs=scores)


def finish_to_public_pb(value: Finish, choice: int) -> inference.Finished:
    """Convert a finish for a client."""
    scores = None if value.logprobs is None else token_logprobs_to_pb(value.logprobs)
    reason = finish_reason_to_pb(value.reason)
    return inference.Finished(choice=choice, reason=reason, matched_stop=value.matched, logprobs=scores)


def finish_from_pb(message: worker.OutputFinish) -> Finish:
    """Read a finish. Raises InvalidRequest if this version does not have the reason."""
    scores = token_logprobs_from_pb(message.logprobs) if message.HasField("logprobs") else None
    return Finish(finish_reason_from_pb(message.reason), message.matched, message.tail, scores)


def layout_to_pb(value: KVLayout) -> common.KVLayout:
    """Convert; the fields have the same names."""
    return common.KVLayout(**asdict(value))


def layout_from_pb(message: common.KVLayout) -> KVLayout:
    """Read a layout. Raises InvalidRequest for a size of 0 or an unknown dtype: block sizes depend on them."""
    sizes = {field.name for field, value in message.ListFields()}  # protobuf omits zeros
    for name in ("layers", "kv_heads", "head_dim", "block_size"):
        require(name in sizes, f"layout.{name}", "must be at least 1")
    require(message.dtype in _DTYPES, "layout.dtype", f"must be one of {', '.join(_DTYPES)}, got {message.dtype!r}")
    require(message.tensors, "layout.tensors", "must not be empty")
    return KVLayout(
        message.layers,
        message.kv_heads,
        message.head_dim,
        message.block_size,
        message.dtype,
        tuple(message.tensors),
        message.state_size,
    )


def info_to_pb(value: WorkerInfo) -> common.WorkerInfo:
    """Convert; all fields, also nested ones, have the same names."""
    return common.WorkerInfo(**asdict(value))


def info_from_pb(message: common.WorkerInfo) -> WorkerInfo:
    """Read a worker's info. Raises InvalidRequest for an unknown role, a missing reference or a bad layout."""
    roles = [role.value for role in Role]
    require(message.role in roles, "info.role", f"must be one of {', '.join(roles)}, got {message.role!r}")
    return WorkerInfo(
        ref=ref_from_pb(message.ref, "info.ref"),
        role=Role(message.role),
        fingerprint=message.fingerprint,
        model=message.model,
        max_model_len=message.max_model_len,
        total_blocks=message.total_blocks,
        layout=layout_from_pb(message.layout),
        pid=message.pid,
        host=message.host,
        protocol_version=message.protocol_version,
        determinism=message.determinism,
        nondeterminism=message.nondeterminism,
        thinking_chunk=message.thinking_chunk,
        metrics=message.metrics,
        cpu_level=message.cpu_level,
        quantize=message.quantize,
        backend=message.backend,
        tokenizer=message.tokenizer,
    )


_NESTED_LOAD = {"blocks", "channels", "prefill_pace", "decode_pace", "joint_pace", "beside_pace"}
_NO_PACE = Pace()
_LOAD = tuple(field.name for field in fields(Load) if field.name not in _NESTED_LOAD)
_PACE, _COUNTS = (tuple(field.name for field in fields(kind)) for kind in (Pace, BlockCounts))
_LOAD_OF, _PACE_OF, _COUNTS_OF = attrgetter(*_LOAD), attrgetter(*_PACE), attrgetter(*_COUNTS)


def counts_to_pb(value: BlockCounts) -> common.BlockCounts:
    """Convert; the fields have the same names."""
    return common.BlockCounts(**dict(zip(_COUNTS, _COUNTS_OF(value), strict=True)))


def counts_from_pb(message: common.BlockCounts) -> BlockCounts:
    """Read block counts. Raises InvalidRequest unless the states add up to the total."""
    counts = BlockCounts(
        message.total, message.free, message.reserved, message.owned, message.cached, message.quarantined
    )
    states = counts.free + counts.reserved + counts.owned + counts.cached + counts.quarantined
    require(states == counts.total, "load.blocks", f"states add up to {states}, not to the total {counts.total}")
    return counts


def load_to_pb(value: Load) -> common.Load:
    """Convert a load report. Without `asdict`, which is too slow for every step."""
    return common.Load(
        blocks=counts_to_pb(value.blocks),
        channels=[common.Channel(**asdict(channel)) for channel in value.channels],
        prefill_pace=_pace_to_pb(value.prefill_pace),
        decode_pace=_pace_to_pb(value.decode_pace),
        joint_pace=_pace_to_pb(value.joint_pace),
        beside_pace=_pace_to_pb(value.beside_pace),
        **dict(zip(_LOAD, _LOAD_OF(value), strict=True)),
    )


def _pace_to_pb(value: Pace) -> common.Pace | None:
    """Convert a pace. Returns None if there was no such step yet."""
    return common.Pace(**dict(zip(_PACE, _PACE_OF(value), strict=True))) if value != _NO_PACE else None


def load_from_pb(message: common.Load) -> Load:
    """Read a load report. Raises InvalidRequest for block counts that do not add up, or invalid seconds."""
    given = {field.name: value for field, value in message.ListFields() if field.name not in _NESTED_LOAD}
    return Load(
        blocks=counts_from_pb(message.blocks),
        channels=tuple(
            Channel(c.peer, c.transport, c.bytes_per_s, left_out_from_pb(c.left_out)) for c in message.channels
        ),
        prefill_pace=_pace(message.prefill_pace, "load.prefill_pace"),
        decode_pace=_pace(message.decode_pace, "load.decode_pace"),
        joint_pace=_pace(message.joint_pace, "load.joint_pace"),
        beside_pace=_pace(message.beside_pace, "load.beside_pace"),
        **given,
    )


def left_out_from_pb(messages: Iterable[common.LeftOut]) -> tuple[LeftOut, ...]:
    """Read why transports are not used. A reason of a newer peer is `unknown`."""
    return tuple(LeftOut(m.transport, m.reason if m.reason in LEFT_OUT else "unknown", m.detail) for m in messages)


def _pace(message: common.Pace, field: str) -> Pace:
    """Read a pace; unset means no such step yet. `field` is its name in errors."""
    require(0 <= message.seconds < math.inf, f"{field}.seconds", f"must be 0 or more, got {message.seconds}")
    return Pace(message.steps, message.tokens, message.context, message.seconds)


def span_from_pb(message: common.Span) -> Span:
    """Read a span of a request, as a router sends it."""
    return Span(
        message.name,
        message.process,
        message.role,
        message.start_s,
        message.duration_s,
        dict(message.attributes),
        message.attempt,
        message.choice,
    )


def thinking_to_pb(value: ThinkingState | None) -> worker.ThinkingState | None:
    """Convert; the fields have the same names."""
    if value is None:
        return None
    return worker.ThinkingState(
        thinker=value.thinker,
        chunk=value.chunk,
        offset=value.offset,
        state=value.state,
        rows=value.rows,
        thoughts=_ids_to_pb(value.thoughts),
    )


def thinking_from_pb(message: worker.ThinkingState) -> ThinkingState:
    """Read a thinking state; sizes are checked with the model. Raises InvalidRequest if incomplete or too long."""
    require(message.thinker, "thinking.thinker", "must not be empty")
    require(message.state, "thinking.state", "must not be empty")
    text = f"must be at most {message.chunk}, one for each chunk before the open one, got {len(message.thoughts)}"
    require(len(message.thoughts) <= message.chunk, "thinking.thoughts", text)
    thoughts = tuple(tuple(each.ids) for each in message.thoughts)
    return ThinkingState(message.thinker, message.chunk, message.offset, message.state, message.rows, thoughts)


def thoughts_to_pb(thoughts: Sequence[Thought]) -> worker.OutputThoughts:
    """Convert thoughts about consecutive chunks, at least one. Raises ValueError otherwise."""
    first = thoughts[0].chunk if thoughts else -1
    if [thought.chunk for thought in thoughts] != list(range(first, first + len(thoughts))) or first < 0:
        raise ValueError(f"chunks are not consecutive: {[thought.chunk for thought in thoughts]}")
    return worker.OutputThoughts(chunk=first, thoughts=_ids_to_pb(thought.token_ids for thought in thoughts))


def thoughts_from_pb(message: worker.OutputThoughts) -> list[Thought]:
    """Read thoughts; any lists of ids are valid."""
    return [Thought(chunk, tuple(each.ids)) for chunk, each in enumerate(message.thoughts, message.chunk)]


def _ids_to_pb(thoughts: Iterable[Iterable[int]]) -> list[common.TokenIds]:
    return [common.TokenIds(ids=ids) for ids in thoughts]
