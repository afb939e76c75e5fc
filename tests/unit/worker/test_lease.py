"""A lease that has lapsed is never taken up again; a Redis that is away, or forgot, costs nobody anything."""

import asyncio
from unittest.mock import AsyncMock, Mock, call

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


@pytest.fixture
def ledger():
    it = Mock()
    it.renew, it.register = AsyncMock(return_value=True), AsyncMock(return_value=True)
    return it


def calls(ledger):
    return [name for name, _, _ in ledger.mock_calls]


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
    assert ledger.mock_calls == [call.register(INFO), *(call.renew(D, progress) for progress in range(5))]


@pytest.mark.parametrize("redis", ["there", "away"])
@pytest.mark.parametrize("how", ["check", "renew"])
async def test_a_lease_that_lapsed_is_over_whatever_the_ledger_would_say(lease, ledger, clock, how, redis):
    """An engine thread that was stuck, or a process that was frozen: the place may have been reclaimed."""
    await lease.take()
    if redis == "away":
        ledger.renew.side_effect = LedgerError("away")
        await lease.renew(1)
    before = calls(ledger)
    clock.advance(LEASE_S + 0.1)
    with pytest.raises(LedgerError, match="has lapsed"):
        await lease.renew(1) if how == "renew" else lease.check()
    assert calls(ledger) == before


async def test_a_redis_that_forgot_is_told_again(lease, ledger, clock):
    await lease.take()
    clock.advance(1.0)
    ledger.renew.return_value = False
    await lease.renew(1)
    assert calls(ledger) == ["register", "renew", "register"]
    clock.advance(9.9)
    lease.check()


async def test_another_incarnation_in_the_place_ends_this_one(lease, ledger):
    await lease.take()
    ledger.renew.return_value = ledger.register.return_value = False
    with pytest.raises(EngineFault, match="fenced"):
        await lease.renew(1)
    with pytest.raises(EngineFault, match="taken by another incarnation"):
        await lease.take()


async def test_a_redis_that_is_away_for_long_does_not_end_the_worker(lease, ledger, clock):
    await lease.take()
    ledger.renew.side_effect = [*[LedgerError("away")] * 20, False]
    for progress in range(20):
        clock.advance(5.0)
        lease.check()
        await lease.renew(progress)
    await lease.renew(21)
    assert calls(ledger)[-1] == "register"


def test_a_call_without_an_answer_is_given_up_before_the_lease_lapses(ledger):
    async def never(ref, progress):
        await asyncio.sleep(60)

    async def unanswered():
        ledger.renew.side_effect = never
        lease = Lease(ledger, INFO, LEASE_S, LoopClock())
        await lease.take()
        for _ in range(4):
            async with asyncio.timeout(LEASE_S):
                await lease.renew(1)
            lease.check()

    loop = VirtualLoop()
    try:
        loop.run_until_complete(unanswered())
    finally:
        loop.close()
