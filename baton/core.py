"""The nouns of Baton as values: requests, sampling, tokens, KV layout, workers, incarnations, and the load of a worker.

No torch, no gRPC, no I/O. Values that come from outside check themselves and raise `InvalidRequest` naming the field.
No value changes after its creation. The load types are not frozen, because that makes creation several times slower.
`SAMPLING` is the one table of numeric ranges, both ends included. `baton.structured_output` compiles constraints.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace
from typing import Literal

from baton.errors import InvalidRequest, Violation
from baton.limits import (
    MAX_BAD_WORDS,
    MAX_CHOICE_CHARS,
    MAX_CHOICE_TEXTS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_REGEX_BYTES,
    MAX_SCHEMA_BYTES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
)

Kind = Literal["json_schema", "regex", "choices", "grammar"]

_MOST_BYTES = {"json_schema": MAX_SCHEMA_BYTES, "regex": MAX_REGEX_BYTES, "grammar": MAX_GRAMMAR_BYTES}


@dataclass(frozen=True, slots=True)
class Constraint:
    """The format of an answer: a JSON schema, a regular expression, a choice of texts, or a grammar."""

    kind: Kind
    texts: tuple[str, ...]
    after: tuple[str, ...] = ()  # if set, a free text up to one of these marks comes first

    def __post_init__(self) -> None:
        size, most = sum(len(text.encode()) for text in self.texts), _MOST_BYTES.get(self.kind, 0)
        if self.kind == "choices":
            if not 1 <= len(self.texts) <= MAX_CHOICE_TEXTS:
                raise self.refused(f"must have 1 to {MAX_CHOICE_TEXTS}, got {len(self.texts)}")
            if not all(1 <= len(text) <= MAX_CHOICE_CHARS for text in self.texts):
                raise self.refused(f"each must have 1 to {MAX_CHOICE_CHARS} characters")
        elif not 1 <= size <= most:
            raise self.refused(f"must have 1 to {most} bytes, got {size}")

    def refused(self, why: str) -> InvalidRequest:
        """Return the error for this constraint."""
        return InvalidRequest.of(f"constraint.{self.kind}", why)


SAMPLING: tuple[tuple[str, float, float, str], ...] = (
    ("max_tokens", 0, 2**31 - 1, "at least 0"),
    ("min_tokens", 0, 2**31 - 1, "at least 0"),
    ("temperature", 0.0, 100.0, "between 0 and 100"),
    ("top_p", math.ulp(0.0), 1.0, "above 0 and at most 1"),
    ("top_k", 0, 2**31 - 1, "at least 0 (0 means off)"),
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
    """One life of a process: (store epoch, counter). Compare for equality only; leases define the order."""

    epoch: int
    counter: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.counter}"

    @classmethod
    def parse(cls, text: str) -> Incarnation:
        """Parse the result of `str`. Raises ValueError."""
        epoch, counter = text.split(".")
        return cls(int(epoch), int(counter))


class Role(enum.StrEnum):
    """Role of a worker."""

    PREFILL = "prefill"
    DECODE = "decode"


def first_line(text: str) -> str:
    """Return the first line. `baton logs` shows the rest, such as the last output of a process."""
    return text.partition("\n")[0].removesuffix(":")


def sizes_text(prefill: int, decode: int) -> str:
    """Return the pool sizes as text. Without a prefill pool the mode is colocated."""
    return f"{prefill} prefill, {decode} decode" if prefill else f"{decode} colocated (role decode)"


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """Identity and address of a worker. After a restart the address may be the same; the incarnation differs."""

    worker_id: str
    incarnation: Incarnation
    address: str

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.incarnation}"


@dataclass(frozen=True, slots=True)
class HandoffId:
    """Id of one handoff: the router's request id and its attempt, which only the owning router increments."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}/{self.attempt}"


