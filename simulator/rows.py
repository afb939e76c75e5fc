"""Rows that decode: steps are counted for all at once, and a row is brought up to date when it matters."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence, Work
from simulator.blocks import CountedPool, Held


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


class Rows:
    """All that have one token to come in each step. `steps` are done; in the next one they attend to `context`."""

    def __init__(self, pool: CountedPool, scheduler: Scheduler) -> None:
        self.steps = self.context = 0
        self._pool, self._scheduler, self._block_size = pool, scheduler, scheduler.block_size
        self._rows: dict[Row, None] = {}
        self._ends: list[tuple[int, int, Row]] = []  # a heap; entries of rows that ended elsewise, or later, are stale
        self._phase = [0] * self._block_size  # rows by the step, modulo the size, in which they need another block
        self._ahead = 0  # blocks that rows have, and need in their next step alone
        self._exact = True  # all rows are up to date, and their allocations have all their blocks
        self._fresh: list[Row] = []  # that had no token in the step before

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, row: object) -> bool:
        return row in self._rows

    def loosen(self) -> None:
        """Rows need not be up to date from now on."""
        if self._exact:
            self._ahead = sum(self._extra(row) for row in self._rows)
            self._exact = False

    def next_end(self) -> int:
        """The step before which a row ends. There must be one."""
        while (first := self._ends[0])[2] not in self._rows or first[2].end != first[0]:
            heapq.heappop(self._ends)
        return first[0]

    def advance(self, steps: int) -> Iterator[Row]:
        """So many steps of all rows are done: who ends with them."""
        self._pool.take(self.growth(steps))
        self._ahead = 0
        self.steps += steps
        self.context += len(self._rows) * steps
        while self._ends and self._ends[0][0] <= self.steps:
            end, _, row = heapq.heappop(self._ends)
            if row in self._rows and row.end == end:
                yield row

    def have_room(self, most: int) -> int:
        """For how many of the next `most` steps there are blocks."""
        room, least = self._pool.available, 0
        if self.growth(most) <= room:
            return most
        while most - least > 1:  # there is room for `least`, and none for `most`
            middle = (least + most) // 2
            least, most = (middle, most) if self.growth(middle) <= room else (least, middle)
        return least

    def step(self) -> None:
        """One step is done, as the scheduler planned it."""
        self.steps += 1
        self.context += len(self._rows)

    def take_fresh(self) -> list[Row]:
        """Rows with a token in this step and none in the one before."""
        here = [row for row in self._fresh if row.synced <= self.steps]  # stalled ones are ahead
        if here:
            self._fresh = [row for row in self._fresh if row.synced > self.steps]
        return here

    def lose(self, row: Row) -> None:
        """It was preempted. `recount` must follow."""
        self._rows.pop(row, None)
        if row in self._fresh:
            self._fresh.remove(row)

    def recount(self) -> None:
        """After some were preempted; all are up to date."""
        self._phase = [0] * self._block_size
        for row in self._rows:
            self._phase[(row.synced - row.computed) % self._block_size] += 1
        self.context = sum(row.computed + 1 for row in self._rows)

    def growth(self, steps: int) -> int:
        """Blocks that rows grow by in the next so many steps."""
        size, phase = self._block_size, self._phase
        cycles, rest = divmod(steps, size)
        first = self.steps % size
        last = first + rest
        some = sum(phase[first:last]) + (sum(phase[: last - size]) if last > size else 0)
        return cycles * len(self._rows) + some - self._ahead

    def pause(self, now: float) -> None:
        """No row has a block for its next token: all wait for others to let some go."""
        waiting = set(self._fresh)
        for row in self._rows:
            if row not in waiting:
                row.last_at = now
                self._fresh.append(row)

    def stall(self, work: list[Work], now: float) -> None:
        """Rows that are not in the step have their tokens a step later."""
        here = {item.sequence for item in work}
        for row in [row for row in self._rows if row not in here]:
            self._drop_phase(row)
            if row not in self._fresh:
                row.last_at = now
                self._fresh.append(row)
            row.synced, row.end = row.synced + 1, row.end + 1
            self.context -= 1  # the step is about to count one more for each row
            self._phase[(row.synced - row.computed) % self._block_size] += 1
            heapq.heappush(self._ends, (row.end, row.arrival, row))

    def enter(self, row: Row) -> None:
        """It has one token to come in the next step, and in each after that."""
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
        """Blocks that it has and does not use yet."""
        assert row.allocation is not None
        return max(0, len(row.allocation) + row.computed // -self._block_size)

    def _sync(self, row: Row) -> None:
        """What stretches did to it."""
        count, held = self.steps - row.synced, row.allocation
        if not count:
            return
        assert isinstance(held, Held)
        missing = -((row.computed + count) // -self._block_size) - len(held)
        if missing > 0:
            self._pool.settle(held, missing)
        self._scheduler.advance([Work(row, count)])
        row.known += count
        row.synced = self.steps


def row_of(item: Work) -> Row:
    """Whose work that is."""
    row = item.sequence
    assert isinstance(row, Row)
    return row
