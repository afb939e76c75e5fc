"""Who has been accepted is not turned away for room, in virtual time."""

import asyncio

import pytest

from baton.errors import DeadlineExceeded, NoWorker, Overloaded
from router.admission import Admission, Bounds, ticket_for
from tests.simulation.clock import START, LoopClock, VirtualLoop

WAIT_S = 8.0


class Gate:
    """An admission whose room is a number of requests; `pair`: a worker is there."""

    def __init__(self):
        self.room, self.pair = 0, True
        bounds = Bounds(requests=1, tokens=100, wait_s=WAIT_S)
        self.admission = Admission(self.claim, self.give_back, lambda: self.pair, LoopClock(), bounds)

    def claim(self, tokens, wish):
        if not self.room:
            return None
        self.room -= 1
        return tokens

    def give_back(self, claim):
        self.room += 1

    def enter(self, arrival, **kwargs):
        return asyncio.create_task(self.admission.admit(ticket_for(arrival, 0), 10, **kwargs))

    def free(self):
        self.room += 1
        self.admission.changed()


def virtual(scenario):
    """Run it on a gate; seconds that passed."""
    loop = VirtualLoop()
    try:
        loop.run_until_complete(scenario(Gate()))
        return loop.now - START
    finally:
        loop.close()


def test_it_waits_for_longer_than_newcomers_may_and_goes_before_them():
    async def scenario(gate):
        back = gate.enter(1, returning=True, accepted=True, deadline_s=1000.0)
        choice = gate.enter(2, accepted=True, deadline_s=1000.0)
        with pytest.raises(Overloaded, match="wait already"):
            await gate.enter(3)
        await asyncio.sleep(10 * WAIT_S)
        later = gate.enter(9, accepted=True)
        await asyncio.sleep(1)
        assert not any(task.done() for task in (back, choice, later))
        for task, others in ((back, (choice, later)), (choice, (later,)), (later, ())):
            gate.free()
            assert await task == 10
            assert not any(other.done() for other in others)

    virtual(scenario)


def test_its_own_deadline_ends_the_wait():
    async def scenario(gate):
        with pytest.raises(DeadlineExceeded, match="while it waited for room"):
            await gate.enter(1, returning=True, accepted=True, deadline_s=50.5)
        assert gate.admission.waiting == 0

    assert virtual(scenario) == pytest.approx(50.5)


def test_nobody_there_for_as_long_as_others_wait_ends_it():
    async def scenario(gate):
        back = gate.enter(1, accepted=True, deadline_s=1000.0, since=START - 100.0)
        await asyncio.sleep(20)
        gate.pair = False
        with pytest.raises(NoWorker, match="waited 8 s: no decode worker is connected"):
            await back
        assert gate.admission.waiting == 0

    assert 20 + WAIT_S <= virtual(scenario) <= 20 + WAIT_S * 1.25


def test_workers_that_come_back_in_time_count_from_anew():
    async def scenario(gate):
        back = gate.enter(1, returning=True, accepted=True)
        for _ in range(5):
            gate.pair = False
            await asyncio.sleep(0.8 * WAIT_S)
            gate.pair = True
            await asyncio.sleep(0.2 * WAIT_S)
        assert not back.done()
        gate.free()
        assert await back == 10

    virtual(scenario)


def test_who_was_not_accepted_is_told_to_come_again():
    async def scenario(gate):
        with pytest.raises(Overloaded, match="waited 8 s for room"):
            await gate.enter(1, returning=True, deadline_s=1000.0)

    assert virtual(scenario) == pytest.approx(WAIT_S)
