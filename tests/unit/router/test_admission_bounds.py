"""Rejections at the queue's limits and their retry delays."""

import asyncio

import pytest

from baton.errors import NoWorker, Overloaded
from baton.testing import FakeClock
from router.admission.admission import DrainRate
from tests.support.time_factor import scaled


async def test_the_bound_in_tokens(make):
    gate = make(tokens=100)
    await gate.enter(tokens=60)
    await gate.enter(tokens=40)
    await gate.refuses("100 tokens wait already, 1 more exceed the limit", tokens=1)
    assert gate.admission.waiting_tokens == 100
    await gate.enter(tokens=500, returning=True)
    assert gate.admission.waiting_tokens == 600
    empty = make(tokens=100)
    await empty.enter(tokens=5000)  # a request above the limit may wait alone
    await empty.refuses(tokens=5000)


async def test_a_full_queue_has_some_places_left_for_who_has_less_than_its_share(make):
    gate = make(requests=16)
    await gate.enter_all(16, tenant="busy")
    await gate.refuses(tenant="busy")
    await gate.enter_all(2, tenant="silent")
    await gate.refuses("18 requests wait already", tenant="another")


async def test_of_those_places_nobody_takes_more_than_its_share_allows(make):
    gate = make(requests=80, weights={"light": 0.05})
    for tenant, places in (("busy", 80), ("light", 1), ("other", 9)):  # 80 * 0.05 / (1 + 0.05 + 1) is less than 2
        await gate.enter_all(places, tenant=tenant)
        await gate.refuses(tenant=tenant)


@pytest.fixture
async def measured(make):
    """A gate that serves ten requests of ten tokens per second. No request may wait for more than 2.05 s."""
    gate = make(wait_s=2.05)
    await gate.measured(per_s=10)
    return gate


async def test_who_would_wait_too_long_is_refused_at_once_and_told_when_it_will_be_worth_it(measured):
    await measured.enter_all(21)
    delay_s = await measured.refuses(r"wait is 2\.1 s, but only 2\.05 s are left")
    assert delay_s == 0.5  # the minimum delay
    await measured.drain(1, 10)
    await measured.enter()


async def test_many_short_ones_count_as_requests_and_few_long_ones_as_tokens(measured):
    await measured.enter_all(21, tokens=1)
    await measured.refuses("the predicted wait is", tokens=1)
    await measured.drain(21, 10)
    await measured.enter(tokens=1000)
    await measured.refuses("the predicted wait is", tokens=1)


async def test_the_deadline_bounds_the_wait_and_the_delay_says_how_much_too_long_it_was(make):
    gate = make(wait_s=30.0)
    await gate.measured(per_s=10)
    await gate.enter_all(101)
    await gate.enter(deadline_s=11.0)
    assert await gate.refuses(r"only 4 s are left", deadline_s=4.0) == pytest.approx(10.2 - 4.0)


async def test_each_is_judged_by_its_own_wait(measured):
    await measured.enter_all(21, tenant="busy")
    await measured.refuses(tenant="busy")
    await measured.enter(tenant="silent")
    urgent = await measured.enter(tenant="busy", priority=1)
    await measured.drain(2, 10)
    assert urgent.done()
    await measured.enter_all(11, tenant="silent")
    await measured.refuses(tenant="silent")  # its own eleven are as far back as twenty-two of all tenants


async def test_who_comes_back_waits_however_long_the_queue_is(measured):
    await measured.enter_all(21)
    back = await measured.enter(returning=True, arrival=1)
    await measured.drain(1, 10)
    assert back.done()


async def test_before_anything_was_measured_and_without_workers_only_the_bounds_count(make, measured):
    measured.pair = False
    for gate, count in ((make(wait_s=5.0), 500), (measured, 100)):
        await gate.enter_all(count)
        assert gate.admission.waiting == count


async def test_a_rate_that_was_bad_does_not_lock_the_queue(make):
    """The head of the queue may always wait, so that there is something to measure."""
    gate = make(wait_s=2.05)
    await gate.measured(per_s=0.1)
    for _ in range(300):
        task = await gate.enter()
        await gate.drain(1, 100)
        assert task.done()
    await gate.enter_all(20)


@pytest.mark.parametrize(("pair", "error"), [(True, Overloaded), (False, NoWorker)])
async def test_waits_that_led_to_nothing_count_together(make, pair, error):
    gate = make(pair=pair, wait_s=30.0)
    since = gate.clock.monotonic()
    gate.clock.advance(29.99)
    task = await gate.enter(returning=True, since=since)
    with pytest.raises(error, match="waited 30 s"):
        await asyncio.wait_for(task, scaled(5))
    gate.clock.advance(100)
    gate.room = 1
    assert await gate.enter(returning=True, since=since) == 10  # a request that fits need not wait


# --- service rate of the queue


def draining(over_s=10.0, *, waiting=True):
    clock = FakeClock()
    drain = DrainRate(clock, over_s)
    drain.watch(waiting=waiting)
    return clock, drain


def run(drain, clock, times, gap_s, tokens=10):
    for _ in range(times):
        clock.advance(gap_s)
        drain.served(tokens)


def test_nothing_is_known_until_enough_was_served_while_somebody_waited():
    clock, drain = draining(waiting=False)
    run(drain, clock, 20, 0.1)  # no request waits
    assert not drain.measured
    drain.watch(waiting=True)
    run(drain, clock, 7, 0.1)
    assert (drain.measured, drain.requests_per_s, drain.tokens_per_s) == (False, 0.0, 0.0)
    run(drain, clock, 4, 0.1)
    assert drain.requests_per_s == pytest.approx(10)
    assert drain.tokens_per_s == pytest.approx(100)


def test_time_in_which_nobody_waits_does_not_count():
    clock, drain = draining(waiting=False)
    for _ in range(30):
        drain.watch(waiting=True)
        run(drain, clock, 1, 0.1)
        drain.watch(waiting=False)
        clock.advance(3.0)
    assert drain.requests_per_s == pytest.approx(10)


@pytest.mark.parametrize("rate", [0.5, 5.0, 2000.0])
def test_it_follows_the_last_seconds_or_the_last_requests(rate):
    clock, drain = draining()
    run(drain, clock, 200, 4 / rate)
    run(drain, clock, max(round(rate * 20), 130), 1 / rate, tokens=30)
    assert drain.requests_per_s == pytest.approx(rate, rel=0.1)
    assert drain.tokens_per_s == pytest.approx(30 * rate, rel=0.1)


def test_a_standstill_shows_while_it_lasts_and_is_soon_forgotten():
    clock, drain = draining(2.0)
    run(drain, clock, 100, 0.01)
    clock.advance(100)
    assert drain.requests_per_s < 1
    run(drain, clock, 100, 0.01)
    assert drain.requests_per_s > 25


def test_waiting_in_vain_is_time_too():
    clock, drain = draining()
    run(drain, clock, 10, 0.1)
    before = drain.requests_per_s
    clock.advance(5)
    drain.watch(waiting=False)
    assert drain.requests_per_s < before / 3