class FinishReason(enum.StrEnum):
    """Reason why a choice ended. Failures are errors, never finish reasons."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters, with the meaning of the same names in OpenAI's API and vLLM.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 disable those filters. If `seed` is None, the router draws one,
    so that every worker gets a number. `logprobs` None returns none, 0 those of the chosen tokens, k also the k best.
    `bad_words` bars the token that completes a word in its usual spelling, with or without a space before it.
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
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        violations = tuple(_sampling_violations(self))
        if violations:
            raise InvalidRequest(*violations)


def _sampling_violations(s: Sampling) -> list[Violation]:
    values = {name: value for name in s.__slots__ if (value := object.__getattribute__(s, name)) is not None}
    found = [
        Violation(f"sampling.{name}", f"must be {allowed}, got {values[name]}")
        for name, low, high, allowed in SAMPLING
        if name in values and not low <= values[name] <= high  # rejects NaN too
    ]
    if s.min_tokens > s.max_tokens >= 0:
        allowed = f"must be at most max_tokens ({s.max_tokens})"
        found.append(Violation("sampling.min_tokens", f"{allowed}, got {s.min_tokens}"))
    if len(s.stop) > MAX_STOP_STRINGS:
        found.append(Violation("sampling.stop", f"at most {MAX_STOP_STRINGS} stop strings, got {len(s.stop)}"))
    if any(not text or len(text) > MAX_STOP_CHARS for text in s.stop):
        found.append(Violation("sampling.stop", f"each must have 1 to {MAX_STOP_CHARS} characters"))
    if len(s.bad_words) > MAX_BAD_WORDS:
        found.append(Violation("sampling.bad_words", f"at most {MAX_BAD_WORDS} texts, got {len(s.bad_words)}"))
    if any(not text or len(text) > MAX_STOP_CHARS for text in s.bad_words):
        found.append(Violation("sampling.bad_words", f"each must have 1 to {MAX_STOP_CHARS} characters"))
    if len(s.logit_bias) > MAX_LOGIT_BIAS:
        found.append(Violation("sampling.logit_bias", f"at most {MAX_LOGIT_BIAS} entries, got {len(s.logit_bias)}"))
    if any(not -100.0 <= bias <= 100.0 for _, bias in s.logit_bias):
        found.append(Violation("sampling.logit_bias", "each bias must be between -100 and 100"))
    return found


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """The complete input of a worker for a request: the prompt, the tokens generated so far, and how to continue.

    `known` are output tokens of earlier attempts (in a commit, the first token); they are never sampled again. Text is
    a function of the tokens, therefore every worker can rebuild it. A higher `priority` (-100 to 100) runs first.
    Cached KV is shared only between requests of one `cache_scope`.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    known: tuple[int, ...] = ()
    priority: int = 0
    cache_scope: str = ""
    constraint: Constraint | None = None  # of the whole output, `known` included
    deterministic: bool = False  # tokens and logprobs are bit-identical, independent of the batch
    think_while_decoding: bool = False  # a thinking model also thinks about generated tokens
    prompt_logprobs: int | None = None  # alternatives per prompt token; None returns no log-probabilities of the prompt
    kv_lengths: bool = False  # spans of workers list the KV length after each step

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
class PromptToken:
    """A token of a prompt with its log-probability after the tokens before it. `rank` 1 is the most likely token. The
    first token has no log-probability and rank 0.
    """

    token_id: int
    rank: int = 0
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Consecutive tokens of a prompt, from position `start` on."""

    start: int
    tokens: tuple[PromptToken, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """One output token: index within the choice (from 0), id, and the text that became final with it. The texts of a
    choice add up to its text; one is empty while a character or a possible stop string is incomplete.
    """

    index: int
    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """End of a choice. `matched` is the stop string, or the stop token id as text, or empty. `tail` is text that was
    held back for a stop string that did not come; it follows the last token's text. `logprobs` are those of the token
    that ended the choice and is not part of it, if they were requested.
    """

    reason: FinishReason
    matched: str = ""
    tail: str = ""
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Thought:
    """A thinking model's thought about chunk `chunk` (from 0) of its context, without its end token; may be empty."""

    chunk: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ThinkingState:
    """The state that a sequence of a thinking model needs besides its KV to continue elsewhere with its next position.

    The position is at `offset` in the open chunk `chunk`. `thinker` identifies all that thoughts and states depend on.
    `state` is S of the open chunk, [chunk_size, hidden] in the model's dtype. `rows` are its hidden rows so far,
    [offset, hidden], or empty if it will not be thought about. `thoughts` belong to the earlier chunks, in order.
    """

    thinker: str
    chunk: int
    offset: int
    state: bytes
    rows: bytes = b""
    thoughts: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The state of a sequence's recurrent layers after its first `position` tokens: float32, little-endian."""

    position: int
    data: bytes


