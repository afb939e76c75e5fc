"""What the next step computes. Pure: no tensors, no clock, no tokens, only how many are known and how many computed.

One pass in order of rank. Every running sequence that waits for one token gets it; what is left of the token budget
goes to chunks of prompts, and then to newcomers. A newcomer starts behind the full blocks that are in the cache. A
sequence grows block by block; when the pool is full, who ranks last is preempted. A sequence that finds no room and has
nobody behind it just waits: it keeps its blocks until one before it needs them.

The rank is fixed at arrival: the number of the step, less `patience` steps for each level of priority. So an urgent
sequence overtakes what came up to so many steps before it, and no other: who waits, or runs, gains on all who come
later. The first in rank always goes on and nobody can get before it, so nobody starves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.engine.blocks import BlockState

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.core import HandoffId
    from baton.engine.blocks import Allocation, BlockPool
    from baton.engine.prefix import Chain

PATIENCE = 256  # steps; some seconds of decoding


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
    chain: Chain | None = None
    cached: int | None = None  # tokens that were in the cache when it was first admitted
    rank: tuple[int, int] | None = None  # who has less goes first; given by the scheduler, once

    @property
    def pending(self) -> int:
        """Tokens whose KV is to be computed before the next token can be sampled."""
        return self.known - self.computed


@dataclass(slots=True)  # not frozen: that would cost as much as all the rest of its step
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

    @property
    def context(self) -> int:
        """How many positions its tokens attend to, themselves among them, summed."""
        return self.count * self.sequence.computed + self.count * (self.count + 1) // 2


@dataclass(slots=True)
class Plan:
    """One step: what to compute, who had to give its blocks back before, and how many tokens the cache saved."""

    work: list[Work] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    cached_tokens: int = 0


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
        patience: int = PATIENCE,
    ) -> None:
        if min(block_size, max_batched_tokens, max_running) < 1:
            raise ValueError("block_size, max_batched_tokens and max_running must be at least 1")
        self.pool = pool
        self.block_size = block_size
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.recompute_preempted = recompute_preempted
        self.running: list[Sequence] = []  # both in order of rank
        self.waiting: list[Sequence] = []
        self.waiting_tokens = 0
        self.on_free: Callable[[Sequence], None] = lambda sequence: None  # before its blocks may go to somebody else
        self._patience = patience
        self._steps = 0

    @property
    def watermark(self) -> int:
        """Blocks to leave to those who are here: one to grow for each that runs, and room for the next in line."""
        return len(self.running) + (self._blocks(self.waiting[0].known) if self.waiting else 0)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has no blocks."""
        self._enter(self.waiting, sequence)
        self.waiting_tokens += sequence.known

    def adopt(self, sequence: Sequence, known_before: int = 0) -> None:
        """Run a sequence whose blocks hold its computed tokens already; whole blocks of it can be found from now on.

        Those of the first `known_before` tokens could be found before.
        """
        self._enter(self.running, sequence)
        self._publish(sequence, known_before)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is. Its blocks stay with it."""
        if not self._leave(self.running, sequence) and self._leave(self.waiting, sequence):
            self.waiting_tokens -= sequence.known

    def let_go(self, sequence: Sequence) -> None:
        """Release its blocks, if it has any that are not in quarantine."""
        if sequence.allocation is None or sequence.allocation.state is BlockState.QUARANTINED:
            return
        self.on_free(sequence)
        self.pool.history.blocks("let_go", sequence.key, sequence.allocation)
        sequence.allocation.release()
        sequence.allocation = None

    def plan(self) -> Plan:
        """Decide the next step, and take the blocks that it needs."""
        plan = Plan()
        self._steps += 1
        self._admit_elders(plan)
        budget = self._continue_running(plan, self.max_batched_tokens)
        # Nobody new in a step that had to preempt: it could be the one that was just sent away.
        while budget > 0 and len(plan.work) < self.max_running and not plan.preempted:
            sequence = self._admit(plan)
            if sequence is None:
                break
            budget -= self._schedule(plan, sequence, min(sequence.pending, budget))
        return plan

    def advance(self, work: list[Work]) -> None:
        """The work is done: its tokens are computed, and blocks that became full can be found from now on."""
        for item in work:
            sequence, before = item.sequence, item.sequence.computed
            sequence.computed = before + item.count
            self._publish(sequence, before)

    def _publish(self, sequence: Sequence, before: int) -> None:
        first, end = before // self.block_size, sequence.computed // self.block_size
        if first < end and sequence.chain is not None and sequence.allocation is not None:
            sequence.allocation.publish(first, [sequence.chain.digest(block) for block in range(first, end)])
            self.pool.history.blocks("published", sequence.key, sequence.allocation, first, end)

    def _admit_elders(self, plan: Plan) -> None:
        """Who waits and ranks before some that run goes first, if need be and if it helps at the cost of the last."""
        while self.waiting and self.running and _rank(self.waiting[0]) < _rank(self.running[-1]):
            if self._admit(plan) is not None:
                continue
            if not self._can_displace(self.waiting[0]):
                return
            while self._admit(plan) is None:
                self._preempt(plan)

    def _can_displace(self, sequence: Sequence) -> bool:
        """Would there be room for `sequence` without those who rank behind it? Others may hold blocks too."""
        behind = bisect_left(self.running, _rank(sequence), key=_rank)
        allocations = [other.allocation for other in self.running[behind:] if other.allocation is not None]
        room = self.pool.available + self.pool.freed_by(allocations)
        return behind < self.max_running and room >= self._blocks(sequence.known) + behind

    def _continue_running(self, plan: Plan, budget: int) -> int:
        """Give each running sequence its share, in order of rank. Returns the budget that is left."""
        decodes = sum(sequence.known - sequence.computed == 1 for sequence in self.running)
        turn = 0
        while turn < len(self.running) and budget > 0 and len(plan.work) < self.max_running:
            sequence = self.running[turn]
            pending = sequence.known - sequence.computed
            decodes -= pending == 1
            share = min(pending, max(budget - decodes, turn == 0))
            turn += 1
            if share > 0 and self._make_room(plan, sequence, share, turn):
                budget -= self._schedule(plan, sequence, share)
        return budget

    def _schedule(self, plan: Plan, sequence: Sequence, count: int) -> int:
        assert sequence.allocation is not None
        end = sequence.computed + count
        sequence.allocation.check_writable(sequence.computed // self.block_size, self._blocks(end))
        plan.work.append(Work(sequence, count))
        return count

    def _make_room(self, plan: Plan, sequence: Sequence, count: int, keep: int) -> bool:
        """Blocks for `count` more tokens, if need be from those behind the first `keep` running, the last first."""
        assert sequence.allocation is not None
        missing = self._blocks(sequence.computed + count) - len(sequence.allocation.blocks)
        if missing <= 0:
            return True
        while self.pool.available < missing and len(self.running) > keep:
            self._preempt(plan)
        before, grown = len(sequence.allocation), sequence.allocation.grow(missing)
        self.pool.history.blocks("owned", sequence.key, sequence.allocation, before)
        return grown

    def _preempt(self, plan: Plan) -> None:
        """The last gives up its blocks. It cannot be in the plan yet: that is filled in order of rank."""
        victim = self.running.pop()
        self.let_go(victim)
        victim.computed = 0
        victim.prefill_end = victim.known
        plan.preempted.append(victim)
        if self.recompute_preempted:
            self.add(victim)

    def _admit(self, plan: Plan) -> Sequence | None:
        """Let the next in line run, with blocks for all that it knows; None if there is none or no room."""
        if not self.waiting or len(self.running) >= self.max_running:
            return None
        sequence = self.waiting[0]
        shared = self._cached_blocks(sequence)
        need = self._blocks(sequence.known) - len(shared)
        sequence.allocation = self.pool.allocate(need, shared=shared, spare=len(self.running))
        if sequence.allocation is None:
            return None
        self.pool.history.blocks("owned", sequence.key, sequence.allocation, shared=len(shared))
        self.remove(sequence)
        self._enter(self.running, sequence)
        sequence.computed = len(shared) * self.block_size
        plan.cached_tokens += sequence.computed
        if sequence.cached is None:
            sequence.cached = sequence.computed
        return sequence

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """Blocks with the beginning of `sequence`. One token at least is left to compute: its logits are wanted."""
        most = (sequence.known - 1) // self.block_size
        if sequence.chain is None or self.pool.available + most < self._blocks(sequence.known):
            return []
        return self.pool.find(map(sequence.chain.digest, range(most)))

    def _enter(self, line: list[Sequence], sequence: Sequence) -> None:
        if sequence.rank is None:
            sequence.rank = (self._steps - sequence.priority * self._patience, sequence.arrival)
        insort(line, sequence, key=_rank)

    def _leave(self, line: list[Sequence], sequence: Sequence) -> bool:
        place = bisect_left(line, _rank(sequence), key=_rank)
        found = place < len(line) and line[place] is sequence
        if found:
            del line[place]
        return found

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def _rank(sequence: Sequence) -> tuple[int, int]:
    assert sequence.rank is not None
    return sequence.rank
