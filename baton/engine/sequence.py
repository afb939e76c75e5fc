"""The scheduler's state of a request, and its plan of a step: numbers of tokens, never the tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.core import HandoffId
    from baton.engine.block_pool import Allocation
    from baton.engine.determinism.planner import VerifiedProgress, VerifyWork
    from baton.engine.prefix_cache import BlockHashChain
    from baton.engine.thinking.progress import Thinking


@dataclass(slots=True, eq=False)
class Sequence:
    """Progress of one request: `known` tokens, of which the first `computed` have their KV in `allocation`. Tokens
    before `prefill_end` are prefill when computed, later ones decode. `chain` hashes full blocks; None means no
    caching.
    """

    key: HandoffId
    arrival: int
    known: int
    prefill_end: int
    computed: int = 0
    allocation: Allocation | None = None
    priority: int = 0
    chain: BlockHashChain | None = None
    cached: int | None = None  # tokens found in the cache at its first admission
    rank: tuple[int, int] | None = None  # lower runs first; set once by the scheduler
    fixed: VerifiedProgress | None = None  # set if it is deterministic
    thinking: Thinking | None = None  # set if the model thinks

    @property
    def pending(self) -> int:
        """Number of tokens to compute before the next token can be sampled."""
        return self.known - self.computed

    @property
    def ordinary(self) -> int:
        """Number of pending tokens that the ordinary batch may compute."""
        if self.fixed is None:
            return self.pending
        return 0 if self.fixed.on_grid or self.fixed.due(self.known) else self.pending

    @property
    def settled(self) -> bool:
        """Whether KV is final as soon as it is written; else only `computed` positions are, between steps."""
        return self.thinking is None or self.thinking.settled

    @property
    def shareable(self) -> int:
        """Number of leading positions with KV that is right for any sequence with the same tokens."""
        # KV of verify passes is right for this sequence alone, because other prompts are computed on the grid.
        ready = self.computed if self.fixed is None else min(self.fixed.final, self.fixed.prompt)
        return ready if self.thinking is None else min(ready, self.thinking.shared)

    @property
    def confirmed(self) -> bool:
        """Whether it is deterministic and has only final tokens, with final KV for all of them but the last."""
        return self.fixed is not None and self.fixed.verified == self.known == self.fixed.final + 1


@dataclass(slots=True)  # not frozen, because that would double the cost of a step
class ScheduledSequence:
    """Work of one sequence in a step: `count` tokens, from position `computed`."""

    sequence: Sequence
    count: int

    @property
    def completes(self) -> bool:
        """Whether this computes all known tokens, so that a token is to be sampled."""
        return self.count == self.sequence.pending

    @property
    def prefill_tokens(self) -> int:
        """Number of prefill tokens among the `count` tokens."""
        return min(self.count, max(0, self.sequence.prefill_end - self.sequence.computed))

    @property
    def context(self) -> int:
        """Number of positions that its tokens attend to, including themselves, summed over the tokens."""
        return self.count * self.sequence.computed + self.count * (self.count + 1) // 2


@dataclass(slots=True)
class SchedulerOutput:
    """Plan of one step: the work, the sequences preempted for it, and the number of cached tokens it reuses."""

    work: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    cached_tokens: int = 0
    windows: list[VerifyWork] = field(default_factory=list)  # work of the fixed forward

    @property
    def verified(self) -> list[Sequence]:
        """Sequences of the windows."""
        return [window.sequence for window in self.windows]
