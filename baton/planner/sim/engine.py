"""Engine of a simulated worker: production's scheduler over counted blocks, and steps that only take time.

`Scheduler.schedule` runs when there is a decision: prompts, waiting sequences, or no block to grow into. Otherwise
every sequence decodes one token a step, and all such steps are one event, a `Stretch`. It lasts until a sequence ends,
blocks run short or a job arrives; jobs run between two steps as on the engine thread. `Rows` counts the steps of all
decoding sequences together and updates a sequence only when needed.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count as counting
from typing import Any, Protocol, cast

from baton.engine.scheduler import Scheduler
from baton.engine.sequence import ScheduledSequence, SchedulerOutput, Sequence
from baton.planner.sim.block_pool import CountedPool, Held
from baton.planner.sim.event_loop import Event, Kernel
from baton.planner.sim.scenario import Pool
from baton.planner.sim.stats import Gaps, PoolTally
from baton.planner.sim.timing import Stretch, Timing
from baton.worker.engine_loop import Paces


class Listener(Protocol):
    """Receiver of step results, called between steps: a worker of either role."""

    def chunk(self, row: Row, count: int, seconds: float) -> None:
        """Handle the start of a step of `seconds` that computes `count` tokens of a prompt."""

    def first(self, row: Row) -> None:
        """Handle a computed prompt with its first new token."""

    def finished(self, row: Row) -> None:
        """Handle the last token. The blocks are already free."""

    def preempted(self, row: Row) -> None:
        """Handle a sequence that left the engine. Its blocks are already free."""

    def jobs_done(self) -> None:
        """Handle the end of a round of jobs."""


@dataclass(slots=True, eq=False)
class Row(Sequence):
    """A sequence. `tokens`: still to come at submission. `hold`: stop after the first token and keep the blocks."""

    base: int = 0  # known tokens at submission
    tokens: int = 0
    owner: Any = None  # opaque to the engine
    hold: bool = False
    synced: int = 0  # the step before which `computed` and `known` are exact
    end: int = 0  # the step before which its last token is complete
    joined: int = 0  # the step from which it decodes in every step
    last_at: float = 0.0  # time of its last token before that
    waits: list[float] = field(default_factory=list)  # gaps longer than one step, if gaps are kept


class Rows:
    """Sequences that decode in every step. `steps` are complete; the next one attends to `context` positions."""

    def __init__(self, pool: CountedPool, scheduler: Scheduler) -> None:
        self.steps = self.context = 0
        self._pool, self._scheduler, self._block_size = pool, scheduler, scheduler.block_size
        self._rows: dict[Row, None] = {}
        self._ends: list[tuple[int, int, Row]] = []  # heap; entries of sequences that left, or end later, are stale
        self._phase = [0] * self._block_size  # sequences by the step, modulo block size, in which they need a block
        self._ahead = 0  # blocks allocated before the next step needs them
        self._exact = True  # all sequences and their allocations are up to date
        self._fresh: list[Row] = []  # sequences without a token in the previous step

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: object) -> bool:
        return row in self._rows

    def loosen(self) -> None:
        if self._exact:
            self._ahead = sum(self._extra(row) for row in self._rows)
            self._exact = False

    def next_end(self) -> int:
        """Return the step before which the next sequence ends. There must be one."""
        while (first := self._ends[0])[2] not in self._rows or first[2].end != first[0]:
            heapq.heappop(self._ends)
        return first[0]

    def advance(self, steps: int) -> Iterator[Row]:
        """Complete `steps` steps of all sequences and yield the sequences that end."""
        self._pool.take(self.growth(steps))
        self._ahead = 0
        self.steps += steps
        self.context += len(self._rows) * steps
        while self._ends and self._ends[0][0] <= self.steps:
            end, _, row = heapq.heappop(self._ends)
            if row in self._rows and row.end == end:
                yield row

    def steps_with_room(self, most: int) -> int:
        """Return how many of the next `most` steps have enough blocks."""
        room = self._pool.available
        return most if self.growth(most) <= room else bisect_right(range(most), room, key=self.growth) - 1

    def step(self) -> None:
        self.steps += 1
        self.context += len(self._rows)

    def take_fresh(self) -> list[Row]:
        """Return and forget the sequences with a token in this step but none in the previous one."""
        here = [row for row in self._fresh if row.synced <= self.steps]  # stalled sequences are ahead
        if here:
            self._fresh = [row for row in self._fresh if row.synced > self.steps]
        return here

    def lose(self, row: Row) -> None:
        """Remove a preempted sequence. `recount` must follow."""
        self._rows.pop(row, None)
        if row in self._fresh:
            self._fresh.remove(row)

    def recount(self) -> None:
        """Recompute the totals after preemptions. All sequences must be up to date."""
        self._phase = [0] * self._block_size
        for row in self._rows:
            self._phase[(row.synced - row.computed) % self._block_size] += 1
        self.context = sum(row.computed + 1 for row in self._rows)

    def growth(self, steps: int) -> int:
        """Return the blocks that all sequences need for the next `steps` steps."""
        size, phase = self._block_size, self._phase
        cycles, rest = divmod(steps, size)
        first = self.steps % size
        last = first + rest
        some = sum(phase[first:last]) + (sum(phase[: last - size]) if last > size else 0)
        return cycles * len(self._rows) + some - self._ahead

    def pause(self, now: float) -> None:
        waiting = set(self._fresh)
        for row in self._rows:
            if row not in waiting:
                row.last_at = now
                self._fresh.append(row)

    def stall(self, work: list[ScheduledSequence], now: float) -> None:
        """Delay the sequences outside of the step by one step."""
        here = {item.sequence for item in work}
        for row in [row for row in self._rows if row not in here]:
            self._drop_phase(row)
            if row not in self._fresh:
                row.last_at = now
                self._fresh.append(row)
            row.synced, row.end = row.synced + 1, row.end + 1
            self.context -= 1  # compensates for the step's own increment of every sequence
            self._phase[(row.synced - row.computed) % self._block_size] += 1
            heapq.heappush(self._ends, (row.end, row.arrival, row))

    def enter(self, row: Row) -> None:
        """Add a sequence that decodes in every step from the next one on."""
        row.synced = row.joined = self.steps
        self._rows[row] = None
        self._fresh.append(row)
        self.context += row.computed + 1
        self._phase[(row.synced - row.computed) % self._block_size] += 1
        heapq.heappush(self._ends, (row.end, row.arrival, row))
        if not self._exact:
            self._ahead += self._extra(row)

    def leave(self, row: Row) -> None:
        self._sync(row)
        if not self._exact:
            self._ahead -= self._extra(row)
        self._drop_phase(row)
        self.context -= row.computed + 1
        del self._rows[row]
        if row in self._fresh:
            self._fresh.remove(row)

    def sync_all(self) -> None:
        if not self._exact:
            for row in self._rows:
                self._sync(row)
            self._exact, self._ahead = True, 0

    def _drop_phase(self, row: Row) -> None:
        self._phase[(row.synced - row.computed) % self._block_size] -= 1

    def _extra(self, row: Row) -> int:
        """Return the allocated blocks that the sequence does not use yet."""
        assert row.allocation is not None
        return max(0, len(row.allocation) + row.computed // -self._block_size)

    def _sync(self, row: Row) -> None:
        count, held = self.steps - row.synced, row.allocation
        if not count:
            return
        assert isinstance(held, Held)
        missing = -((row.computed + count) // -self._block_size) - len(held)
        if missing > 0:
            self._pool.settle(held, missing)
        self._scheduler.commit_step([ScheduledSequence(row, count)])
        row.known += count
        row.synced = self.steps


_NOISY_STEPS = 64  # longest stretch if each step draws its own time


class Engine:
    """Engine of one worker. `gaps` is set if requests are judged by percentiles of their own gaps."""

    def __init__(
        self, kernel: Kernel, pool: Pool, tally: PoolTally, listener: Listener, timing: Timing, *, recompute: bool
    ) -> None:
        self.kernel, self.tally, self.listener = kernel, tally, listener
        self.pool = CountedPool(pool.kv_blocks)
        self.block_size = pool.block_size
        self.scheduler = Scheduler(
            self.pool,
            pool.block_size,
            max_batched_tokens=pool.max_batched_tokens,
            max_running=pool.max_running,
            recompute_preempted=recompute,
        )
        self.timing, timing.on_change = timing, self._cut
        self.paces = Paces()
        self.gaps: Gaps | None = None
        self._most_rows = min(pool.max_running, pool.max_batched_tokens)
        self._jobs: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.rows = Rows(self.pool, self.scheduler)  # decoding sequences
        self._event: Event | None = None  # end of the running step or stretch, or None if idle
        self._stretch: Stretch | None = None
        self._in_jobs = False
        self._arrivals = counting(1)
        self._stuck = False  # the last plan admitted no waiting sequence, and nothing has changed

    def submit(self, job: Callable[..., None], *facts: Any) -> None:
        """Call `job(*facts)` between two steps, or now if idle."""
        self._jobs.append((job, facts))
        if self._event is None:
            if not self._in_jobs:
                self._run_jobs()
        else:
            self._cut()

    def _cut(self) -> None:
        if self._stretch is None or self._event is None:
            return
        steps = self._stretch.next_end(self.kernel.now)
        if steps < self._stretch.count:
            self._stretch.count = steps
            self._event.cancel()
            self._event = self.kernel.timer(self._stretch.end(steps), self._stretched)

    def add(self, row: Row) -> None:
        """Compute the prompt of a sequence and decode it. Only jobs call this and the methods below."""
        row.arrival = next(self._arrivals)
        self.scheduler.add(row)

    def adopt(self, row: Row, known_before: int) -> None:
        """Decode a sequence with its KV in place; the blocks of its first `known_before` tokens are cached."""
        row.arrival = next(self._arrivals)
        self.scheduler.adopt(row, known_before)
        row.end = self.rows.steps + row.tokens
        self.rows.enter(row)

    def release(self, row: Row) -> None:
        if row in self.rows:
            self.rows.leave(row)
        self.scheduler.remove(row)
        self.scheduler.free(row)

    def slow_down(self, factor: float) -> None:
        self.timing.factor = factor

    def generated(self, row: Row) -> int:
        """Return the number of tokens that the engine generated in completed steps."""
        done = self.rows.steps + (self._stretch.done_by(self.kernel.now) if self._stretch is not None else 0)
        return row.known - row.base + (max(done - row.synced, 0) if row in self.rows else 0)

    def die(self) -> None:
        """Stop for good. The completed steps of a stretch count."""
        self.timing.leave()
        if self._event is not None:
            self._event.cancel()
        if self._stretch is not None and (steps := self._stretch.done_by(self.kernel.now)):
            self._count(self._stretch, steps)
            self.rows.steps += steps
        self._event, self._stretch, self._in_jobs = None, None, True  # `_in_jobs` keeps jobs from running

    @property
    def queued_tokens(self) -> int:
        running, rows = self.scheduler.running, self.rows
        queued = self.scheduler.waiting_tokens
        if len(running) > len(rows):
            queued += sum(max(0, row.prefill_end - row.computed) for row in running if row not in rows)
        return queued

    @property
    def starved(self) -> bool:
        """Whether all sequences wait for blocks in use elsewhere."""
        return self._event is None and bool(self.scheduler.waiting) and not self.scheduler.running

    def _run_jobs(self) -> None:
        self._event, self._in_jobs = None, True
        self._stuck = self._stuck and not self._jobs
        while self._jobs:
            job, facts = self._jobs.popleft()
            job(*facts)
        self._begin()
        self._in_jobs = False
        self.listener.jobs_done()

    def _begin(self) -> None:
        scheduler = self.scheduler
        if not (scheduler.running or scheduler.waiting):
            self.timing.rest()
            return
        steps = self._steady_steps()
        if not steps:
            self._plan()
            return
        first, more, drawn = self.timing.steps(len(self.rows), self.rows.context, steps)
        self._stretch = Stretch(self.kernel.now, steps, first, more, drawn)
        self._event = self.kernel.timer(self._stretch.end(steps), self._stretched)

    def _steady_steps(self) -> int:
        """Return the number of steps without a decision, or 0 if there is a decision now."""
        scheduler, rows = self.scheduler, len(self.rows)
        if not rows or len(scheduler.running) > rows or rows > self._most_rows:
            return 0
        if scheduler.waiting and not self._stuck:
            return 0
        self.rows.loosen()
        most = self.rows.next_end() - self.rows.steps
        return self.rows.steps_with_room(min(most, _NOISY_STEPS) if self.timing.noisy else most)

    def _stretched(self) -> None:
        stretch, self._stretch = self._stretch, None
        assert stretch is not None
        self._count(stretch, stretch.count)
        for row in self.rows.advance(stretch.count):
            self._finish(row)
        self._run_jobs()

    def _count(self, stretch: Stretch, steps: int) -> None:
        rows, seconds = len(self.rows), stretch.seconds(steps)
        self._record_gaps(stretch.pieces(steps), stretch.end(1), rows)
        context = steps * self.rows.context + rows * (steps * (steps - 1) // 2)
        self.paces.add(0, 0, rows * steps, context, seconds, steps=steps)
        self.tally.count(steps, 0, rows * steps, seconds)

    def _record_gaps(self, pieces: list[tuple[int, float]], first_end: float, rows: int) -> None:
        itl, waited, step = self.tally.itl, self.rows.take_fresh(), self.rows.steps
        for row in waited:
            self._record_wait(row, first_end)
        fresh = len(waited)
        for count, seconds in pieces:
            itl.add(seconds, rows * count - fresh)
            fresh = 0
            if self.gaps is not None:
                self.gaps.add(step, count, seconds)
                step += count

    def _record_wait(self, row: Row, until: float) -> None:
        self.tally.itl.add(until - row.last_at)
        if self.gaps is not None:
            row.waits.append(until - row.last_at)
            row.joined += row.joined == self.rows.steps  # that step was not one of its gaps

    def _plan(self) -> None:
        self.rows.sync_all()
        plan = self.scheduler.schedule()
        self.tally.cached_tokens += plan.cached_tokens
        if plan.preempted:
            self._preempted(plan)
        if not plan.work:
            self.timing.rest()
            self.rows.pause(self.kernel.now)
            return
        work, rows = plan.work, self.rows
        new = [item for item in work if item.sequence not in rows]
        decodes = len(work) - len(new)
        stalled = decodes < len(rows)
        prompts, context = sum(item.count for item in new), sum(item.context for item in new)
        decode_context = sum(item.context for item in work if item.sequence in rows) if stalled else self.rows.context
        seconds = self.timing.step(prompts, context, decodes, decode_context)
        for item in new:
            self.listener.chunk(cast("Row", item.sequence), item.count, seconds)
        if stalled:
            self.rows.stall(work, self.kernel.now)
        self._stuck = not prompts and bool(self.scheduler.waiting) and not plan.preempted and self._orderly()
        self.paces.add(prompts, context, decodes, decode_context, seconds)
        self.tally.count(1, prompts, decodes, seconds)
        self._event = self.kernel.timer(self.kernel.now + seconds, self._planned, work, decodes, seconds)

    def _orderly(self) -> bool:
        """Return whether every waiting sequence ranks behind every running one."""
        first, last = self.scheduler.waiting[0].rank, self.scheduler.running[-1].rank
        assert first is not None
        assert last is not None
        return first > last

    def _planned(self, work: list[ScheduledSequence], decodes: int, seconds: float) -> None:
        now = self.kernel.now
        here = self.rows.take_fresh()
        for row in here:
            self._record_wait(row, now)
        if decodes > len(here):
            self.tally.itl.add(seconds, decodes - len(here))
        if self.gaps is not None:
            self.gaps.add(self.rows.steps, 1, seconds)
        self.scheduler.commit_step(work)
        self.rows.step()
        for item in work:
            row = cast("Row", item.sequence)
            if row in self.rows:
                row.known += 1
                row.synced = self.rows.steps
                if row.end == self.rows.steps:
                    self._finish(row)
            elif row.computed == row.known:
                self._computed(row)
        self._run_jobs()

    def _computed(self, row: Row) -> None:
        row.known += 1
        if row.hold:
            self.scheduler.remove(row)
        elif row.tokens == 1:
            self.release(row)
        else:
            row.end = self.rows.steps + row.tokens - 1
            self.rows.enter(row)
        row.joined = self.rows.steps
        row.last_at = self.kernel.now
        self.listener.first(row)

    def _preempted(self, plan: SchedulerOutput) -> None:
        self.tally.preemptions += len(plan.preempted)
        for row in cast("list[Row]", plan.preempted):
            self.rows.lose(row)
            if not self.scheduler.recompute_preempted:
                self.listener.preempted(row)
        self.rows.recount()

    def _finish(self, row: Row) -> None:
        self._stuck = False
        self.release(row)
        self.listener.finished(row)
