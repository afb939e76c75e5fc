"""What the SDK takes and gives: plain frozen values, no protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypedDict

from baton.core import FinishReason, Load, TokenLogprobs, WorkerInfo
from baton.tracing.trace import Span

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""


class Options(TypedDict, total=False):
    """What may be asked of a request; what is not given, or None, takes the server's default (in parentheses).

    A field that the server does not support yet is refused by name (InvalidRequest).
    """

    model: str  # (the served one)
    max_tokens: int | None  # (16)
    min_tokens: int | None  # (0) no end of sequence and no stop token before
    temperature: float | None  # (1.0) 0 is greedy
    top_p: float | None  # (1.0)
    top_k: int | None  # (0: off)
    min_p: float | None  # (0)
    seed: int | None  # (drawn by the router)
    repetition_penalty: float | None  # (1.0)
    presence_penalty: float | None  # (0)
    frequency_penalty: float | None  # (0)
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None  # (False)
    logit_bias: Mapping[int, float] | None  # token id -> added to its logit
    n: int | None  # (1)
    logprobs: int | None  # (none) 0: of the chosen token; k: of the k best too
    deterministic: bool | None  # (False) the same bits from all workers with one system fingerprint
    thoughts: bool | None  # (False) say what a model that thinks made of each chunk of its context
    think_while_decoding: bool | None  # (as the cluster file says) go on thinking about what it generates
    json_schema: str | Mapping[str, object] | None  # of these three at most one: what the answer must be
    regex: str | None
    choices: Sequence[str] | None
    priority: int | None  # (0) -100 to 100; higher goes first
    cache_scope: str | None  # ("") computed prompts are shared only within a scope
    trace: bool | None  # (False) the answer comes with the spans of all processes that had to do with it
    resumable_s: float | None  # (30) a stream whose router is lost goes on for so long, and is resumed where it is
    client_tag: str | None  # a label for logs
    idempotency_key: str | None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model has called; `arguments` are the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; `role` is system, user, assistant or tool. An assistant's turn may have calls, and a
    tool's says which of them it answers.
    """

    role: str
    content: str
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Thought:
    """What a model that thinks made of one chunk of its context, numbered from 0; no tokens: nothing. No part of the
    answer.
    """

    chunk: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Delta:
    """What one message of a stream added to one choice: tokens `start`, `start + 1`, ... and text that became final.

    Text may come without tokens and tokens without text: an incomplete character or a possible stop string waits. Where
    `thoughts` were asked for, a delta with one has neither.
    """

    choice: int
    start: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()  # empty, or one per token
    thoughts: tuple[Thought, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; those of its thoughts are not among the others. And of a deterministic one, hex
    SHA-256 of its prompt, parameters and answers.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    audit_digest: str = ""
    thinking_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. The stages follow each other without gap and sum to `e2e_s`; `ttft_s` is until the first token."""

    queue_s: float
    route_s: float
    reserve_s: float
    prefill_s: float
    transfer_s: float
    commit_s: float
    decode_s: float
    ttft_s: float
    e2e_s: float
    verify_s: float = 0.0  # a stage too: verify passes of a deterministic request, which `decode_s` leaves out


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request ran. `decode_worker` is "" when the first token ended it: nothing was handed over then."""

    prefill_worker: str
    decode_worker: str
    kv_bytes: int
    transport: str
    attempts: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a prompt. `finish_reason` is None while it runs. `thoughts`, if they were asked for, are of each
    chunk in order: those about the prompt with the first choice only, which all have in common.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    matched_stop: str
    thoughts: tuple[Thought, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. Without `n` there is one choice, and the shortcuts are about it."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    placement: Placement
    system_fingerprint: str = ""  # of all that the bits of the answer depend on, beside the request
    trace_id: str = ""  # 32 hex digits
    trace: tuple[Span, ...] = ()  # if it was asked for; by their start

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
    """A model that is served. `tool_form`: how its chat template has calls of tools written (hermes, mistral, llama, or
    json for some other way); empty: it has no tools. `thinking_chunk`: tokens of a chunk that it thinks about; 0: it
    does not think.
    """

    id: str
    max_model_len: int
    vocab_size: int
    tool_form: str = ""
    thinking_chunk: int = 0


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as one router sees it; `state` is connected, connecting or lost. `note`: why it fits no other, if so."""

    info: WorkerInfo
    load: Load
    state: str
    dispatched: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a cluster should be; `by` is file, operator or autoscaler. Workers of an older generation are replaced."""

    prefill: int
    decode: int
    generation: int
    number: int
    by: str
    reason: str


@dataclass(frozen=True, slots=True)
class Slot:
    """A worker's place; `role` is what it should be, `state` starting, ready, turning, draining or failed."""

    worker_id: str
    role: str
    state: str
    generation: int
    restarts: int
    note: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Something that the controller decided so many seconds before it said so, and why."""

    age_s: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Control:
    """What the controller said last, `age_s` seconds ago. `outlook`: what the autoscaler sees; empty: it is off."""

    plan: Plan
    age_s: float
    slots: tuple[Slot, ...]
    decisions: tuple[Decision, ...]
    host: str
    outlook: str

    @property
    def settled(self) -> bool:
        """Whether the cluster is what it should be."""
        if any(slot.state != "ready" or slot.generation != self.plan.generation for slot in self.slots):
            return False
        sizes = {role: sum(slot.role == role for slot in self.slots) for role in ("prefill", "decode")}
        return sizes == {"prefill": self.plan.prefill, "decode": self.plan.decode}


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A cluster as one router sees it: requests now (`running`, `queued`), and since it started."""

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
    drain_requests_per_s: float = 0.0  # lately, while requests waited; 0: not known
    drain_tokens_per_s: float = 0.0
    control: Control | None = None  # None: no controller is there
