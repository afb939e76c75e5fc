"""Who is turned away, and when it is told to come back."""

import asyncio

import pytest

from baton.errors import NoWorker, Overloaded


async def test_the_bound_in_tokens(make):
    gate = make(tokens=100)
    await gate.enter(tokens=60)
    await gate.enter(tokens=40)
    with pytest.raises(Overloaded, match="100 tokens wait already, there is no place for 1 more"):
        await gate.enter(tokens=1)
    assert gate.admission.waiting_tokens == 100
    await gate.enter(tokens=500, returning=True)
    assert gate.admission.waiting_tokens == 600


async def test_a_prompt_above_the_bound_in_tokens_may_wait_alone(make):
    gate = make(tokens=100)
    await gate.enter(tokens=5000)
    with pytest.raises(Overloaded):
        await gate.enter(tokens=5000)


async def test_a_full_queue_has_some_places_left_for_who_has_less_than_its_share(make):
    gate = make(requests=16)
    for _ in range(16):
        await gate.enter(tenant="busy")
    with pytest.raises(Overloaded):
        await gate.enter(tenant="busy")
    for _ in range(2):
        await gate.enter(tenant="silent")
    with pytest.raises(Overloaded, match="18 requests wait already"):
        await gate.enter(tenant="another")


async def test_of_those_places_nobody_takes_more_than_its_share_allows(make):
    gate = make(requests=80, weights={"light": 0.05})
    for _ in range(80):
        await gate.enter(tenant="busy")
    await gate.enter(tenant="light")
    with pytest.raises(Overloaded):  # 80 * 0.05 / (1 + 0.05 + 1) is less than 2
        await gate.enter(tenant="light")
    for _ in range(9):
        await gate.enter(tenant="other")
    with pytest.raises(Overloaded):
        await gate.enter(tenant="other")


async def test_before_anything_was_measured_only_the_bounds_count(make):
    gate = make(wait_s=5.0)
    for _ in range(500):
        await gate.enter()
    assert gate.admission.waiting == 500


async def test_who_would_wait_too_long_is_refused_at_once_and_told_when_it_will_be_worth_it(make):
    gate = make(wait_s=2.05)
    await gate.measured(per_s=10)
    for _ in range(21):
        await gate.enter()
    with pytest.raises(Overloaded, match=r"would wait for about 2\.1 s, and 2\.05 s are left") as caught:
        await gate.enter()
    assert caught.value.retry_after_s == 0.5  # of 0.1, the least that makes sense
    await gate.drain(1, 10)
    await gate.enter()


async def test_many_short_ones_count_as_requests_and_few_long_ones_as_tokens(make):
    gate = make(wait_s=2.05)
    await gate.measured(per_s=10)
    for _ in range(20):
        await gate.enter(tokens=1)
    await gate.enter(tokens=1)
    with pytest.raises(Overloaded, match="would wait"):
        await gate.enter(tokens=1)
    await gate.drain(21, 10)
    await gate.enter(tokens=1000)
    with pytest.raises(Overloaded, match="would wait"):
        await gate.enter(tokens=1)


async def test_the_deadline_bounds_the_wait_and_the_delay_says_how_much_too_long_it_was(make):
    gate = make(wait_s=30.0)
    await gate.measured(per_s=10)
    for _ in range(101):
        await gate.enter()
    await gate.enter(deadline_s=11.0)
    with pytest.raises(Overloaded, match=r"and 4 s are left") as caught:
        await gate.enter(deadline_s=4.0)
    assert caught.value.retry_after_s == pytest.approx(10.2 - 4.0)


async def test_each_is_judged_by_its_own_wait(make):
    gate = make(wait_s=2.05)
    await gate.measured(per_s=10)
    for _ in range(21):
        await gate.enter(tenant="busy")
    with pytest.raises(Overloaded):
        await gate.enter(tenant="busy")
    await gate.enter(tenant="silent")
    urgent = await gate.enter(tenant="busy", priority=1)
    await gate.drain(2, 10)
    assert urgent.done()
    for _ in range(11):
        await gate.enter(tenant="silent")
    with pytest.raises(Overloaded):  # eleven of its own are as far back as twenty-two of all
        await gate.enter(tenant="silent")


async def test_who_comes_back_waits_however_long_the_queue_is(make):
    gate = make(wait_s=2.05)
    await gate.measured(per_s=10)
    for _ in range(21):
        await gate.enter()
    back = await gate.enter(returning=True, arrival=1)
    await gate.drain(1, 10)
    assert back.done()


async def test_without_workers_the_drain_says_nothing(make):
    gate = make(wait_s=2.05)
    await gate.measured(per_s=10)
    gate.pair = False
    for _ in range(100):
        await gate.enter()
    assert gate.admission.waiting == 100


async def test_a_rate_that_was_bad_does_not_lock_the_queue(make):
    """Who has nobody before it may always wait, so that there is something to measure."""
    gate = make(wait_s=2.05)
    await gate.measured(per_s=0.1)
    for _ in range(300):
        task = await gate.enter()
        await gate.drain(1, 100)
        assert task.done()
    for _ in range(20):
        await gate.enter()


@pytest.mark.parametrize(("pair", "error"), [(True, Overloaded), (False, NoWorker)])
async def test_waits_that_led_to_nothing_count_together(make, pair, error):
    gate = make(pair=pair, wait_s=30.0)
    since = gate.clock.monotonic()
    gate.clock.advance(29.99)
    task = await gate.enter(returning=True, since=since)
    with pytest.raises(error, match="waited 30 s"):
        await asyncio.wait_for(task, 5)
    gate.clock.advance(100)
    gate.room = 1
    assert await gate.enter(returning=True, since=since) == 10  # what has room needs no patience
