"""What the scheduler knows of a request, and what it plans: numbers of tokens, never the tokens."""

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
    """Progress of one request: `known` tokens, of which the first `computed` have their KV in `allocation`.

    What lies before `prefill_end` counts as prefill when it is computed, what lies behind as decode. `chain` names its
    full blocks; None: it takes nothing from the cache and leaves nothing there.
    """

    key: HandoffId
    arrival: int
    known: int
    prefill_end: int
    computed: int = 0
    allocation: Allocation | None = None
    priority: int = 0
    chain: BlockHashChain | None = None
    cached: int | None = None  # tokens that were in the cache when it was first admitted
    rank: tuple[int, int] | None = None  # who has less goes first; given by the scheduler, once
    fixed: VerifiedProgress | None = None  # of a deterministic one
    thinking: Thinking | None = None  # of a model that thinks

    @property
    def pending(self) -> int:
        """Tokens whose KV is to be computed before the next token can be sampled."""
        return self.known - self.computed

    @property
    def ordinary(self) -> int:
        """Those of them that the ordinary batch may compute."""
        if self.fixed is None:
            return self.pending
        return 0 if self.fixed.on_grid or self.fixed.due(self.known) else self.pending

    @property
    def settled(self) -> bool:
        """Whether KV is final as soon as it is written; else only that of `computed` positions is, between steps."""
        return self.thinking is None or self.thinking.settled

    @property
    def shareable(self) -> int:
        """How many positions from the first on have KV that is right for whoever has the same tokens."""
        # What verify passes write is right for this sequence alone: another one's prompt is computed on the grid.
        ready = self.computed if self.fixed is None else min(self.fixed.final, self.fixed.prompt)
        return ready if self.thinking is None else min(ready, self.thinking.shared)

    @property
    def confirmed(self) -> bool:
        """It is deterministic, and all that it has is final: no candidate, and no KV but of the last token to come."""
        return self.fixed is not None and self.fixed.verified == self.known == self.fixed.final + 1


@dataclass(slots=True)  # not frozen: that would cost as much as all the rest of its step
class ScheduledSequence:
    """Compute `count` tokens of `sequence`, from its position `computed`."""

    sequence: Sequence
    count: int

    @property
    def completes(self) -> bool:
        """Whether computed catches up with known, so that a token is to be sampled."""
        return self.count == self.sequence.pending

    @property
    def prefill_tokens(self) -> int:
        """How many of the `count` tokens are prefill."""
        return min(self.count, max(0, self.sequence.prefill_end - self.sequence.computed))

    @property
    def context(self) -> int:
        """How many positions its tokens attend to, themselves among them, summed."""
        return self.count * self.sequence.computed + self.count * (self.count + 1) // 2


@dataclass(slots=True)
class SchedulerOutput:
    """One step: what to compute, who had to give its blocks back before, and how many tokens the cache saved."""

    work: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    cached_tokens: int = 0
    windows: list[VerifyWork] = field(default_factory=list)  # of the forward of a fixed shape

    @property
    def verified(self) -> list[Sequence]:
        """Whose windows these are."""
        return [window.sequence for window in self.windows]
