"""What the next step computes. Pure: no tensors, no clock, no tokens, only how many are known and how many computed.

One pass in order of arrival. Every running sequence that waits for one token gets it; what is left of the token budget
goes to chunks of prompts, and then to newcomers. A sequence grows block by block; when the pool is full the latest
arrival is preempted. So the oldest sequence always goes on, and nobody starves. A younger one that finds no room just
waits: it keeps its blocks until an older one needs them.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.core import HandoffId
    from baton.engine.blocks import Allocation, BlockPool


@dataclass(slots=True, eq=False)
class Sequence:
    """Progress of one request: `known` tokens, of which the first `computed` have their KV in `allocation`.

    What lies before `prefill_end` counts as prefill when it is computed, what lies behind as decode.
    """

    key: HandoffId
    arrival: int
    known: int
    prefill_end: int
    computed: int = 0
    allocation: Allocation | None = None

    @property
    def pending(self) -> int:
        """Tokens whose KV is to be computed before the next token can be sampled."""
        return self.known - self.computed


@dataclass(frozen=True, slots=True)
class Work:
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


@dataclass(slots=True)
class Plan:
    """One step: what to compute, and who had to give its blocks back before."""

    work: list[Work] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Continuous batching over one block pool.

    `max_batched_tokens` bounds the tokens of a step, `max_running` the sequences in it. With `recompute_preempted` a
    preempted sequence waits and starts over here; without, it is dropped and whoever gets the plan hands it back.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        max_batched_tokens: int,
        max_running: int,
        recompute_preempted: bool = True,
    ) -> None:
        if min(block_size, max_batched_tokens, max_running) < 1:
            raise ValueError("block_size, max_batched_tokens and max_running must be at least 1")
        self.pool = pool
        self.block_size = block_size
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.recompute_preempted = recompute_preempted
        self.running: list[Sequence] = []  # both in order of arrival
        self.waiting: list[Sequence] = []

    @property
    def watermark(self) -> int:
        """Free blocks to leave to those who are here: one to grow for each that runs, and room for the next in line."""
        return len(self.running) + (self._blocks(self.waiting[0].known) if self.waiting else 0)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has no blocks."""
        insort(self.waiting, sequence, key=_arrival)

    def adopt(self, sequence: Sequence) -> None:
        """Run a sequence whose blocks hold its computed tokens already."""
        insort(self.running, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is. Its blocks stay with it."""
        for line in (self.running, self.waiting):
            if sequence in line:
                line.remove(sequence)

    def plan(self) -> Plan:
        """Decide the next step, and take the blocks that it needs."""
        plan = Plan()
        self._admit_elders(plan)
        budget = self._continue_running(plan, self.max_batched_tokens)
        # Nobody new in a step that had to preempt: it could be the one that was just sent away.
        while budget > 0 and len(plan.work) < self.max_running and not plan.preempted:
            sequence = self._admit()
            if sequence is None:
                break
            budget -= self._schedule(plan, sequence, min(sequence.pending, budget))
        return plan

    def _admit_elders(self, plan: Plan) -> None:
        """Who waits and came before some that run (those were adopted) goes first, at the cost of the latest."""
        while self.waiting and self.running and self.waiting[0].arrival < self.running[-1].arrival:
            if self._admit() is None:
                self._preempt(plan)
                self._admit()

    def _continue_running(self, plan: Plan, budget: int) -> int:
        """Give each running sequence its share, oldest first. Returns the budget that is left."""
        decodes = sum(sequence.pending == 1 for sequence in self.running)
        turn = 0
        while turn < len(self.running) and budget > 0 and len(plan.work) < self.max_running:
            sequence = self.running[turn]
            decodes -= sequence.pending == 1
            share = min(sequence.pending, max(budget - decodes, turn == 0))
            turn += 1
            if share > 0 and self._make_room(plan, sequence, share, turn):
                budget -= self._schedule(plan, sequence, share)
        return budget

    def _schedule(self, plan: Plan, sequence: Sequence, count: int) -> int:
        plan.work.append(Work(sequence, count))
        return count

    def _make_room(self, plan: Plan, sequence: Sequence, count: int, keep: int) -> bool:
        """Blocks for `count` more tokens, if need be from the latest arrivals behind the first `keep` running."""
        assert sequence.allocation is not None
        missing = self._blocks(sequence.computed + count) - len(sequence.allocation)
        if missing <= 0:
            return True
        while self.pool.free < missing and len(self.running) > keep:
            self._preempt(plan)
        return sequence.allocation.grow(missing)

    def _preempt(self, plan: Plan) -> None:
        """The latest arrival gives up its blocks. It cannot be in the plan yet: that is filled oldest first."""
        victim = self.running.pop()
        assert victim.allocation is not None
        victim.allocation.release()
        victim.allocation = None
        victim.computed = 0
        victim.prefill_end = victim.known
        plan.preempted.append(victim)
        if self.recompute_preempted:
            self.add(victim)

    def _admit(self) -> Sequence | None:
        """Let the next in line run, with blocks for all that it knows; None if there is none or no room."""
        if not self.waiting or len(self.running) >= self.max_running:
            return None
        need = self._blocks(self.waiting[0].known)
        if self.pool.free < need + len(self.running):
            return None
        sequence = self.waiting.pop(0)
        sequence.allocation = self.pool.allocate(need)
        self.adopt(sequence)
        return sequence

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
