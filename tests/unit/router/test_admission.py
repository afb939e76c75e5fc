"""Admission: its order, returned and accepted requests, and its effect under overload."""

import asyncio
import random
from collections.abc import Callable
from contextlib import asynccontextmanager

import pytest

from baton.errors import DeadlineExceeded, NoWorker, Overloaded
from router.admission.admission import OVERTAKES, Ticket, ticket_for
from tests.simulation.clock import START, LoopClock
from tests.unit.router.fakes import Gate, in_virtual_time, virtual


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
async def test_it_waits_for_a_worker_that_starts_until_its_deadline_and_newcomers_do_not():
    async with accepting() as gate:
        gate.pair, gate.starting = False, "decode-0"
        new = await gate.enter(arrival=3)
        back = await gate.enter(arrival=1, accepted=True, deadline_s=1000.0)
        late = await gate.enter(arrival=2, accepted=True, deadline_s=5 * WAIT_S)
        with pytest.raises(NoWorker, match="prefill workers do not decode; decode-0 is starting"):
            await new
        with pytest.raises(DeadlineExceeded, match="the request waited for decode-0 to start"):
            await late
        assert not back.done()
        gate.starting = ""  # it failed
        with pytest.raises(NoWorker, match="waited 8 s: no decode worker is connected"):
            await back


@virtual
async def test_a_worker_that_starts_again_and_again_is_not_waited_for_without_end():
    async with accepting() as gate:
        gate.pair, gate.starting = False, "decode-0"
        with pytest.raises(NoWorker):
            await (await gate.enter(accepted=True, deadline_s=3600.0))
        assert 600.0 < gate.clock.monotonic() - START < 600.0 + 2 * WAIT_S


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


# --- admission in front of a pool, in virtual time: accepted requests stay fast under any load

PREFILL_S = 0.2
SLOTS = 16
HELD_S = 1.0  # mean time of a request, so the capacity is SLOTS a second
CAPACITY = SLOTS / HELD_S
LONGEST_WAIT_S = 0.5


class Pool(Gate):
    """Slots that each request holds for some time. Records all results."""

    def __init__(self, wait_s, **bounds):
        super().__init__(SLOTS, clock=LoopClock(), tokens=10**6, wait_s=wait_s, **bounds)
        self.wait_s, self.rng = wait_s, random.Random(1)
        self.ttft: dict[str, list[float]] = {}
        self.refused: dict[str, list[float]] = {}
        self.ended_s = 0.0

    async def request(self, retries=False, **kwargs):
        after_s = await self.attempt(**kwargs)
        if after_s and retries:
            await asyncio.sleep(after_s * self.rng.uniform(1.0, 1.2))
            await self.request(retries=True, **kwargs)

    async def attempt(self, tenant=""):
        """Make one request. Return the retry delay if it was rejected."""
        self.arrivals += 1
        began, tokens = asyncio.get_running_loop().time(), self.rng.randint(50, 500)
        ticket = ticket_for(self.arrivals, 0)
        try:
            placement = await self.admission.admit(ticket, tokens, tenant=tenant)
        except Overloaded as error:
            assert asyncio.get_running_loop().time() - began <= self.wait_s + 1e-6
            self.refused.setdefault(tenant, []).append(error.retry_after_s)
            return error.retry_after_s
        self.ttft.setdefault(tenant, []).append(asyncio.get_running_loop().time() - began + PREFILL_S)
        await asyncio.sleep(HELD_S * self.rng.uniform(0.5, 1.5))
        self.give_back(placement)
        return None

    async def arrive(self, per_s, for_s, **kwargs):
        """Open loop: arrivals do not wait for answers."""
        tasks, loop = [], asyncio.get_running_loop()
        until = loop.time() + for_s
        while loop.time() < until:
            await asyncio.sleep(self.rng.expovariate(per_s))
            tasks.append(asyncio.create_task(self.request(**kwargs)))
        await asyncio.gather(*tasks)


def simulate(*streams, for_s, wait_s=LONGEST_WAIT_S, **bounds):
    """Simulate streams of requests: (multiple of the capacity, keyword arguments)."""

    async def run():
        pool = Pool(wait_s, **bounds)
        await asyncio.gather(*(pool.arrive(load * CAPACITY, for_s, **kwargs) for load, kwargs in streams))
        pool.ended_s = LoopClock().monotonic() - START
        assert (pool.room, pool.admission.waiting, pool.admission.waiting_tokens) == (SLOTS, 0, 0)
        return pool

    return in_virtual_time(run())


def at(values, share):
    return sorted(values)[int(len(values) * share)]


@pytest.fixture(scope="module")
def normal():
    return simulate((1.0, {}), for_s=300.0)


@pytest.mark.parametrize("load", [5.0, 15.0])
def test_accepted_requests_stay_fast_and_the_capacity_is_used(normal, load):
    pool = simulate((load, {}), for_s=300 / load)
    before, after = normal.ttft[""], pool.ttft[""]
    for share in (0.5, 0.9, 0.99):
        assert at(after, share) <= 2 * at(before, share)
    assert max(after) <= LONGEST_WAIT_S + PREFILL_S + 1e-6
    assert len(after) >= 0.95 * 300 / load * CAPACITY
    assert len(pool.refused[""]) == pytest.approx((1 - 1 / load) * pool.arrivals, rel=0.05)
    assert min(pool.refused[""]) > 0


@pytest.mark.slow
def test_a_tenant_at_twenty_times_its_share_does_not_slow_another():
    calm = simulate((0.7, {"tenant": "busy"}), (0.2, {"tenant": "small"}), for_s=150.0)
    storm = simulate((20.0, {"tenant": "busy"}), (0.2, {"tenant": "small"}), for_s=30.0, requests=64)
    small = storm.ttft["small"]
    assert len(storm.refused.get("small", [])) <= 0.08 * len(small)
    assert at(small, 0.99) <= 1.25 * at(calm.ttft["small"], 0.99)
    assert len(small) + len(storm.ttft["busy"]) >= 0.95 * 30 * CAPACITY


def test_refused_clients_that_obey_the_delay_get_all_that_the_pool_can_do():
    """Three times the capacity for ten seconds is thirty seconds' work. It takes little longer than that."""
    pool = simulate((3.0, {"retries": True}), for_s=10.0, wait_s=2.0)
    assert pool.refused[""]
    assert all(0.5 <= after <= 2.0 for after in pool.refused[""])
    work_s = len(pool.ttft[""]) / CAPACITY
    assert pool.ended_s <= 1.1 * work_s + 3 * HELD_S
