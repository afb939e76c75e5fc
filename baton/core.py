"""The nouns of Baton, as frozen values: who (incarnations, workers), what (requests, sampling, tokens) and where (KV).

No torch, no gRPC, no I/O. A value that exists is valid: constructors of what comes from outside check themselves and
raise `InvalidRequest` naming the field.

What the whole text of an answer must match, as a client says it. What it means to a model: `baton.structured_output`.

What numbers a request may hold: the one table of bounds, both ends included.

What a worker reports of itself with each step. Nothing here changes once it is made; to have that enforced would
take several times as long as to make it.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace
from typing import Literal

from baton.errors import InvalidRequest, Violation
from baton.limits import (
    MAX_CHOICE_CHARS,
    MAX_CHOICE_TEXTS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
)

Kind = Literal["json_schema", "regex", "choices"]

_MOST_BYTES = {"json_schema": MAX_SCHEMA_BYTES, "regex": MAX_REGEX_BYTES}


@dataclass(frozen=True, slots=True)
class Constraint:
    """One JSON schema, one regular expression, or the texts of which the answer is one."""

    kind: Kind
    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        size, most = sum(len(text.encode()) for text in self.texts), _MOST_BYTES.get(self.kind, 0)
        if self.kind == "choices":
            if not 1 <= len(self.texts) <= MAX_CHOICE_TEXTS:
                raise self.refused(f"there must be 1 to {MAX_CHOICE_TEXTS}, got {len(self.texts)}")
            if not all(1 <= len(text) <= MAX_CHOICE_CHARS for text in self.texts):
                raise self.refused(f"each must have 1 to {MAX_CHOICE_CHARS} characters")
        elif not 1 <= size <= most:
            raise self.refused(f"must have 1 to {most} bytes, got {size}")

    def refused(self, why: str) -> InvalidRequest:
        """The error that names what is wrong with it."""
        return InvalidRequest.of(f"constraint.{self.kind}", why)


SAMPLING: tuple[tuple[str, float, float, str], ...] = (
    ("max_tokens", 1, 2**31 - 1, "at least 1"),
    ("min_tokens", 0, 2**31 - 1, "at least 0"),
    ("temperature", 0.0, 100.0, "between 0 and 100"),
    ("top_p", math.ulp(0.0), 1.0, "above 0 and at most 1"),
    ("top_k", 0, 2**31 - 1, "at least 0 (0: off)"),
    ("min_p", 0.0, 1.0, "between 0 and 1"),
    ("seed", 0, 2**64 - 1, "between 0 and 2^64-1"),
    ("repetition_penalty", math.ulp(0.0), 100.0, "above 0 and at most 100"),
    ("presence_penalty", -2.0, 2.0, "between -2 and 2"),
    ("frequency_penalty", -2.0, 2.0, "between -2 and 2"),
    ("logprobs", 0, MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
)


PROTOCOL_VERSION = 2


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One life of a process: (store epoch, counter). Compared for equality only; order is the business of leases."""

    epoch: int
    counter: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.counter}"

    @classmethod
    def parse(cls, text: str) -> Incarnation:
        """Inverse of `str`. Raises ValueError."""
        epoch, counter = text.split(".")
        return cls(int(epoch), int(counter))


class Role(enum.StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


def sizes_text(prefill: int, decode: int) -> str:
    """How many workers a cluster has, for a reader. Without a prefill pool its mode is colocated."""
    return f"{prefill} prefill, {decode} decode" if prefill else f"{decode} colocated (role decode)"


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """A worker as others address it: its place, its life and its listener. The same address is not the same worker."""

    worker_id: str
    incarnation: Incarnation
    address: str

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.incarnation}"


@dataclass(frozen=True, slots=True)
class HandoffId:
    """Names one handoff: the router's request id and its attempt, which only the owning router raises."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


class FinishReason(enum.StrEnum):
    """Why a choice ended. Failures are errors, never reasons."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. Field meanings follow the OpenAI and vLLM conventions of the same names.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 switch those filters off. `seed` None lets the router draw one,
    so that every worker sees a number. `logprobs` None: none; 0: of the chosen token; k: of the k best as well.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        violations = tuple(_sampling_violations(self))
        if violations:
            raise InvalidRequest(*violations)


