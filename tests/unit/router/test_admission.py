import asyncio
import random
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import DeadlineExceeded, NoWorker, Overloaded
from router.admission.admission import OVERTAKES, Ticket, ticket_for
from tests.simulation.clock import START, LoopClock
from tests.unit.router.gates import Gate, turns, virtual


class Line:
    """An admission and a model of it: the head goes first. Newcomers wait unless they are the head and fit."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.gate = rng, Gate(10, by_tokens=True)
        self.waiting: dict[int, int] = {}  # tokens by ticket
        self.held: dict[int, int] = {}
        self.tasks: dict[int, asyncio.Task[int]] = {}

    async def act(self, number):
        act = self.rng.choice(["newcomer", "comes back", "ends", "gives up", "serve"])
        if act == "newcomer":
            await self.enter(number)
        elif act == "comes back" and self.held:
            await self.enter(self.take_back())
        elif act == "ends" and self.held:
            self.take_back()
        elif act == "gives up" and self.waiting:
            ticket = self.rng.choice(sorted(self.waiting))
            del self.waiting[ticket]
            self.tasks[ticket].cancel()
            await self.served()
        elif act == "serve":
            self.gate.admission.changed()
            await self.served()
        assert self.gate.admission.waiting == len(self.waiting)
        assert self.gate.room + sum(self.held.values()) == 10

    def take_back(self) -> int:
        """End a request without notifying the admission."""
        ticket = self.rng.choice(sorted(self.held))
        self.gate.room += self.held.pop(ticket)
        return ticket

    async def enter(self, ticket):
        tokens, free = self.rng.randint(1, 10), self.gate.room
        first = not self.waiting or ticket < min(self.waiting)
        entering = self.gate.admission.admit(ticket_for(ticket, 0), tokens, returning=True)
        self.tasks[ticket] = asyncio.create_task(entering)
        await turns()
        assert self.tasks[ticket].done() == (first and tokens <= free)
        (self.held if self.tasks[ticket].done() else self.waiting)[ticket] = tokens

    async def served(self):
        await turns()
        while self.waiting and self.tasks[min(self.waiting)].done():
            ticket = min(self.waiting)
            assert self.tasks[ticket].result() == self.waiting[ticket]
            self.held[ticket] = self.waiting.pop(ticket)
        assert not any(self.tasks[ticket].done() for ticket in self.waiting)
        assert not self.waiting or self.waiting[min(self.waiting)] > self.gate.room


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
@virtual
async def test_the_head_goes_first(rng):
    line = Line(rng)
    for number in range(40):
        await line.act(number)


async def test_the_urgent_overtake_only_so_many_arrivals(make):
    tickets = [ticket_for(0, 0), ticket_for(OVERTAKES - 1, 1), ticket_for(OVERTAKES, 1), ticket_for(OVERTAKES + 1, 1)]
    assert sorted(tickets) == [tickets[1], *(tickets[i] for i in (0, 2, 3))]
    gate, served = make(), list[Ticket]()
    for ticket in tickets:
        task = await gate.enter(arrival=ticket[1], priority=int(ticket is not tickets[0]))
        task.add_done_callback(lambda _, ticket=ticket: served.append(ticket))
    gate.free(len(tickets))
    await asyncio.gather(*gate.tasks)
    assert served == sorted(tickets)


async def test_who_would_have_to_wait_gets_nothing_at_once(make):
    gate = make(3, by_tokens=True)
    assert (gate.admission.admit_now(4), gate.admission.admit_now(1)) == (None, 1)
    task = await gate.enter(3)
    assert (gate.admission.admit_now(1), gate.admission.waiting, gate.room) == (None, 1, 2)
    gate.free()
    assert await task == 3


async def test_the_bound_turns_newcomers_away_but_nobody_who_comes_back(make):
    gate = make(requests=1)
    await gate.enter(arrival=5)
    await gate.refuses("1 requests wait already", arrival=6)
    await gate.enter(arrival=2, returning=True)
    assert gate.admission.waiting == 2


async def test_a_queue_of_no_length_still_admits_what_has_room(make):
    gate = make(1, requests=0)
    assert await gate.enter() == 10
    await gate.refuses()


async def test_a_claim_asks_for_the_worker_that_holds_the_kv_at_once_and_from_the_queue(make):
    gate = make(1)
    assert await gate.enter(requirements="mine") == 10
    waiting, behind = await gate.enter(requirements="mine too"), await gate.enter()
    gate.free(2)
    assert [await waiting, await behind] == [10, 10]
    assert gate.wishes == ["mine", "mine too", "mine too", None]


async def test_retry_after_is_how_long_the_first_has_waited(make):
    gate = make(requests=1)
    await gate.enter()
    for waited, wanted in ((0.0, 0.5), (7.0, 7.0), (100.0, 30.0)):
        gate.clock.advance(waited)
        assert await gate.refuses() == wanted


async def test_no_claim_is_lost_when_service_and_cancellation_meet(make, seed):
    rng, gate = random.Random(seed), make()
    tasks = [await gate.enter(1) for _ in range(600)]
    gate.room = 300
    acts: list[Callable[[], object]] = [task.cancel for task in rng.sample(tasks, 250)]
    acts += [gate.admission.changed] * 5
    rng.shuffle(acts)
    for act in acts:
        act()
    if rng.random() < 0.5:
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()  # also those that were served but have not run since
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert gate.room + results.count(1) == 300


# --- accepted requests are not rejected for capacity


WAIT_S = 8.0


@asynccontextmanager
async def accepting():
    """Yield a gate in virtual time."""
    yield (gate := Gate(clock=LoopClock(), requests=1, tokens=100, wait_s=WAIT_S))
    await gate.cleared()


@virtual
async def test_it_waits_for_longer_than_newcomers_may_and_goes_before_them():
    async with accepting() as gate:
        back = await gate.enter(arrival=1, returning=True, accepted=True, deadline_s=1000.0)
        choice = await gate.enter(arrival=2, accepted=True, deadline_s=1000.0)
        await gate.refuses("wait already", arrival=3)
        await asyncio.sleep(10 * WAIT_S)
        later = await gate.enter(arrival=9, accepted=True)
        await asyncio.sleep(1)
        assert not any(task.done() for task in (back, choice, later))
        for task, others in ((back, (choice, later)), (choice, (later,)), (later, ())):
            gate.free()
            assert await task == 10
            assert not any(other.done() for other in others)


@pytest.mark.parametrize(
    ("accepted", "deadline_s", "error", "ends_s"),
    [
        (True, 50.5, DeadlineExceeded("the request waited for capacity"), 50.5),
        (False, 5.5, DeadlineExceeded("the request waited for capacity"), 5.5),
        (False, 1000.0, Overloaded("waited 8 s for capacity"), WAIT_S),
    ],
)
@virtual
async def test_its_own_deadline_or_if_it_was_not_accepted_the_longest_wait_ends_it(accepted, deadline_s, error, ends_s):
    async with accepting() as gate:
        waiting = await gate.enter(returning=True, accepted=accepted, deadline_s=deadline_s)
        with pytest.raises(type(error), match=str(error)):
            await waiting
        assert gate.clock.monotonic() - START == pytest.approx(ends_s)


@virtual
async def test_nobody_there_for_as_long_as_others_wait_ends_it():
    async with accepting() as gate:
        back = await gate.enter(accepted=True, deadline_s=1000.0, since=START - 100.0)
        await asyncio.sleep(20)
        gate.pair = False
        with pytest.raises(NoWorker, match="waited 8 s: no decode worker is connected"):
            await back
        assert 20 + WAIT_S <= gate.clock.monotonic() - START <= 20 + WAIT_S * 1.25


@virtual
async def test_workers_that_come_back_in_time_count_from_anew():
    async with accepting() as gate:
        back = await gate.enter(returning=True, accepted=True)
        for _ in range(5):
            gate.pair = False
            await asyncio.sleep(0.8 * WAIT_S)
            gate.pair = True
            await asyncio.sleep(0.2 * WAIT_S)
        assert not back.done()
        gate.free()
        assert await back == 10
