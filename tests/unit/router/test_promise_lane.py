"""Accepted promises of latency: their lane, their workers, and what may not delay them."""

import asyncio
import math

import pytest

from baton.core import Role
from baton.errors import PromiseRefused
from baton.rpc.v1 import worker_pb2 as pb
from baton.testing import FakeClock
from router.admission.admission import QueueLimits, ticket_for
from router.admission.calibration import Calibration
from router.admission.forecast import Plan
from router.admission.promising import Promises, PromisingAdmission
from router.placement.promise import Seat
from router.request.traces import Track
from router.workers.placement import Placement, Requirements
from router.workers.stream import EventMailbox
from tests.unit.router.fakes import prefill, turns, virtual
from tests.unit.router.test_promises import DECODING, PROMPTS, Desk, calibrated, flight, seat

SOURCES = [Seat(prefill(name).info.ref, PROMPTS, 0.0, 16) for name in "pq"]


class Hall:
    """Promises on given seats, whose pool takes any decode worker with room for the prompt."""

    def __init__(self, prefills, decodes, **limits) -> None:
        self.clock, self.seats, self.arrivals = FakeClock(), (prefills, decodes), 0
        self.now = self.clock.monotonic()
        self.promises = Promises(lambda *_: self.seats, self.place, lambda _: (None, prefills[0]), self.clock)
        self.promises.margins = calibrated()
        self.promises._register = lambda *_: None  # type: ignore[method-assign]  # placements here have no workers
        bounds = QueueLimits(**{"requests": 100, "tokens": 10**6, "wait_s": 10.0, **limits})
        self.admission = PromisingAdmission(self.promises, lambda _: None, lambda *_: True, self.clock, bounds)

    def place(self, tokens, requirements, avoid, itl_s):
        one = requirements.flight
        usable = [seat for seat in self.seats[1] if seat.ref not in avoid]
        return next((s.ref for s in usable if one.prompt + one.answer <= s.facts.available * 16), None)

    def run(self, seat: Seat, one) -> None:
        self.promises._placed[seat.ref][one] = None
        self.promises._in_force[one] = None

    async def ask(self, one, **rest):
        self.arrivals += 1
        one.arrived = self.now
        wanted = Requirements(flight=one)
        task = asyncio.create_task(self.admission.admit(ticket_for(self.arrivals, 0), one.prompt, wanted, **rest))
        await turns()
        return task.result() if task.done() else task


def crowded(**limits) -> tuple[Hall, Seat]:
    """A large decode worker, whose answer ends in about six seconds, and a small free one."""
    large = seat(DECODING._replace(available=300.0), "d1")
    small = seat(DECODING._replace(capacity=2000.0, available=125.0), "d2")
    hall = Hall(SOURCES, [large, small], **limits)
    hall.run(large, flight(100, 2600, itl_s=10.0, first_at=hall.now, done=2000))
    return hall, large


@virtual
async def test_an_accepted_promise_waits_for_its_ttft_and_then_in_the_queue_without_a_limit():
    desk = Desk(wait_s=0.3)
    blocking = await desk.ask(flight(100, 60, itl_s=0.0103))
    task = await desk.ask(flight(ttft_s=9.0))
    await asyncio.sleep(8.0)
    assert len(desk.promises.lane) == 1
    await asyncio.sleep(3.0)
    assert (desk.promises.lane, desk.admission.waiting) == ([], 1)
    blocking.release()
    assert isinstance(await task, Placement)


async def test_a_promise_that_waits_for_one_worker_does_not_block_later_ones_on_others():
    hall, _ = crowded()
    first = await hall.ask(flight(100, 4100, ttft_s=6.5))
    assert isinstance(first, asyncio.Task)
    assert not isinstance(await hall.ask(flight(1500, 10, ttft_s=7.0)), asyncio.Task)
    first.cancel()


async def test_promises_that_no_connected_worker_can_compute_any_more_do_not_block_the_lane():
    hall = Hall(SOURCES, [seat(DECODING)])
    place, hall.promises._place = hall.promises._place, lambda *_: None
    tasks = [await hall.ask(flight(ttft_s=5.0)) for _ in range(4)]
    lost = {one.flight for one in hall.promises.lane}
    hall.promises._place = lambda tokens, wanted, *rest: None if wanted.flight in lost else place(tokens, wanted, *rest)
    blocked = await hall.ask(flight(ttft_s=8.0))
    assert isinstance(blocked, asyncio.Task)
    hall.admission._capability_of = lambda wanted: wanted.flight in lost or None
    hall.admission._can_serve = lambda *_: False
    hall.admission.changed()
    await turns()
    assert blocked.done()
    for task in tasks:
        task.cancel()


async def test_a_plan_counts_the_cached_tokens_of_each_prompt_for_that_prompt_only():
    hall = Hall([SOURCES[0]], [seat(DECODING)])
    long, newest = flight(10_000, ttft_s=11.0), flight(10_000, ttft_s=0.5)
    newest.cached = {SOURCES[0].ref: 9900.0}
    plan = Plan([SOURCES[0]], hall.seats[1], hall.promises._queue, hall.promises._on, calibrated(), 0.0)
    assert plan.put(newest).first == pytest.approx(0.104)
    assert plan.put(long).first > 10.0


async def test_a_promise_gets_a_prefill_worker_that_keeps_its_own_ttft():
    slow = SOURCES[0]._replace(facts=PROMPTS._replace(backlog=5000.0, queued_s=0.001))
    hall = Hall([slow, SOURCES[1]], [seat(DECODING)])
    one = flight(ttft_s=1.0, arrived=hall.now)
    assert hall.promises._avoided(one, *hall.seats, hall.now) == frozenset({slow.ref})
    one.overdue = True
    assert hall.promises._avoided(one, *hall.seats, hall.now) == frozenset()


