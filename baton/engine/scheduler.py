"""What the next step computes. Pure: no tensors, no clock, no tokens, only how many are known and how many computed.

One pass in order of rank. Every running sequence that waits for one token gets it; what is left of the token budget
goes to chunks of prompts, and then to newcomers. A newcomer starts behind the full blocks that are in the cache. A
sequence grows block by block; when the pool is full, who ranks last is preempted. A sequence that finds no room and has
nobody behind it just waits: it keeps its blocks until one before it needs them.

The rank is fixed at arrival: the number of the step, less `patience` steps for each level of priority. So an urgent
sequence overtakes what came up to so many steps before it, and no other: who waits, or runs, gains on all who come
later. The first in rank always goes on and nobody can get before it, so nobody starves.

Deterministic sequences take part in the ordinary batch with single tokens alone; for the rest a step has one more
forward at most, of a fixed shape (`baton.engine.determinism.planner`), whose tokens are taken off the budget.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from baton.engine.block_pool import BlockState
from baton.engine.determinism.planner import WindowPlanner, begin
from baton.engine.sequence import ScheduledSequence, SchedulerOutput, Sequence
from baton.engine.thinking.progress import Notes

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.engine.block_pool import BlockPool

PATIENCE = 256  # steps; some seconds of decoding


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
        windows: WindowPlanner | None = None,
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
        self._windows = windows or WindowPlanner()
        self._steps = 0
        self._notes = Notes(pool.total)

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

    def free(self, sequence: Sequence) -> None:
        """Release its blocks, if it has any that are not in quarantine."""
        if sequence.allocation is None or sequence.allocation.state is BlockState.QUARANTINED:
            return
        self.on_free(sequence)
        self.pool.history.blocks("let_go", sequence.key, sequence.allocation)
        sequence.allocation.release()
        sequence.allocation = None

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, and take the blocks that it needs."""
        plan = SchedulerOutput()
        self._steps += 1
        self._admit_higher_ranked(plan)
        plan.windows = self._windows.next(self.running, self._has_blocks)
        left = self.max_batched_tokens - sum(window.size for window in plan.windows)
        budget = self._continue_running(plan, min(max(left, len(self.running)), self.max_batched_tokens))
        # Nobody new in a step that had to preempt: it could be the one that was just sent away.
        while budget > 0 and len(plan.work) < self.max_running and not plan.preempted:
            sequence = self._admit(plan)
            if sequence is None:
                break
            if sequence.fixed is None:
                budget -= self._schedule(plan, sequence, min(_most(sequence), budget))
            elif not plan.windows:
                plan.windows = begin([sequence])
        if not (plan.work or plan.windows):  # who was due had no block for its last token, and may have got it just now
            plan.windows = self._windows.next(self.running, self._has_blocks)
        return plan

    def commit_step(self, work: list[ScheduledSequence]) -> None:
        """The work is done: its tokens are computed, and blocks that became full can be found from now on."""
        for item in work:
            sequence, before = item.sequence, item.sequence.computed
            sequence.computed = before + item.count
            self._publish(sequence, before)

    def commit_verified(self, sequence: Sequence, final: int, known: int) -> None:
        """A forward of a fixed shape has made the first `final` positions of a deterministic sequence final; it has
        `known` tokens from now on, and what was computed of others counts no more.
        """
        assert sequence.fixed is not None
        before, sequence.fixed.final, sequence.fixed.waited = sequence.fixed.final, final, 0
        sequence.computed, sequence.known = final, known
        self._publish(sequence, before)

    def _publish(self, sequence: Sequence, before: int) -> None:
        first, end = before // self.block_size, sequence.shareable // self.block_size
        if first < end and sequence.chain is not None and sequence.allocation is not None:
            names = sequence.chain.digests(first, end)
            sequence.allocation.publish(first, names)
            if sequence.thinking is not None:
                self._notes.publish(names, sequence.thinking, first, self.block_size)
            self.pool.history.blocks("published", sequence.key, sequence.allocation, first, end)

    def _admit_higher_ranked(self, plan: SchedulerOutput) -> None:
        """Who waits and ranks before some that run goes first, if need be and if it helps at the cost of the last."""
        while self.waiting and self.running and _rank(self.waiting[0]) < _rank(self.running[-1]):
            if self._admit(plan) is not None:
                continue
            if not self._can_preempt_for(self.waiting[0]):
                return
            while self._admit(plan) is None:
                self._preempt(plan)

    def _can_preempt_for(self, sequence: Sequence) -> bool:
        """Would there be room for `sequence` without those who rank behind it? Others may hold blocks too."""
        behind = bisect_left(self.running, _rank(sequence), key=_rank)
        allocations = [other.allocation for other in self.running[behind:] if other.allocation is not None]
        room = self.pool.available + self.pool.freed_by(allocations)
        return behind < self.max_running and room >= self._blocks(sequence.known) + behind

    def _continue_running(self, plan: SchedulerOutput, budget: int) -> int:
        """Give each running sequence its share, in order of rank. Returns the budget that is left."""
        decodes = sum(sequence.known - sequence.computed == 1 for sequence in self.running)
        turn = 0
        while turn < len(self.running) and budget > 0 and len(plan.work) < self.max_running:
            sequence = self.running[turn]
            pending = sequence.known - sequence.computed
            decodes -= pending == 1
            share = min(_most(sequence), max(budget - decodes, turn == 0))
            turn += 1
            if sequence.fixed is not None and (not sequence.ordinary or sequence in plan.verified):
                self._make_room(plan, sequence, pending, turn)  # a pass to come writes so far
            elif share > 0 and self._make_room(plan, sequence, share, turn):
                budget -= self._schedule(plan, sequence, share)
        return budget

    def _schedule(self, plan: SchedulerOutput, sequence: Sequence, count: int) -> int:
        assert sequence.allocation is not None
        end = sequence.computed + count
        sequence.allocation.check_writable(sequence.computed // self.block_size, self._blocks(end))
        plan.work.append(ScheduledSequence(sequence, count))
        return count

    def _make_room(self, plan: SchedulerOutput, sequence: Sequence, count: int, keep: int) -> bool:
        """Blocks for `count` more tokens, if need be from those behind the first `keep` running, the last first."""
        assert sequence.allocation is not None
        missing = self._blocks(sequence.computed + count) - len(sequence.allocation)
        if missing <= 0:
            return True
        while self.pool.available < missing and len(self.running) > keep:
            self._preempt(plan)
        before, grown = len(sequence.allocation), sequence.allocation.grow(missing)
        self.pool.history.blocks("owned", sequence.key, sequence.allocation, before)
        return grown

    def _preempt(self, plan: SchedulerOutput) -> None:
        """The last gives up its blocks. It cannot be in the plan yet: that is filled in order of rank."""
        victim = self.running.pop()
        self.free(victim)
        victim.computed = 0
        if victim.fixed is not None:
            victim.known = victim.fixed.verified
            victim.fixed.forget()
            plan.windows = [window for window in plan.windows if window.sequence is not victim]
        victim.prefill_end = victim.known
        plan.preempted.append(victim)
        if self.recompute_preempted:
            self.add(victim)

    def _admit(self, plan: SchedulerOutput) -> Sequence | None:
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
        if sequence.fixed is not None:
            sequence.fixed.final = sequence.computed
        if sequence.thinking is not None:
            self._notes.begin(sequence, self.block_size)
        plan.cached_tokens += sequence.computed
        if sequence.cached is None:
            sequence.cached = sequence.computed
        return sequence

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """Blocks with the beginning of `sequence`. One token at least is left to compute: its logits are wanted."""
        fixed, thinking, most = sequence.fixed, sequence.thinking, (sequence.known - 1) // self.block_size
        if thinking is not None:
            most = min(most, thinking.shared // self.block_size)
        if sequence.chain is None or self.pool.available + most < self._blocks(sequence.known):
            return []
        if fixed is not None:
            most = min(most, fixed.prompt // self.block_size)
        names = map(sequence.chain.digest, range(most))
        found = self.pool.find(names if thinking is None else self._notes.known(names))
        if fixed is None:
            return found
        return found[: fixed.aligned(len(found) * self.block_size, self.block_size) // self.block_size]

    def _has_blocks(self, sequence: Sequence) -> bool:
        return sequence.allocation is not None and len(sequence.allocation) >= self._blocks(sequence.known)

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


def _most(sequence: Sequence) -> int:
    """How many of its tokens one forward may compute."""
    pending = sequence.known - sequence.computed
    return pending if sequence.thinking is None else min(pending, sequence.thinking.most(sequence.computed))


def _rank(sequence: Sequence) -> tuple[int, int]:
    assert sequence.rank is not None
    return sequence.rank
