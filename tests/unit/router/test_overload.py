"""Admission in front of a pool, in virtual time. Accepted requests stay fast under any load."""

import asyncio
import random

import pytest

from baton.errors import Overloaded
from router.admission.admission import ticket_for
from tests.simulation.clock import START, LoopClock
from tests.unit.router.gates import Gate, in_virtual_time

PREFILL_S = 0.2
SLOTS = 16
HELD_S = 1.0  # mean time of a request, so the capacity is SLOTS a second
CAPACITY = SLOTS / HELD_S
WAIT_S = 0.5


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


def simulate(*streams, for_s, wait_s=WAIT_S, **bounds):
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
    assert max(after) <= WAIT_S + PREFILL_S + 1e-6
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
