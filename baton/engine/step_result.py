"""Results of an engine: the outputs of each step, and counters since its start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from baton.core import BlockCounts, Finish, HandoffId, Load, PromptPart, Thought, Token
from baton.engine.determinism.planner import Verifying
from baton.engine.sequence import ScheduledSequence, Sequence, SequencePolicy
from baton.errors import EngineFault


@dataclass(slots=True)  # not frozen, because that would double the cost per token
class SequenceOutput:
    """Output of one step for one request; its last one has `finish`. `cached_tokens` were cached at its admission."""

    key: HandoffId
    tokens: list[Token]
    finish: Finish | None
    cached_tokens: int = 0


class KvLengths(SequencePolicy):
    """The KV lengths of a sequence after its steps, in runs that grow by 1. A verify pass that changes nothing
    adds none.
    """

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[list[int]] = []  # first and last length of each

    def stepped(self, sequence: Sequence) -> None:
        """Record the number of positions that have KV in the sequence's blocks."""
        length = sequence.computed
        last = self._runs[-1] if self._runs else None
        if last is None or length not in {last[1], last[1] + 1}:
            self._runs.append([length, length])
        elif length > last[1]:
            last[1] = length

    def __str__(self) -> str:
        """Return the text of spans, such as `4` or `256 512 600-640`."""
        return " ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in self._runs)


@dataclass(slots=True)
class StepResult:
    """Result of one step. Requests in `preempted` and `failed` are forgotten, their blocks free."""

    outputs: list[SequenceOutput] = field(default_factory=list)
    thoughts: list[tuple[HandoffId, list[Thought]]] = field(default_factory=list)  # they precede `outputs`
    prompts: list[tuple[HandoffId, PromptPart]] = field(default_factory=list)  # with log-probabilities; as `thoughts`
    preempted: list[HandoffId] = field(default_factory=list)
    failed: list[tuple[HandoffId, EngineFault]] = field(default_factory=list)
    computed: int = 0  # tokens that went through the model; 0 means that nothing could be done now
    prefill: int = 0  # those of `computed` that are prefill
    context: int = 0  # sum of the positions that these tokens attended to
    prefill_context: int = 0
    verifying: list[tuple[HandoffId, Verifying]] = field(default_factory=list)  # live totals of the pass's sequences
    kv_lengths: list[tuple[HandoffId, KvLengths]] = field(default_factory=list)  # live, of the sequences that have them
    under_way: bool = False  # another step has been launched; its tokens come with the next result

    @property
    def idle(self) -> bool:
        """Whether the step did nothing, so that another one can do nothing either before something changes."""
        return not (self.computed or self.outputs or self.preempted or self.failed or self.under_way)

    def add_counts(self, other: StepResult) -> None:
        """Add what another step computed."""
        self.computed, self.prefill = self.computed + other.computed, self.prefill + other.prefill
        self.context, self.prefill_context = self.context + other.context, self.prefill_context + other.prefill_context

    def add_thoughts(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            for policy in sequence.policies:
                policy.stepped(sequence)
                if isinstance(policy, KvLengths):
                    self.kv_lengths.append((sequence.key, policy))
                if thoughts := policy.new_thoughts():
                    self.thoughts.append((sequence.key, thoughts))
                self.prompts += [(sequence.key, part) for part in policy.new_prompt_parts()]


@dataclass(slots=True)
class Counters:
    """Totals since the engine's start. Recomputed tokens count as prefill again, cached tokens do not."""

    steps: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_steps: int = 0  # steps with at least one decode token
    decode_tokens: int = 0
    preemptions: int = 0
    verify_passes: int = 0
    rollbacks: int = 0  # candidates that a verify pass rejected
    recomputed_tokens: int = 0  # rejected candidates and those behind them
    speculated_tokens: int = 0  # proposals that were computed
    accepted_tokens: int = 0  # those that were drawn

    def load(self, running: int, waiting: int, queued_tokens: int, blocks: BlockCounts) -> Load:
        """Return the load report of an engine with these requests, tokens of waiting prompts, and blocks."""
        return Load(
            step=self.steps,
            running=running,
            waiting=waiting,
            queued_tokens=queued_tokens,
            prefill_tokens=self.prefill_tokens,
            cached_tokens=self.cached_tokens,
            decode_steps=self.decode_steps,
            decode_tokens=self.decode_tokens,
            verify_passes=self.verify_passes,
            rollbacks=self.rollbacks,
            recomputed_tokens=self.recomputed_tokens,
            speculated_tokens=self.speculated_tokens,
            accepted_tokens=self.accepted_tokens,
            blocks=blocks,
        )

    def count(self, work: list[ScheduledSequence], result: StepResult) -> None:
        """Count an ordinary batch, before `Scheduler.commit_step`."""
        result.computed = total = sum(item.count for item in work)
        result.prefill = prefill = sum(item.prefill_tokens for item in work)
        result.context = sum(item.context for item in work)
        result.prefill_context = sum(item.context for item in work if item.prefill_tokens) if prefill else 0
        self.steps += 1
        self.prefill_tokens += prefill
        self.decode_tokens += total - prefill
        self.decode_steps += total > prefill