def _sampling_violations(s: Sampling) -> list[Violation]:
    values = {name: value for name in s.__slots__ if (value := object.__getattribute__(s, name)) is not None}
    found = [
        Violation(f"sampling.{name}", f"must be {allowed}, got {values[name]}")
        for name, low, high, allowed in SAMPLING
        if name in values and not low <= values[name] <= high  # a NaN is in no range
    ]
    if s.min_tokens > s.max_tokens:
        allowed = f"must be at most max_tokens ({s.max_tokens})"
        found.append(Violation("sampling.min_tokens", f"{allowed}, got {s.min_tokens}"))
    if len(s.stop) > MAX_STOP_STRINGS:
        found.append(Violation("sampling.stop", f"at most {MAX_STOP_STRINGS} stop strings, got {len(s.stop)}"))
    if any(not text or len(text) > MAX_STOP_CHARS for text in s.stop):
        found.append(Violation("sampling.stop", f"each must have 1 to {MAX_STOP_CHARS} characters"))
    if len(s.logit_bias) > MAX_LOGIT_BIAS:
        found.append(Violation("sampling.logit_bias", f"at most {MAX_LOGIT_BIAS} entries, got {len(s.logit_bias)}"))
    if any(not -100.0 <= bias <= 100.0 for _, bias in s.logit_bias):
        found.append(Violation("sampling.logit_bias", "each bias must be between -100 and 100"))
    return found


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """All that a worker needs to compute a request: the prompt, what was already generated, how to go on.

    `known` are output tokens of earlier attempts (or the first token, in a commit): they are never sampled again.
    `text_sent` is not here on purpose: text is a function of the tokens, so every worker can rebuild it.
    A higher `priority` (-100 to 100) goes first. Cached KV is shared only between requests of one `cache_scope`.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    known: tuple[int, ...] = ()
    priority: int = 0
    cache_scope: str = ""
    constraint: Constraint | None = None  # of the whole output, `known` included
    deterministic: bool = False  # the same tokens and logprobs bit for bit, whatever else is computed
    think_while_decoding: bool = False  # go on thinking about what is generated; of a model that thinks

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.known

    def __len__(self) -> int:
        return len(self.prompt) + len(self.known)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a chosen token and of the best alternatives, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Token:
    """One output token: its index within the choice (from 0), its id and the text that became final with it.

    The pieces of `text` of a choice, put together, are its text; a piece is empty while a character or a possible
    stop string is incomplete.
    """

    index: int
    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """How a choice ended. `matched` is the stop string or the stop token id (as text) where there is one.

    `tail` is text that was held back for a stop string that did not come; it belongs after the last token's text.
    """

    reason: FinishReason
    matched: str = ""
    tail: str = ""


@dataclass(frozen=True, slots=True)
class Thought:
    """What a model that thinks made of chunk number `chunk` of a sequence, from 0; no tokens: nothing.

    The end token that closes a thought is none of its tokens.
    """

    chunk: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ThinkingState:
    """What a sequence of a model that thinks needs beside its KV, to go on elsewhere with its next position.

    That one is at `offset` in chunk number `chunk`, the open one. `thinker` names all that thoughts and states follow
    from. `state` is S of the open chunk, [chunk_size, hidden] in the model's dtype; `rows` its hidden rows so far,
    [offset, hidden], where it will be thought about, else empty. `thoughts` are of the chunks before it, in order.
    """

    thinker: str
    chunk: int
    offset: int
    state: bytes
    rows: bytes = b""
    thoughts: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of KV on one rank: each of `tensors` is `[layers, blocks, block_size, kv_heads, head_dim]` of `dtype`.

    They are K and V, or with latent attention one from which both are made.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # "float32" | "bfloat16" | "float16"
    tensors: tuple[str, ...] = ("k", "v")

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one position of one layer, all `tensors` together."""
        return len(self.tensors) * self.kv_heads * self.head_dim * self.itemsize

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block of one layer, all `tensors` together."""
        return self.block_size * self.layer_token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, all `tensors` together."""
        return self.layers * self.layer_block_bytes

    @property
    def wire(self) -> str:
        """What two workers must have in common to hand over: all but the size of their blocks."""
        return repr(replace(self, block_size=0))

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold `tokens` positions."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself when it registers. Two workers can hand over if their fingerprints are equal.

    `determinism` names all that the bits of its results depend on: workers with the same one compute deterministic
    requests alike. Empty: it cannot, and `nondeterminism` says why. `thinking_chunk`: tokens of a chunk that its model
    thinks about; 0: it does not think.
    """

    ref: WorkerRef
    role: Role
    fingerprint: str
    model: str
    max_model_len: int
    total_blocks: int
    layout: KVLayout
    pid: int = 0
    host: str = ""
    protocol_version: int = PROTOCOL_VERSION
    determinism: str = ""
    nondeterminism: str = ""
    thinking_chunk: int = 0
    metrics: str = ""  # host:port; empty: it serves none


@dataclass(slots=True)
class BlockCounts:
    """The block ledger of one worker. `check` is the invariant: every block is in exactly one state."""

    total: int
    free: int = 0
    reserved: int = 0
    owned: int = 0
    cached: int = 0
    quarantined: int = 0

    @property
    def available(self) -> int:
        """Blocks that can be allocated: what is only cached makes room when it is needed."""
        return self.free + self.cached

    def check(self) -> BlockCounts:
        """Return self, or raise AssertionError with the counts: a block was lost or is owned twice."""
        if self.free + self.reserved + self.owned + self.cached + self.quarantined != self.total:
            raise AssertionError(f"block ledger does not add up: {self}")
        return self


@dataclass(frozen=True, slots=True)
class Channel:
    """A data channel that a worker sends on: to which worker, by what, and how fast its probe went through."""

    peer: str
    transport: str
    bytes_per_s: float


@dataclass(slots=True)
class Pace:
    """Steps of one kind since the process began, all together, and the seconds they took."""

    steps: int = 0
    tokens: int = 0  # computed
    context: int = 0  # positions that these tokens attended to, summed
    seconds: float = 0.0

    def plus(self, tokens: int, context: int, seconds: float) -> Pace:
        """After one more step."""
        return Pace(self.steps + 1, self.tokens + tokens, self.context + context, self.seconds + seconds)

    def since(self, before: Pace) -> Pace:
        """What came after `before`."""
        return Pace(
            self.steps - before.steps,
            self.tokens - before.tokens,
            self.context - before.context,
            self.seconds - before.seconds,
        )


@dataclass(slots=True)
class Load:
    """What a worker reports with each step: the router's live view of it, and what `baton status` shows."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0  # prompt tokens accepted and not computed yet
    prefill_tokens: int = 0  # computed since the process began
    cached_tokens: int = 0  # found in the prefix cache instead
    decode_steps: int = 0
    decode_tokens: int = 0
    blocks: BlockCounts = field(default_factory=lambda: BlockCounts(0))
    transfer_bytes: int = 0
    transport: str = ""
    fetched_tokens: int = 0  # whose KV came from a decode worker instead of being computed
    channels: tuple[Channel, ...] = ()
    prefill_pace: Pace = field(default_factory=Pace)  # of steps that only computed prompts
    decode_pace: Pace = field(default_factory=Pace)  # of steps that only decoded
    joint_pace: Pace = field(default_factory=Pace)  # of steps that did both: what they computed of prompts, and took
    beside_pace: Pace = field(default_factory=Pace)  # what the same steps decoded, at no seconds
    verify_passes: int = 0  # of deterministic requests
    rollbacks: int = 0  # candidates that a verify pass did not agree with
    recomputed_tokens: int = 0  # dropped with them, or behind them
    draining: bool = False  # takes nothing new, finishes what it has

    @property
    def starved(self) -> bool:
        """After a step: all that is here waits for blocks, which others have."""
        return self.waiting > 0 and self.running == 0
