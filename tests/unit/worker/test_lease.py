"""A lease that has lapsed is never taken up again; a Redis that is away, or forgot, costs nobody anything."""

import asyncio

import pytest

from baton.clock import FakeClock
from baton.core import Role
from baton.errors import EngineFault, LedgerError
from baton.worker.lease import Lease
from tests.simulation.clock import LoopClock, VirtualLoop
from tests.support.sessions import D
from tests.support.workers import engine_of, info_of

LEASE_S = 10.0
INFO = info_of(D, Role.DECODE, engine_of(Role.DECODE, 10))


class FakeLedger:
    def __init__(self):
        self.renewals, self.places = [], []  # answers to come; an exception is raised, none left: True
        self.calls = []

    async def renew(self, ref, progress):
        self.calls.append(("renew", progress))
        return await self._answer(self.renewals)

    async def register(self, info):
        self.calls.append("register")
        return await self._answer(self.places)

    async def _answer(self, answers):
        answer = answers.pop(0) if answers else True
        if isinstance(answer, Exception):
            raise answer
        return await asyncio.sleep(60) if answer is None else answer


@pytest.fixture
def ledger():
    return FakeLedger()


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def lease(ledger, clock):
    return Lease(ledger, INFO, LEASE_S, clock)


async def test_a_lease_that_is_renewed_in_time_is_kept(lease, ledger, clock):
    await lease.take()
    for progress in range(5):
        clock.advance(9.0)
        lease.check()
        await lease.renew(progress)
    assert ledger.calls == ["register", *(("renew", progress) for progress in range(5))]


async def test_a_place_that_is_taken_is_not_entered(lease, ledger):
    ledger.places = [False]
    with pytest.raises(EngineFault, match="taken by another incarnation"):
        await lease.take()


@pytest.mark.parametrize("redis", ["there", "away"])
@pytest.mark.parametrize("how", ["check", "renew"])
async def test_a_lease_that_lapsed_is_over_whatever_the_ledger_would_say(lease, ledger, clock, how, redis):
    """An engine thread that was stuck, or a process that was frozen: the place may have been reclaimed."""
    await lease.take()
    if redis == "away":
        ledger.renewals = [LedgerError("away")]
        await lease.renew(1)
    calls = list(ledger.calls)
    clock.advance(LEASE_S + 0.1)
    with pytest.raises(LedgerError, match="has lapsed"):
        await lease.renew(1) if how == "renew" else lease.check()
    assert ledger.calls == calls


async def test_a_redis_that_forgot_is_told_again(lease, ledger, clock):
    await lease.take()
    clock.advance(1.0)
    ledger.renewals = [False]
    await lease.renew(1)
    assert ledger.calls[-1] == "register"
    clock.advance(9.9)
    lease.check()


async def test_another_incarnation_in_the_place_ends_this_one(lease, ledger):
    await lease.take()
    ledger.renewals, ledger.places = [False], [False]
    with pytest.raises(EngineFault, match="fenced"):
        await lease.renew(1)


async def test_a_redis_that_is_away_for_long_does_not_end_the_worker(lease, ledger, clock):
    await lease.take()
    ledger.renewals = [LedgerError("away")] * 20
    for progress in range(20):
        clock.advance(5.0)
        lease.check()
        await lease.renew(progress)
    ledger.renewals = [False]
    await lease.renew(21)
    assert ledger.calls[-1] == "register"


def test_a_call_without_an_answer_is_given_up_before_the_lease_lapses(ledger):
    async def unanswered():
        lease = Lease(ledger, INFO, LEASE_S, LoopClock())
        await lease.take()
        for _ in range(4):
            ledger.renewals = [None]
            async with asyncio.timeout(LEASE_S):
                await lease.renew(1)
            lease.check()

    loop = VirtualLoop()
    try:
        loop.run_until_complete(unanswered())
    finally:
        loop.close()
