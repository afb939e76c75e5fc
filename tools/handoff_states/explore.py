"""The search: depth first from each state of an undisturbed handoff, each state once.

A table in shared memory has the key of each state, with the number of events that were left when it was explored. A
state that is met again with more events left is explored again and counted once. Later roots come first, so this is
rare. Processes take the next root and first event from a common counter. If two write one place of the table together,
a state may be explored twice.

A state inside the bound needs no separate check of its end: the next event of its end is among those explored.
States at the bound are followed to their end, or to a state from which that was done before.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory

import numpy as np

from baton.errors import BatonError
from tools.handoff_states.doubles import Violation
from tools.handoff_states.states import Snapshot, key, replaced
from tools.handoff_states.world import MOST_STEPS, Event, World

FAILURES = (Violation, BatonError, AssertionError, KeyError, ValueError, IndexError, AttributeError, TypeError)
LEFT_BITS = 6  # of a table entry: the number of events left, plus 1
PLACES = 1 << 24
MOST_GARBAGE = 100_000  # objects between two collections, which take 7% of the time with the default


class Table:
    """Keys of states, in `memory`: 8 bytes each."""

    def __init__(self, memory: memoryview | None) -> None:
        assert memory is not None  # the memory is open
        self._entries = memory.cast("Q")
        self._places = len(self._entries)

    def explores(self, digest: int, left: int) -> bool:
        """Record a state. Return whether it must be explored, because it was not with as many events left."""
        name, place = digest >> LEFT_BITS << LEFT_BITS, digest % self._places
        while (entry := self._entries[place]) and entry >> LEFT_BITS << LEFT_BITS != name:
            place = (place + 1) % self._places
        if entry and entry - name > left:
            return False
        self._entries[place] = name + left + 1
        return True

    @property
    def states(self) -> int:
        return int(np.count_nonzero(np.frombuffer(self._entries, dtype=np.uint64)))


@dataclass(slots=True)
class Found:
    """Figures of a search. `cpu_s` is the time of all its processes."""

    states: int = 0
    transitions: int = 0
    ends: int = 0  # states at the bound that were followed to their end
    cpu_s: float = 0.0
    complete: bool = True
    violation: str = ""
    path: list[str] = field(default_factory=list)


def possible(world: World) -> list[Event]:
    """Return what can happen next."""
    return [*world.events(), *world.faults_now()]


def root(faults: int, number: int) -> World:
    """Return the state of an undisturbed handoff after `number` events."""
    world = World(faults)
    for _ in range(number):
        world.apply(next(world.events()))
    return world


def tasks(faults: int) -> list[tuple[int, int]]:
    """Return the roots, the last ones first, each with the number of each first event."""
    world, found = World(faults), list[tuple[int, int]]()
    number = 0
    while number < MOST_STEPS and (event := next(world.events(), None)) is not None:
        found = [(number, first) for first in range(len(possible(world)))] + found
        world.apply(event)
        number += 1
    return found


class Search:
    """The search of one process, where the production modules are `replaced`."""

    def __init__(self, table: Table, events: int, faults: int, until: float) -> None:
        self.found = Found()
        self._table, self._events, self._faults, self._until = table, events, faults, until
        self._ended: set[int] = set()  # keys of states from which everything ends as it must

    def tasks(self) -> list[tuple[int, int]]:
        """Return the tasks of a search. A violation without any fault is found here, and leaves none to do."""
        try:
            return tasks(self._faults)
        except FAILURES as error:
            self.found.violation = f"{type(error).__name__}: {error}"
            return []

    def run(self, task: tuple[int, int]) -> None:
        """Explore what follows a first event. The first violation ends the search."""
        number, first = task
        try:
            world = root(self._faults, number)
            if first == 0:
                self._table.explores(key(world), 0)
            event = possible(world)[first]
            self.found.path = [f"{number} undisturbed events", event[0]]
            world.apply(event)
            self._explore(world, self._events - 1)
        except FAILURES as error:
            self.found.violation = f"{type(error).__name__}: {error}"

    def _explore(self, world: World, left: int) -> None:
        self.found.transitions += 1
        digest = key(world)
        if not self._table.explores(digest, left):
            return
        if left == 0:
            self._end(world, digest)
        elif time.monotonic() > self._until:
            self.found.complete = False
        elif todo := possible(world):
            self._each(world, todo, left)
        else:
            world.check_end()

    def _each(self, world: World, todo: list[Event], left: int) -> None:
        """Explore each event. The caller restores the state after the last one."""
        path, before = self.found.path, Snapshot(world) if todo[1:] else None
        for number, event in enumerate(todo):
            if number and before is not None:
                before.restore()
            path.append(event[0])
            world.apply(event)
            self._explore(world, left - 1)
            path.pop()

    def _end(self, world: World, digest: int) -> None:
        if digest in self._ended:
            return
        passed = [digest]
        self.found.ends += 1

        def known(state: World) -> bool:
            passed.append(key(state))
            return passed[-1] in self._ended

        world.drain(known)
        self._ended.update(passed)


def search_here(events: int, faults: int, seconds: float, places: int = 1 << 20) -> Found:
    """Explore in this process, where the production modules are `replaced`. Return at the first violation."""
    table, until = Table(memoryview(bytearray(8 * places))), time.monotonic() + seconds
    search = Search(table, events, faults, until)
    for task in search.tasks():
        search.run(task)
        if search.found.violation or not search.found.complete:
            break
    search.found.states = table.states
    return search.found


def search_shared(events: int, faults: int, seconds: float, jobs: int) -> Found:
    """Explore in `jobs` processes until everything within the bounds is explored, or the time is over."""
    context, until = get_context("fork"), time.monotonic() + seconds
    memory = SharedMemory(create=True, size=8 * PLACES)
    counter, results = context.Value("i", 0), context.SimpleQueue()

    def work() -> None:
        gc.set_threshold(MOST_GARBAGE)
        with replaced():
            search = Search(Table(memory.buf), events, faults, until)
            todo = search.tasks()
            while not search.found.violation and search.found.complete:
                with counter.get_lock():
                    number = counter.value
                    counter.value += 1
                if number >= len(todo):
                    break
                search.run(todo[number])
        search.found.cpu_s = time.process_time()
        results.put(search.found)

    processes = [context.Process(target=work, daemon=True) for _ in range(jobs)]
    for process in processes:
        process.start()
    try:
        found = [results.get() for _ in processes]
        total = Found(Table(memory.buf).states, complete=all(one.complete for one in found))
        total.transitions, total.ends = sum(one.transitions for one in found), sum(one.ends for one in found)
        total.cpu_s = sum(one.cpu_s for one in found)
        total.violation, total.path = next(((one.violation, one.path) for one in found if one.violation), ("", []))
        return total
    finally:
        for process in processes:
            process.terminate()
        memory.unlink()
