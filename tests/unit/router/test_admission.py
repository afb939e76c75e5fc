import asyncio
import random
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.clock import FakeClock
from baton.errors import NoWorker, Overloaded
from router.admission import OVERTAKES, Admission, Bounds, Ticket, ticket_for


class Room:
    """So many tokens of room; a claim takes some."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.kept: list[object] = []  # what was asked for with each claim

    def claim(self, tokens: int, keep: object = None) -> int | None:
        self.kept.append(keep)
        if tokens > self.free:
            return None
        self.free -= tokens
        return tokens

    def give_back(self, claim: int) -> None:
        self.free += claim


class Line(RuleBasedStateMachine):
    """Against a plain model: who enters waits unless it is first and fits; the head is served first, or nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.room = Room(10)
        self.gate = admission(self.room)
        self.waiting: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.tasks: dict[int, asyncio.Task[int]] = {}
        self.next_ticket = 0

    def teardown(self):
        for task in self.tasks.values():
            task.cancel()
        self._turn()
        self.loop.close()

    def _turn(self) -> None:
        """Until every task waits or has ended."""
        for _ in range(5):
            self.loop.run_until_complete(asyncio.sleep(0))

    @rule(tokens=st.integers(1, 10))
    def newcomer(self, tokens):
        self._enter(self.next_ticket, tokens)
        self.next_ticket += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.integers(1, 10))
    def comes_back(self, data, tokens):
        ticket = data.draw(st.sampled_from(sorted(self.held)))
        self.room.give_back(self.held.pop(ticket))
        self._enter(ticket, tokens)

    def _enter(self, ticket, tokens):
        first, free = not self.waiting or ticket < min(self.waiting), self.room.free
        self.tasks[ticket] = self.loop.create_task(self.gate.admit(ticket_for(ticket, 0), tokens, returning=True))
        self._turn()
        assert self.tasks[ticket].done() == (first and tokens <= free)
        (self.held if self.tasks[ticket].done() else self.waiting)[ticket] = tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def ends(self, data):
        self.room.give_back(self.held.pop(data.draw(st.sampled_from(sorted(self.held)))))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def gives_up(self, data):
        ticket = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[ticket]
        self.tasks[ticket].cancel()
        self._served()

    @rule()
    def serve(self):
        self.gate.changed()
        self._served()

    def _served(self):
        self._turn()
        while self.waiting and self.tasks[min(self.waiting)].done():
            ticket = min(self.waiting)
            assert self.tasks[ticket].result() == self.waiting[ticket]
            self.held[ticket] = self.waiting.pop(ticket)
        assert not any(self.tasks[ticket].done() for ticket in self.waiting)
        assert not self.waiting or self.waiting[min(self.waiting)] > self.room.free

    @invariant()
    def nothing_is_lost(self):
        assert self.gate.waiting == len(self.waiting)
        assert self.room.free + sum(self.held.values()) == 10


Line.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLine = Line.TestCase


def admission(
    room: Room, clock: FakeClock | None = None, *, pair: bool = True, weights: dict[str, float] | None = None, **bounds
) -> Admission[int]:
    gate: Admission[int]
    limits = Bounds(**{"requests": 100, "tokens": 1000, "wait_s": 30.0, **bounds})

    def give_back(claim: int) -> None:
        room.give_back(claim)
        gate.changed()

    gate = Admission(room.claim, give_back, lambda: pair, clock or FakeClock(), limits, weights)
    return gate


async def queued(gate: Admission[int], ticket: int, tokens: int, **kwargs) -> asyncio.Task[int]:
    task = asyncio.create_task(gate.admit(ticket_for(ticket, 0), tokens, **kwargs))
    await asyncio.sleep(0)  # one turn of the loop: it runs up to its first wait
    return task


async def test_waiters_are_served_in_order_of_their_tickets():
    room = Room(0)
    gate = admission(room)
    tasks = {ticket: await queued(gate, ticket, 1, returning=ticket == 0) for ticket in (3, 4, 0)}
    for ticket in (0, 3, 4):
        room.free = 1
        gate.changed()
        await tasks[ticket]
        assert gate.waiting == sum(not task.done() for task in tasks.values())


