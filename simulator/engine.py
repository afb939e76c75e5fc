"""The engine of a simulated worker: production's scheduler over counted blocks, and steps that only take time.

`Scheduler.plan` decides whenever there is something to decide: prompts, somebody who waits, no block left to grow into.
Where nothing is (all that runs has one token to come, and blocks for it), its plan is known: one token of each row.
Such steps are a `Stretch`, one event for all of them, until a row ends, blocks run short, or a job comes, which runs
between two steps as on the engine thread. Rows of a stretch are brought up to date when somebody looks at them.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count as counting
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Plan, Sequence, Work
from baton.load import Pace
from simulator.blocks import CountedPool, Held
from simulator.gaps import Gaps
from simulator.stretch import Stretch

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulator.kernel import Event, Kernel
    from simulator.scenario import Pool
    from simulator.tally import PoolTally

_NOISY_STEPS = 64  # of a stretch, where each draws its own length


@dataclass(slots=True, eq=False)
class Row(Sequence):
    """A sequence here. `tokens` are still to come when it is submitted; `owner` is nobody's business here.

    `hold`: it stops after its first token, and keeps its blocks.
    """

    base: int = 0  # tokens that were known before
    tokens: int = 0
    owner: Any = None
    hold: bool = False
    synced: int = 0  # the step before which `computed` and `known` are what they are
    end: int = 0  # the step before which its last token is there
    joined: int = 0  # the step from which on it has had a token in each
    last_at: float = 0.0  # when it had its last token before that
    waits: list[float] = field(default_factory=list)  # for tokens that did not come with the next step, if kept


class Listener(Protocol):
    """Who is told what steps bring, between two of them."""

    def chunk(self, row: Row, count: int, seconds: float) -> None:
        """A step begins that computes so many tokens of a prompt, and takes so long."""

    def first(self, row: Row) -> None:
        """A prompt is computed, and its first new token is there."""

    def finished(self, row: Row) -> None:
        """Its last token is there, and it has let its blocks go."""

    def preempted(self, row: Row) -> None:
        """It had to let its blocks go, and is not here any more."""

    def turned(self) -> None:
        """Jobs have run, and something may have changed."""


class Engine:
    """One worker's. `gaps` are kept if requests are judged by percentiles of their own."""

    def __init__(
        self, kernel: Kernel, pool: Pool, tally: PoolTally, listener: Listener, rng: Random, *, recompute: bool
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
        self.factor = 1.0  # that steps take longer
        self.steps = 0  # done
        self.prefill_pace, self.decode_pace = Pace(), Pace()
        self.joint_pace, self.beside_pace = Pace(), Pace()
        self.gaps: Gaps | None = None
        self._cost, self._spread, self._rng = pool.cost, pool.spread, rng
        self._most_rows = min(pool.max_running, pool.max_batched_tokens)
        self._jobs: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._event: Event | None = None  # the end of what runs; None: nothing does
        self._stretch: Stretch | None = None
        self._turning = False
        self._rows: dict[Row, None] = {}  # that decode
        self._ends: list[tuple[int, int, Row]] = []  # a heap; entries of rows that ended elsewise, or later, are stale
        self._context = 0  # positions that the next token of each row attends to, summed
        self._phase = [0] * pool.block_size  # rows by the step, modulo the size, in which they need another block
        self._ahead = 0  # blocks that rows have, and need in their next step alone
        self._exact = True  # all rows are up to date, and their allocations have all their blocks
        self._fresh: list[Row] = []  # that had no token in the step before
        self._arrivals = counting(1)
        self._stuck = False  # the last plan could let nobody in who waits, and nothing has changed

    # --- jobs ----------------------------------------------------------------------------------------------------

    def submit(self, job: Callable[..., None], *facts: Any) -> None:
        """Call `job(*facts)` between two steps: now, if nothing is computed."""
        self._jobs.append((job, facts))
        if self._event is None:
            if not self._turning:
                self._turn()
        elif self._stretch is not None:
            steps = self._stretch.next_end(self.kernel.now)
            if steps < self._stretch.count:
                self._stretch.count = steps
                self._event.cancel()
                self._event = self.kernel.at(self._stretch.end(steps), self._stretched)

    def add(self, row: Row) -> None:
        """Compute its prompt, and go on. A job's business, as all below."""
        row.arrival = next(self._arrivals)
        self.scheduler.add(row)

    def adopt(self, row: Row, known_before: int) -> None:
        """Go on with a row whose blocks hold its KV; those of its first `known_before` tokens are published."""
        row.arrival = next(self._arrivals)
        self.scheduler.adopt(row, known_before)
        row.end = self.steps + row.tokens
        self._enter(row)

    def release(self, row: Row) -> None:
        """Forget it in whatever state, and free its blocks."""
        if row in self._rows:
            self._leave(row)
        self.scheduler.remove(row)
        self.scheduler.let_go(row)

    def slow_down(self, factor: float) -> None:
        """Steps take so many times as long from now on."""
        self.factor = factor

    def generated(self, row: Row) -> int:
        """How many tokens of it were generated here, in steps that are done."""
        done = self.steps + (self._stretch.done_by(self.kernel.now) if self._stretch is not None else 0)
        return row.known - row.base + (max(done - row.synced, 0) if row in self._rows else 0)

    def die(self) -> None:
        """The process is gone."""
        if self._event is not None:
            self._event.cancel()
        self._event, self._stretch, self._turning = None, None, True  # so that no job ever runs

    @property
    def queued_tokens(self) -> int:
        """Of prompts that are here and not computed."""
        running, rows = self.scheduler.running, self._rows
        queued = self.scheduler.waiting_tokens
        if len(running) > len(rows):
            queued += sum(max(0, row.prefill_end - row.computed) for row in running if row not in rows)
        return queued

    @property
    def starved(self) -> bool:
        """Who is here waits for blocks that others have."""
        return self._event is None and bool(self.scheduler.waiting) and not self.scheduler.running

    # --- steps ---------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Between two steps."""
        self._event, self._turning = None, True
        self._stuck = self._stuck and not self._jobs
        while self._jobs:
            job, facts = self._jobs.popleft()
            job(*facts)
        self._begin()
        self._turning = False
        self.listener.turned()

    def _begin(self) -> None:
        scheduler = self.scheduler
        if not (scheduler.running or scheduler.waiting):
            return
        most = self._steady_steps()
        if most:
            self._stretch_out(most)
        else:
            self._plan()

    def _steady_steps(self) -> int:
        """How many steps are known beforehand; 0: there is something to decide."""
        scheduler, rows = self.scheduler, len(self._rows)
        if not rows or len(scheduler.running) > rows or rows > self._most_rows:
            return 0
        if scheduler.waiting and not self._stuck:
            return 0
        if self._exact:
            self._ahead = sum(self._extra(row) for row in self._rows)
            self._exact = False
        ends = self._ends
        while (first := ends[0])[2] not in self._rows or first[2].end != first[0]:
            heapq.heappop(ends)
        most = first[0] - self.steps
        if self._spread:
            most = min(most, _NOISY_STEPS)
        room = self.pool.available
        if self._growth(most) <= room:
            return most
        least = 0
        while most - least > 1:  # there is room for `least`, and none for `most`
            middle = (least + most) // 2
            least, most = (middle, most) if self._growth(middle) <= room else (least, middle)
        return least

    def _growth(self, steps: int) -> int:
        """Blocks that rows grow by in the next so many steps."""
        size, phase = self.block_size, self._phase
        cycles, rest = divmod(steps, size)
        first = self.steps % size
        last = first + rest
        some = sum(phase[first:last]) + (sum(phase[: last - size]) if last > size else 0)
        return cycles * len(self._rows) + some - self._ahead

    def _stretch_out(self, steps: int) -> None:
        rows, context, seconds = len(self._rows), self._context, self._cost.seconds
        first = seconds(0, 0, rows, context) * self.factor
        more = 0.0
        if steps > 1:
            more = (seconds(0, 0, rows, context + rows * (steps - 1)) * self.factor - first) / (steps - 1)
        drawn = [(first + more * step) * self._noise() for step in range(steps)] if self._spread else ()
        self._stretch = Stretch(self.kernel.now, steps, first, more, drawn)
        self._event = self.kernel.at(self._stretch.end(steps), self._stretched)

    def _noise(self) -> float:
        return self._rng.choice(self._spread) if self._spread else 1.0

    def _stretched(self) -> None:
        stretch, self._stretch = self._stretch, None
        assert stretch is not None
        steps, rows, seconds = stretch.count, len(self._rows), stretch.seconds(stretch.count)
        self._tell_gaps(stretch.pieces(steps), stretch.end(1), rows)
        context = steps * self._context + rows * (steps * (steps - 1) // 2)
        pace = self.decode_pace
        self.decode_pace = Pace(
            pace.steps + steps, pace.tokens + rows * steps, pace.context + context, pace.seconds + seconds
        )
        self.tally.decoded(steps, rows * steps, seconds)
        self.pool.take(self._growth(steps))
        self._ahead = 0
        self.steps += steps
        self._context += rows * steps
        ends = self._ends
        while ends and ends[0][0] <= self.steps:
            end, _, row = heapq.heappop(ends)
            if row in self._rows and row.end == end:
                self._finish(row)
        self._turn()

    def _tell_gaps(self, pieces: list[tuple[int, float]], first_end: float, rows: int) -> None:
        itl, fresh, step = self.tally.itl, len(self._fresh), self.steps
        for row in self._fresh:
            self._tell_wait(row, first_end)
        self._fresh.clear()
        for count, seconds in pieces:
            itl.add(seconds, rows * count - fresh)
            fresh = 0
            if self.gaps is not None:
                self.gaps.add(step, count, seconds)
                step += count

    def _tell_wait(self, row: Row, until: float) -> None:
        self.tally.itl.add(until - row.last_at)
        if self.gaps is not None:
            row.waits.append(until - row.last_at)
            row.joined += row.joined == self.steps  # that step was none of its gaps

    # --- steps that the scheduler plans --------------------------------------------------------------------------

    def _plan(self) -> None:
        self._sync_all()
        plan = self.scheduler.plan()
        self.tally.cached_tokens += plan.cached_tokens
        if plan.preempted:
            self._preempted(plan)
        if not plan.work:
            self._pause()
            return
        work, rows = plan.work, self._rows
        decodes = sum(item.sequence in rows for item in work)
        stalled = decodes < len(rows)
        prompts = context = 0
        for item in work:
            if item.sequence not in rows:
                prompts += item.count
                context += item.context
        beside = sum(item.context for item in work if item.sequence in rows) if stalled else self._context
        seconds = self._cost.seconds(prompts, context, decodes, beside) * self.factor * self._noise()
        for item in work:
            if item.sequence not in rows:
                self.listener.chunk(_row(item), item.count, seconds)
        if stalled:
            self._stall(work)
        self._stuck = not prompts and bool(self.scheduler.waiting) and not plan.preempted and self._orderly()
        self._note(prompts, context, decodes, beside, seconds)
        self._event = self.kernel.after(seconds, self._planned, work, decodes, seconds)

    def _orderly(self) -> bool:
        """Nobody who waits comes before somebody who runs."""
        first, last = self.scheduler.waiting[0].rank, self.scheduler.running[-1].rank
        assert first is not None
        assert last is not None
        return first > last

    def _note(self, prompts: int, context: int, decodes: int, beside: int, seconds: float) -> None:
        """As `baton.worker.loop.Paces` does."""
        if not prompts:
            self.decode_pace = self.decode_pace.plus(decodes, beside, seconds)
        elif not decodes:
            self.prefill_pace = self.prefill_pace.plus(prompts, context, seconds)
        else:
            self.joint_pace = self.joint_pace.plus(prompts, context, seconds)
            self.beside_pace = self.beside_pace.plus(decodes, beside, 0.0)
        self.tally.planned(prompts, decodes, seconds)

    def _pause(self) -> None:
        """No row has a block for its next token: all wait for others to let some go."""
        waiting = set(self._fresh)
        for row in self._rows:
            if row not in waiting:
                row.last_at = self.kernel.now
                self._fresh.append(row)

    def _stall(self, work: list[Work]) -> None:
        """Rows that are not in the step have their tokens a step later."""
        here = {item.sequence for item in work}
        for row in [row for row in self._rows if row not in here]:
            self._drop_phase(row)
            if row not in self._fresh:
                row.last_at = self.kernel.now
                self._fresh.append(row)
            row.synced, row.end = row.synced + 1, row.end + 1
            self._context -= 1  # the step is about to count one more for each row
            self._phase[(row.synced - row.computed) % self.block_size] += 1
            heapq.heappush(self._ends, (row.end, row.arrival, row))

    def _planned(self, work: list[Work], decodes: int, seconds: float) -> None:
        now = self.kernel.now
        here = [row for row in self._fresh if row.synced <= self.steps]  # stalled ones are ahead
        self._fresh = [row for row in self._fresh if row.synced > self.steps]
        for row in here:
            self._tell_wait(row, now)
        if decodes > len(here):
            self.tally.itl.add(seconds, decodes - len(here))
        if self.gaps is not None:
            self.gaps.add(self.steps, 1, seconds)
        self.scheduler.advance(work)
        self.steps += 1
        self._context += len(self._rows)
        for item in work:
            row = _row(item)
            if row in self._rows:
                row.known += 1
                row.synced = self.steps
                if row.end == self.steps:
                    self._finish(row)
            elif row.computed == row.known:
                self._computed(row)
        self._turn()

    def _computed(self, row: Row) -> None:
        """Its first token here."""
        row.known += 1
        if row.hold:
            self.scheduler.remove(row)
        elif row.tokens == 1:
            self.scheduler.remove(row)
            self.scheduler.let_go(row)
        else:
            row.end = self.steps + row.tokens - 1
            self._enter(row)
        row.joined = self.steps
        row.last_at = self.kernel.now
        self.listener.first(row)

    def _preempted(self, plan: Plan) -> None:
        self.tally.preemptions += len(plan.preempted)
        for row in plan.preempted:
            assert isinstance(row, Row)
            if row in self._rows:
                del self._rows[row]
            if row in self._fresh:
                self._fresh.remove(row)
            if not self.scheduler.recompute_preempted:
                self.listener.preempted(row)
        self._phase = [0] * self.block_size
        for row in self._rows:
            self._phase[(row.synced - row.computed) % self.block_size] += 1
        self._context = sum(row.computed + 1 for row in self._rows)

    # --- rows that decode ----------------------------------------------------------------------------------------

    def _enter(self, row: Row) -> None:
        """It has one token to come in the next step, and in each after that."""
        row.synced = row.joined = self.steps
        self._rows[row] = None
        self._fresh.append(row)
        self._context += row.computed + 1
        self._phase[(row.synced - row.computed) % self.block_size] += 1
        heapq.heappush(self._ends, (row.end, row.arrival, row))
        if not self._exact:
            self._ahead += self._extra(row)

    def _leave(self, row: Row) -> None:
        self._sync(row)
        if not self._exact:
            self._ahead -= self._extra(row)
        self._drop_phase(row)
        self._context -= row.computed + 1
        del self._rows[row]
        if row in self._fresh:
            self._fresh.remove(row)

    def _finish(self, row: Row) -> None:
        self._stuck = False
        self._leave(row)
        self.scheduler.remove(row)
        self.scheduler.let_go(row)
        self.listener.finished(row)

    def _drop_phase(self, row: Row) -> None:
        self._phase[(row.synced - row.computed) % self.block_size] -= 1

    def _extra(self, row: Row) -> int:
        """Blocks that it has and does not use yet."""
        assert row.allocation is not None
        return max(0, len(row.allocation) + row.computed // -self.block_size)

    def _sync_all(self) -> None:
        if not self._exact:
            for row in self._rows:
                self._sync(row)
            self._exact, self._ahead = True, 0

    def _sync(self, row: Row) -> None:
        """What stretches did to it."""
        count, held = self.steps - row.synced, row.allocation
        if not count:
            return
        assert isinstance(held, Held)
        missing = -((row.computed + count) // -self.block_size) - len(held)
        if missing > 0:
            self.pool.settle(held, missing)
        self.scheduler.advance([Work(row, count)])
        row.known += count
        row.synced = self.steps


def _row(item: Work) -> Row:
    row = item.sequence
    assert isinstance(row, Row)
    return row
