"""Choice of the work of the next step. Pure: token counts only, without tensors, clock or token ids.

One pass in order of rank gives each decoding sequence its token. The rest of the token budget goes to prompt chunks,
then to new sequences, which start after their cached full blocks. When the pool is full, the last in rank is preempted.
If none ranks behind a sequence, it keeps its blocks and waits.

The rank is the step number at arrival, minus `patience` steps per priority level. Later arrivals eventually rank behind
a sequence, and the first always proceeds, so none starves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable

from baton.engine.block_pool import BlockPool, BlockState
from baton.engine.determinism.planner import GRID_TOKENS, WindowPlanner, begin
from baton.engine.sequence import UNLIMITED, ScheduledSequence, SchedulerOutput, Sequence

PATIENCE = 256  # steps of aging per priority level; some seconds of decoding


class Scheduler:
    """Continuous batching over one block pool. The parameters are those of `Engine`."""

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
        self.pool, self.block_size = pool, block_size
        self.max_batched_tokens, self.max_running = max_batched_tokens, max_running
        self.recompute_preempted = recompute_preempted
        self.running: list[Sequence] = []  # both in order of rank
        self.waiting: list[Sequence] = []
        self.waiting_tokens = 0
        self.on_free: Callable[[Sequence], None] = lambda sequence: None  # called before its blocks can be reused
        self._patience = patience
        self._windows = WindowPlanner()
        self._steps = 0

    @property
    def watermark(self) -> int:
        """Number of blocks to leave available: one per running sequence, and those of the next waiting one."""
        return len(self.running) + (self._blocks(self.waiting[0].known) if self.waiting else 0)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has no blocks."""
        self._enter(self.waiting, sequence)
        self.waiting_tokens += sequence.known

    def adopt(self, sequence: Sequence, known_before: int = 0) -> None:
        """Run a sequence with KV in its blocks. Cache its full blocks behind the first `known_before` tokens."""
        self._enter(self.running, sequence)
        for policy in sequence.policies:
            policy.adopted(sequence)
        self.publish(sequence, known_before)

    def remove(self, sequence: Sequence) -> None:
        """Forget a running or waiting sequence. It keeps its blocks."""
        if not self._leave(self.running, sequence) and self._leave(self.waiting, sequence):
            self.waiting_tokens -= sequence.known

    def free(self, sequence: Sequence) -> None:
        """Free the sequence's blocks, unless it has none or they are in quarantine."""
        if sequence.allocation is None or sequence.allocation.state is BlockState.QUARANTINED:
            return
        self.on_free(sequence)
        self.pool.history.blocks("let_go", sequence.key, sequence.allocation)
        sequence.allocation.release()
        sequence.allocation = None

    def keeps_all(self) -> bool:
        """Return whether `schedule` certainly preempts none. Sequences without policies grow by at most one block."""
        jumps = self.waiting and self.running and _rank(self.waiting[0]) < _rank(self.running[-1])
        plain = not any(sequence.policies for sequence in self.running)
        return plain and not jumps and self.pool.available >= len(self.running)

    def schedule(self) -> SchedulerOutput:
        plan = SchedulerOutput()
        self._steps += 1
        self._admit_higher_ranked(plan)
        plan.windows = self._windows.next(self.running, self._has_blocks, self._grid_tokens)
        left = self.max_batched_tokens - sum(window.size for window in plan.windows)
        budget = self._continue_running(plan, min(max(left, len(self.running)), self.max_batched_tokens))
        # Admit none in a step that preempted, because it could be the sequence just preempted.
        while budget > 0 and len(plan.work) < self.max_running and not plan.preempted:
            if (sequence := self._admit(plan)) is None:
                break
            fixed, most = sequence.own_forwards, min(sequence.most, budget)
            budget -= self._begin(plan, sequence, budget) if fixed else self._schedule(plan, sequence, most)
        if not (plan.work or plan.windows):  # a due sequence may have got its missing block just now
            plan.windows = self._windows.next(self.running, self._has_blocks, self._grid_tokens, idle=True)
        return plan

    def commit_step(self, work: list[ScheduledSequence]) -> None:
        """Record that `work` is computed, and cache the blocks that became full."""
        for item in work:
            sequence, before = item.sequence, item.sequence.computed
            sequence.computed = before + item.count
            self.publish(sequence, before)

    def publish(self, sequence: Sequence, before: int, until: int = UNLIMITED) -> None:
        """Cache the blocks that became full since the sequence had `before` final positions; it has up to `until`."""
        first, end = before // self.block_size, min(sequence.shareable, until) // self.block_size
        if first < end and sequence.chain is not None and sequence.allocation is not None:
            hashes = sequence.chain.digests(first, end)
            sequence.allocation.publish(first, hashes)
            for policy in sequence.policies:
                policy.published(hashes, first, self.block_size)
            self.pool.history.blocks("published", sequence.key, sequence.allocation, first, end)

    def _admit_higher_ranked(self, plan: SchedulerOutput) -> None:
        """Admit waiting sequences that rank before running ones, preempting the last ones if that helps."""
        while self.waiting and self.running and _rank(self.waiting[0]) < _rank(self.running[-1]):
            if self._admit(plan) is not None:
                continue
            if not self._can_preempt_for(self.waiting[0]):
                return
            while self._admit(plan) is None:
                self._preempt(plan)

    def _can_preempt_for(self, sequence: Sequence) -> bool:
        """Return whether `sequence` fits without those behind it. Blocks that they share may stay in use."""
        behind = bisect_left(self.running, _rank(sequence), key=_rank)
        allocations = [other.allocation for other in self.running[behind:] if other.allocation is not None]
        capacity = self.pool.available + self.pool.freed_by(allocations)
        return behind < self.max_running and capacity >= self._blocks(sequence.known) + behind

    def _continue_running(self, plan: SchedulerOutput, budget: int) -> int:
        """Give each running sequence its share, in order of rank. Return the budget that is left."""
        decodes = sum(sequence.known - sequence.computed == 1 for sequence in self.running)
        index, in_pass = 0, {id(window.sequence) for window in plan.windows}
        while index < len(self.running) and budget > 0 and len(plan.work) < self.max_running:
            sequence = self.running[index]
            pending = sequence.known - sequence.computed
            decodes -= pending == 1
            own, least = sequence.own_forwards, int(pending == 1 or index == 0)
            share = min(sequence.most, max(budget - decodes, least))
            index += 1
            if own and (id(sequence) in in_pass or not sequence.ordinary):
                self._grow(plan, sequence, pending, index)  # the next verify pass writes up to there
            elif share > 0 and self._grow(plan, sequence, share, index):
                budget -= self._schedule(plan, sequence, share)
                if own and sequence.known % self.block_size == 0 and self.pool.available > len(self.running):
                    self._grow(plan, sequence, share + 1, index)  # the next token begins a block; a pass may write it
        return budget

    def _schedule(self, plan: SchedulerOutput, sequence: Sequence, count: int) -> int:
        assert sequence.allocation is not None
        end = sequence.computed + count
        sequence.allocation.check_writable(sequence.computed // self.block_size, self._blocks(end))
        plan.work.append(ScheduledSequence(sequence, count))
        return count

    def _grow(self, plan: SchedulerOutput, sequence: Sequence, count: int, keep: int) -> bool:
        """Allocate blocks for `count` more tokens, preempting the last sequences but not the first `keep`."""
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
        """Preempt the last sequence. It is not in the plan yet, because that is filled in order of rank."""
        victim = self.running.pop()
        self.free(victim)
        victim.computed = 0
        for policy in victim.policies:
            policy.preempted(victim)
        plan.windows = [window for window in plan.windows if window.sequence is not victim]
        victim.prefill_end = victim.known
        plan.preempted.append(victim)
        if self.recompute_preempted:
            self.add(victim)

    def _admit(self, plan: SchedulerOutput) -> Sequence | None:
        """Run the next waiting sequence, with blocks for all known tokens, or return None if that is impossible."""
        if not self.waiting or len(self.running) >= self.max_running:
            return None
        sequence = self.waiting[0]
        shared = self._cached_blocks(sequence)
        need = self._blocks(sequence.known) - len(shared)
        sequence.allocation = self.pool.allocate(need, shared=shared, spare=len(self.running), sequence=True)
        if sequence.allocation is None:
            return None
        self.pool.history.blocks("owned", sequence.key, sequence.allocation, shared=len(shared))
        self.remove(sequence)
        self._enter(self.running, sequence)
        sequence.computed = len(shared) * self.block_size
        for policy in sequence.policies:
            policy.admitted(sequence, self.block_size)
        plan.cached_tokens += sequence.computed
        if sequence.cached is None:
            sequence.cached = sequence.computed
        return sequence

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """Return its cached first blocks, as far as it can continue behind them."""
        most = sequence.cacheable // self.block_size
        if sequence.chain is None or self.pool.available + most < self._blocks(sequence.known):
            return []
        hashes: Iterable[bytes] = map(sequence.chain.digest, range(most))
        for policy in sequence.policies:
            hashes = policy.usable(hashes)
        found = self.pool.find(hashes)
        cached, before = len(found) * self.block_size, -1
        while cached != before:  # until each policy can continue there
            before = cached
            for policy in sequence.policies:
                cached = policy.aligned(cached, self.block_size)
        return found[: cached // self.block_size]

    def _begin(self, plan: SchedulerOutput, sequence: Sequence, budget: int) -> int:
        """Plan the first chunk of an admitted sequence next to other chunks of the grid. Return its tokens."""
        chunks = begin([sequence], budget)
        tokens = sum(chunk.size for chunk in chunks)
        fits = not plan.windows or (plan.windows[0].on_grid and tokens <= budget)
        plan.windows = [*plan.windows, *chunks] if fits else plan.windows
        return tokens if fits else 0

    def _grid_tokens(self) -> int:
        """Return how many tokens of prompts on the grid a step may have, so that other prompts go on too."""
        new, most = self.waiting[: len(self.running) < self.max_running], self.max_batched_tokens
        others = any(not one.own_forwards and one.known - one.computed > 1 for one in (*self.running, *new))
        return max(1, min(GRID_TOKENS, most // 2) if others else most - len(self.running))

    def _has_blocks(self, sequence: Sequence) -> bool:
        return sequence.allocation is not None and len(sequence.allocation) >= self._blocks(sequence.known)

    def _enter(self, queue: list[Sequence], sequence: Sequence) -> None:
        if sequence.rank is None:
            sequence.rank = (self._steps - sequence.priority * self._patience, sequence.arrival)
        insort(queue, sequence, key=_rank)

    def _leave(self, queue: list[Sequence], sequence: Sequence) -> bool:
        place = bisect_left(queue, _rank(sequence), key=_rank)
        found = place < len(queue) and queue[place] is sequence
        if found:
            del queue[place]
        return found

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def _rank(sequence: Sequence) -> tuple[int, int]:
    assert sequence.rank is not None
    return sequence.rank