async def test_the_urgent_overtake_only_so_many_arrivals():
    tickets = [ticket_for(0, 0), ticket_for(OVERTAKES - 1, 1), ticket_for(OVERTAKES, 1), ticket_for(OVERTAKES + 1, 1)]
    assert sorted(tickets) == [tickets[1], *(tickets[i] for i in (0, 2, 3))]
    room, served = Room(0), list[Ticket]()
    gate = admission(room)

    async def wait(ticket: Ticket) -> None:
        await gate.admit(ticket, 1)
        served.append(ticket)

    tasks = [asyncio.create_task(wait(ticket)) for ticket in tickets]
    await asyncio.sleep(0)
    room.free = len(tickets)
    gate.changed()
    await asyncio.gather(*tasks)
    assert served == sorted(tickets)


async def test_who_would_have_to_wait_gets_nothing_at_once():
    room = Room(3)
    gate = admission(room)
    assert (gate.at_once(4), gate.at_once(1)) == (None, 1)
    task = await queued(gate, 0, 3)
    assert (gate.at_once(1), gate.waiting, room.free) == (None, 1, 2)
    room.give_back(1)
    gate.changed()
    assert await task == 3


async def test_a_small_request_does_not_overtake_a_large_one():
    room = Room(3)
    gate = admission(room)
    large, small = await queued(gate, 0, 5), await queued(gate, 1, 1)
    gate.changed()
    assert not small.done()
    large.cancel()
    assert await small == 1  # its turn has come with the end of the other


async def test_the_bound_turns_newcomers_away_but_nobody_who_comes_back():
    gate = admission(Room(0), requests=1)
    waiting = await queued(gate, 5, 1)
    with pytest.raises(Overloaded, match="1 requests wait already"):
        await gate.admit(ticket_for(6, 0), 1)
    back = await queued(gate, 2, 1, returning=True)
    assert gate.waiting == 2
    for task in (waiting, back):
        task.cancel()


async def test_a_queue_of_no_length_still_admits_what_has_room():
    gate = admission(Room(1), requests=0)
    assert await gate.admit(ticket_for(0, 0), 1) == 1
    with pytest.raises(Overloaded):
        await gate.admit(ticket_for(1, 0), 1)
    assert gate.waiting == 0


async def test_a_claim_asks_for_the_worker_that_holds_the_kv_at_once_and_from_the_queue():
    room = Room(1)
    gate = admission(room)
    assert await gate.admit(ticket_for(0, 0), 1, "mine") == 1
    waiting = await queued(gate, 1, 1, wish="mine too")
    behind = await queued(gate, 2, 1)
    room.free = 2
    gate.changed()
    assert [await waiting, await behind] == [1, 1]
    assert room.kept == ["mine", "mine too", "mine too", None]


@pytest.mark.parametrize(("pair", "error"), [(True, Overloaded), (False, NoWorker)])
async def test_waiting_too_long(pair, error):
    gate = admission(Room(0), pair=pair, wait_s=0.01)
    with pytest.raises(error, match=r"waited 0\.01 s"):
        await gate.admit(ticket_for(0, 0), 1)
    assert gate.waiting == 0


async def test_retry_after_is_how_long_the_first_has_waited():
    clock = FakeClock()
    gate = admission(Room(0), clock, requests=1)
    waiting = await queued(gate, 0, 1)
    for waited, wanted in ((0.0, 0.5), (7.0, 7.0), (100.0, 30.0)):
        clock.advance(waited)
        with pytest.raises(Overloaded) as caught:
            await gate.admit(ticket_for(1, 0), 1)
        assert caught.value.retry_after_s == wanted
    waiting.cancel()


async def test_no_claim_is_lost_when_service_and_cancellation_meet():
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    room = Room(0)
    gate = admission(room, requests=10_000)
    tasks = [await queued(gate, ticket, 1) for ticket in range(600)]
    room.free = 300
    acts: list[Callable[[], object]] = [*(task.cancel for task in rng.sample(tasks, 250)), *[gate.changed] * 5]
    rng.shuffle(acts)
    for act in acts:
        act()
    if rng.random() < 0.5:
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()  # also of those that were served and have not run since
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert room.free + results.count(1) == 300
    assert gate.waiting == 0
