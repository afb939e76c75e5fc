"""Parameters and results of the SDK: plain frozen values, no protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypedDict

from baton import core
from baton.control_plane import Plan as Plan
from baton.control_plane import Slot as Slot
from baton.core import FinishReason, Load, TokenLogprobs, WorkerInfo
from baton.core import PromptToken as PromptToken
from baton.stages import Timings as Timings
from baton.tracing.trace import Span

Prompt: TypeAlias = str | Sequence[int]  # text or token ids


class Options(TypedDict, total=False):
    """Options of a request; None takes the server's default (in parentheses). The server rejects unsupported ones."""

    model: str  # (the served one)
    max_tokens: int | None  # (16) 0 only computes the prompt
    min_tokens: int | None  # (0) No end of sequence and no stop token before.
    temperature: float | None  # (the model's, or 1.0) 0 is greedy.
    top_p: float | None  # (the model's, or 1.0)
    top_k: int | None  # (the model's, or 0, which means off)
    min_p: float | None  # (the model's, or 0)
    seed: int | None  # (drawn by the router)
    repetition_penalty: float | None  # (the model's, or 1.0)
    presence_penalty: float | None  # (0)
    frequency_penalty: float | None  # (0)
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None  # (False)
    logit_bias: Mapping[int, float] | None  # token id -> added to its logit
    bad_words: Sequence[str] | None  # the usual spellings of these texts are not completed
    include_stop_str_in_output: bool | None  # (False) the text ends with the stop string
    skip_special_tokens: bool | None  # (True) special tokens have no text
    add_special_tokens: bool | None  # (True for a text, False for a chat) begin with the model's special tokens
    n: int | None  # (1)
    logprobs: int | None  # (none) 0 returns those of the chosen tokens, k also those of the k best
    prompt_logprobs: int | None  # (none) the same for the tokens of the prompt, which is computed without its cache
    deterministic: bool | None  # (False) bit-identical on all workers with one system fingerprint
    receipt: bool | None  # (False) return a receipt that the router signs; implies `deterministic`
    thoughts: bool | None  # (False) return a thinking model's thought about each chunk of its context
    think_while_decoding: bool | None  # (as in the cluster file) also think about generated tokens
    json_schema: str | Mapping[str, object] | None  # the format of the answer; at most one of these four
    regex: str | None
    choices: Sequence[str] | None
    grammar: str | None  # in the syntax of Lark or GBNF
    priority: int | None  # (0) -100 to 100; higher runs first
    cache_scope: str | None  # ("") cached prompts are shared only within a scope
    trace: bool | None  # (False) return the spans of all processes that served the request
    kv_lengths: bool | None  # (False) as `trace`, and spans of workers have the KV length after each step
    ttft_ms: float | None  # (none) TTFT to promise; otherwise PromiseRefused within 50 ms. Only with n = 1.
    itl_ms: float | None  # (none) the same for the mean time between tokens
    resumable_s: float | None  # (30) time for which a stream can be resumed after its router was lost
    client_tag: str | None  # a label for logs
    idempotency_key: str | None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call by the model; `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn; `role` is system, user, assistant or tool. A tool's turn names the assistant's call that it answers."""

    role: str
    content: str
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Thought(core.Thought):
    """A thought with its text, which is separate from the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Delta:
    """The addition of one stream message to one choice: tokens from index `start`, and text that became final. Both
    may be empty, because an incomplete character or a possible stop string is held back, and thoughts come alone.
    """

    choice: int
    start: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()  # empty, or one per token
    thoughts: tuple[Thought, ...] = ()
    lengths: tuple[int, ...] = ()  # characters of `text` for each token; empty for one token


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; thinking tokens are not part of the others."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    audit_digest: str = ""  # hex SHA-256 of a deterministic request's prompt, parameters and answers
    thinking_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Workers of a request. `decode_worker` is "" if the first token ended it, because then no handoff took place."""

    prefill_worker: str
    decode_worker: str
    kv_bytes: int
    transport: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a prompt. Thoughts about the prompt, which all choices share, are in the first choice only."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None  # None while it runs
    matched_stop: str
    thoughts: tuple[Thought, ...] = ()  # if requested; in chunk order
    end_logprobs: TokenLogprobs | None = None  # of the token that ended it and is not in `tokens`, if requested


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. Without `n` there is one choice, to which the shortcuts refer."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    placement: Placement
    system_fingerprint: str = ""  # Identifies everything that affects the bits of the answer, except the request.
    trace_id: str = ""  # 32 hex digits
    trace: tuple[Span, ...] = ()  # if requested; ordered by start
    prompt_logprobs: tuple[PromptToken, ...] = ()  # if requested; one for each token of the prompt
    receipt: str = ""  # if requested; a JSON object

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.choices[0].tokens

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason

    @property
    def thoughts(self) -> tuple[Thought, ...]:
        return self.choices[0].thoughts


@dataclass(frozen=True, slots=True)
class Model:
    """A served model."""

    id: str
    max_model_len: int
    vocab_size: int
    tool_form: str = ""  # form of tool calls, such as hermes, or json for an unknown one; empty means no tools
    reasoning_form: str = ""  # form of reasoning, such as think; empty means none
    thinking_chunk: int = 0  # chunk size in tokens for thoughts; 0 means that it does not think
    aliases: tuple[str, ...] = ()  # other names that requests may use
    defaults: Mapping[str, float] = field(default_factory=dict)  # sampling of requests that leave it out, by field


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as seen by one router. `state` is connected, connecting or lost; `note` its incompatibility."""

    info: WorkerInfo
    load: Load
    state: str
    dispatched: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of the controller with its reason, `age_s` seconds before the report."""

    age_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Control:
    """The controller's latest report, `age_s` seconds old. `outlook` is the autoscaler's view; empty means off."""

    plan: Plan
    age_s: float
    slots: tuple[Slot, ...]
    decisions: tuple[Decision, ...]
    host: str
    outlook: str

    @property
    def settled(self) -> bool:
        """True if the cluster matches its plan."""
        if any(slot.state != "ready" or slot.generation != self.plan.generation for slot in self.slots):
            return False
        sizes = {role: sum(slot.role == role for slot in self.slots) for role in ("prefill", "decode")}
        return sizes == {"prefill": self.plan.prefill, "decode": self.plan.decode}


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A cluster as seen by one router. `running` and `queued` are current; the other counts began at its start."""

    name: str
    router_id: str
    version: str
    model: str
    uptime_s: float
    running: int
    queued: int
    accepted: int
    finished: int
    cancelled: int
    failed: int
    refused: int
    workers: tuple[WorkerStatus, ...]
    queued_tokens: int = 0
    drain_requests_per_s: float = 0.0  # recent rate while requests waited; 0 means unknown
    drain_tokens_per_s: float = 0.0
    promises_kept: int = 0
    promises_broken: int = 0
    promises_refused: int = 0
    control: Control | None = None  # None without a controller