@pytest.mark.parametrize(("prompt", "waits"), [(20_000, True), (200, False)])
async def test_no_prompt_overtakes_a_waiting_promise_that_it_would_delay_on_its_prefill_worker(prompt, waits):
    free = seat(DECODING._replace(capacity=30_000.0, available=1900.0), "d2")
    hall = Hall([SOURCES[0]], [free])
    hall.run(free, flight(100, 200, first_at=hall.now, done=150))
    first = await hall.ask(flight(200, 50, ttft_s=3.0, itl_s=0.011))
    assert isinstance(first, asyncio.Task)
    placed = await hall.ask(flight(prompt, 10))
    assert isinstance(placed, asyncio.Task) is waits
    first.cancel()


async def test_a_cancelled_promise_frees_its_place_in_the_lane_immediately():
    free = seat(DECODING._replace(capacity=30_000.0, available=1900.0), "d2")
    hall = Hall([SOURCES[0]], [free])
    hall.run(free, flight(100, 200, first_at=hall.now, done=150))
    first = await hall.ask(flight(200, 50, ttft_s=3.0, itl_s=0.011))
    placed = await hall.ask(flight(20_000, 10))
    first.cancel()
    hall.promises._in_force.clear()  # as the end of its request does
    await turns()
    assert placed.done()


async def test_the_lane_has_the_limits_of_the_queue():
    hall, _ = crowded(requests=2, tokens=300)
    tasks = [await hall.ask(flight(100, 4100, ttft_s=3600.0))]
    with pytest.raises(PromiseRefused, match="1 requests with a promise wait already"):
        await hall.ask(flight(250, 4100, ttft_s=3600.0))
    tasks.append(await hall.ask(flight(100, 4100, ttft_s=3600.0)))
    with pytest.raises(PromiseRefused, match="2 requests with a promise wait already"):
        await hall.ask(flight(1, 4100, ttft_s=3600.0))
    for task in tasks:
        task.cancel()


async def test_a_tenant_without_capacity_for_its_promise_limits_others_to_their_share_for_a_while():
    desk = Desk()
    for _ in range(3):
        await desk.ask(flight(300, ttft_s=9.0), tenant="a")
    with pytest.raises(PromiseRefused, match="a TTFT of 350 ms cannot be promised now"):
        await desk.ask(flight(ttft_s=0.35), tenant="b")
    with pytest.raises(PromiseRefused, match="this tenant has its share"):
        await desk.ask(flight(ttft_s=9.0), tenant="a")
    await desk.ask(flight(ttft_s=9.0), tenant="b")
    desk.clock.advance(10.1)
    await desk.ask(flight(ttft_s=9.0), tenant="a")


async def test_measured_latencies_calibrate_the_forecasts_and_a_first_token_ends_the_work_of_a_prefill_worker():
    desk = Desk()
    margins, one = desk.promises.margins, flight(ttft_s=9.0, itl_s=0.5)
    before = margins.ttft.measured, margins.itl.measured
    placement = await desk.ask(one)
    [queue] = desk.promises._queues.values()
    assert one.ttft_s == pytest.approx(0.104, rel=0.01)
    assert queue.tokens == 100
    desk.clock.advance(1.5 * one.ttft_s)
    one.seen(1, desk.clock.monotonic())
    placement.on_first()
    assert (margins.ttft.measured, queue.tokens) == (before[0] + 1, 0)
    assert margins.ttft.factor(math.frexp(one.ttft_s)[1]) > 1.5
    one.seen(11, desk.clock.monotonic() + 0.1)
    desk.promises.settle(one, complete=True)
    assert margins.itl.measured == before[1] + 1


async def test_a_promise_has_the_cached_tokens_of_its_prompt_by_worker():
    cached = SOURCES[0]._replace(cached=64.0)
    hall, one = Hall([cached, SOURCES[1]], [seat(DECODING)]), flight(100, 11, ttft_s=9.0)
    await hall.ask(one)
    assert one.cached == {cached.ref: 64.0}


async def test_ended_requests_leave_no_trace_of_their_workers():
    desk = Desk()
    placement = await desk.ask(flight(ttft_s=9.0))
    assert desk.promises._queues
    assert desk.promises._placed
    placement.release()
    assert (desk.promises._queues, desk.promises._placed) == ({}, {})


@pytest.mark.parametrize("few", [False, True])
def test_one_outlier_counts_for_minutes_only_and_for_no_more_than_a_factor_of_four(few):
    calibration = Calibration()
    calibration.relax(100.0)
    for _ in range(3 if few else 250):
        calibration.observe(0, 1.0)
    before = calibration.factor(0)
    calibration.observe(0, 60.0)
    assert calibration.factor(0) >= 4.0
    if not few:
        assert calibration.factor(0) == pytest.approx(4.0 * 1.1)
    calibration.relax(399.0)
    assert calibration.factor(0) >= 4.0
    calibration.relax(401.0)
    assert calibration.factor(0) == pytest.approx(before)


@virtual
async def test_a_client_that_reads_slowly_delays_no_time_of_its_tokens():
    clock, mailbox = FakeClock(), EventMailbox(9)
    track = Track("router", 0, clock)
    assert track.received_at == math.inf
    mailbox.put(Role.DECODE, pb.WorkerEvent())
    await asyncio.sleep(5.0)
    clock.advance(5.0)
    await mailbox.drain()
    track.received(mailbox.lag_s)
    assert track.received_at == pytest.approx(clock.monotonic() - 5.0)