SequenceState = ThinkingState | RecurrentState  # what a sequence needs to continue, besides its KV
SCALE_BYTES = 2  # of a head in int8 KV


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of KV on one rank: each of `tensors` is `[layers, blocks, block_size, kv_heads, head_width]` of `dtype`.
    They are K and V, or with latent attention one tensor for both. Recurrent layers have no KV. They have a state of
    `state_size` float32 numbers for each sequence, which travels with the commit.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str  # "float32" | "bfloat16" | "float16" | "int8"
    tensors: tuple[str, ...] = ("k", "v")
    state_size: int = field(default=0, repr=False)  # not in `wire` of other models, whose fingerprints have it

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}[self.dtype]

    @property
    def head_width(self) -> int:
        """Elements of one head of one position. In int8, its scale in bfloat16 follows its `head_dim` levels."""
        return self.head_dim + (SCALE_BYTES if self.dtype == "int8" else 0)

    @property
    def row_bytes(self) -> int:
        """Bytes of one position in one layer of one of `tensors`."""
        return self.kv_heads * self.head_width * self.itemsize

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of one position in one layer, all `tensors` together."""
        return len(self.tensors) * self.row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, all `tensors` together."""
        return self.layers * self.block_size * self.layer_token_bytes

    @property
    def wire(self) -> str:
        """Layout that must match between two workers for a handoff: everything except the block size."""
        state = f", state of {self.state_size}" if self.state_size else ""
        return repr(replace(self, block_size=0)) + state

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence."""
        return 4 * self.state_size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Description of a worker at registration. Two workers can hand over if their fingerprints are equal.

    `determinism` identifies everything that affects the bits of results: workers with equal values compute
    deterministic requests identically. If empty, the worker cannot, and `nondeterminism` has the reason.
    `thinking_chunk` is the number of tokens of a chunk that the model thinks about; 0 means that it does not think.
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
    metrics: str = ""  # host:port, or empty if it serves none
    cpu_level: str = ""  # of the compiled kernels; "none" means torch's, empty a GPU or no model
    quantize: str = ""  # "none", "int8" or "int4"; empty from an older worker
    backend: str = ""  # code of the layers if it is not Baton's own, such as "transformers 5.23.0"
    tokenizer: str = ""  # `Tokenizer.identity` of the model; empty from an older worker


@dataclass(slots=True)
class BlockCounts:
    """Block counts of one worker. Invariant, see `check`: every block is in exactly one state."""

    total: int
    free: int = 0
    reserved: int = 0
    owned: int = 0
    cached: int = 0
    quarantined: int = 0

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated; cached blocks are evicted when needed."""
        return self.free + self.cached

    def check(self) -> BlockCounts:
        """Return self. Raises AssertionError with the counts if a block was lost or is owned twice."""
        if self.free + self.reserved + self.owned + self.cached + self.quarantined != self.total:
            raise AssertionError(f"block ledger does not add up: {self}")
        return self


LEFT_OUT = {  # reasons why a transport is not used
    "unavailable": "it does not work at the sender",
    "unencrypted": "it sends KV unencrypted, and security.tls is set",
    "failed": "it could not be opened",
    "peer": "it does not work at the receiver",
    "reach": "the workers are on different hosts, or have different users or namespaces",
    "unknown": "the receiver sent no reason",
}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A transport that is not used, and why: a key of `LEFT_OUT`, and more words about it."""

    transport: str
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.transport}: {LEFT_OUT[self.reason]}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True, slots=True)
class Channel:
    """A send channel of a worker: receiver, transport, the bandwidth that its probe measured, and better transports
    that it does not use, the best first.
    """

    peer: str
    transport: str
    bytes_per_s: float
    left_out: tuple[LeftOut, ...] = ()


@dataclass(slots=True)
class Pace:
    """Totals of all steps of one kind since the process began."""

    steps: int = 0
    tokens: int = 0  # computed
    context: int = 0  # positions that these tokens attended to, summed
    seconds: float = 0.0

    def plus(self, tokens: int, context: int, seconds: float, steps: int = 1) -> Pace:
        return Pace(self.steps + steps, self.tokens + tokens, self.context + context, self.seconds + seconds)

    def since(self, before: Pace) -> Pace:
        return Pace(
            self.steps - before.steps,
            self.tokens - before.tokens,
            self.context - before.context,
            self.seconds - before.seconds,
        )


@dataclass(slots=True)
class Load:
    """Load report of a worker with each step; the router's live view, also shown by `baton status`."""

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
    fetched_tokens: int = 0  # KV received from a decode worker, not computed
    channels: tuple[Channel, ...] = ()
    prefill_pace: Pace = field(default_factory=Pace)  # of steps that only computed prompts
    decode_pace: Pace = field(default_factory=Pace)  # of steps that only decoded
    joint_pace: Pace = field(default_factory=Pace)  # Mixed steps: their prompt tokens, and their seconds.
    beside_pace: Pace = field(default_factory=Pace)  # Decoded tokens of the same steps, with 0 seconds.
    verify_passes: int = 0  # of deterministic requests
    rollbacks: int = 0  # candidates that a verify pass rejected
    recomputed_tokens: int = 0  # dropped candidates and the tokens after them
    draining: bool = False  # accepts nothing new, finishes its requests
    speculated_tokens: int = 0  # proposals that were computed
    accepted_tokens: int = 0  # proposals that were drawn

    @property
    def starved(self) -> bool:
        """True if, after a step, every request here waits for blocks."""
        return self.waiting > 0 and self.running == 0
