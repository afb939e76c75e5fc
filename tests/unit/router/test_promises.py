"""Promises of latency: calibration, forecasts, decisions, and the lane of accepted requests."""

import asyncio
import math
from dataclasses import astuple
from operator import attrgetter
from random import Random

import pytest

from baton.core import Pace, Role, Sampling, SequenceSpec
from baton.errors import InvalidRequest, PromiseRefused
from baton.testing import FakeClock
from router.admission.admission import QueueLimits, ticket_for
from router.admission.calibration import Calibration
from router.admission.forecast import DecodeBatch, Margins, PrefillQueue, fits
from router.admission.promising import Promises, PromisingAdmission
from router.parsing.ranges import Promise
from router.placement.promise import Flight, Seat
from router.placement.snapshot import BLANK
from router.workers.placement import Placement, Requirements
from router.workers.pool import PoolOptions
from tests.unit.router.fakes import decode, pace, pool_of, prefill, say, turns

PROMPTS = BLANK._replace(able=1.0, step_s=0.004, token_s=0.001)
DECODING = BLANK._replace(able=1.0, step_s=0.008, token_s=0.002, capacity=1e6, available=1e4)


def calibrated() -> Margins:
    margins = Margins()
    for each in (margins.ttft, margins.itl):
        for _ in range(250):
            each.observe(-3, 1.0)
    return margins


def flight(prompt: int = 100, answer: int = 11, ttft_s: float = math.inf, itl_s: float = math.inf, **facts) -> Flight:
    return Flight(prompt, answer, promise=Promise(ttft_s, itl_s), work=(float(prompt), 0.0), **facts)


def seat(facts, name: str = "d") -> Seat:
    return Seat(decode(name).info.ref, facts, 0.0, 16)


@pytest.mark.parametrize("drift", [0.0, 0.4])
def test_limits_of_calibrated_forecasts_are_kept_with_their_quantile(drift):
    """Also if the error grows during the run."""
    draw, calibration, missed = Random(3), Calibration(), 0
    for number in range(6000):
        score = math.exp(draw.gauss(drift * number / 6000, 0.3))
        missed += number >= 200 and score > calibration.factor(1)
        calibration.observe(1, score)
    assert missed / 5800 < 0.008
    if not drift:
        assert all(count / 6000 == pytest.approx(0.1, abs=0.02) for count in calibration.bins.values())


def test_a_factor_is_wide_while_little_is_measured_and_after_a_miss():
    calibration = Calibration()
    factors = [calibration.factor(0)]
    for _ in range(400):
        calibration.observe(0, 1.0)
        factors.append(calibration.factor(0))
    assert factors[0] == pytest.approx(3.0)
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] == 1.02
    calibration.observe(0, 2.0)
    assert calibration.factor(0) == pytest.approx(2.0 * 1.1)


def test_prompts_of_one_step_finish_together_and_those_of_other_routers_come_first():
    queue, (first, second, third) = PrefillQueue(250), (flight(), flight(), flight(200))
    for one in (first, second, third):
        queue.put(one, 1.0)
    facts = PROMPTS._replace(backlog=450.0, queued_s=0.001)  # 50 tokens more than this router sent
    found = queue.finishes(facts, 1.02)
    assert found[first] == pytest.approx(1.104)
    assert found[second] == pytest.approx(1.104 + 0.05 + 0.104)
    assert found[third] == pytest.approx(found[second] + 0.204)
    queue.remove(first, 1.2)
    assert queue.finishes(PROMPTS, 1.2)[second] == pytest.approx(1.304)


def test_a_batch_takes_no_request_that_breaks_a_promised_gap_and_spent_time_counts():
    promised = flight(itl_s=0.0125, first_at=0.0, done=1)
    margins = calibrated()

    def fit(now: float, *others: Flight) -> bool:
        return fits(DecodeBatch(seat(DECODING), [promised, *others]), flight(), margins, now)

    assert fit(0.0)  # a step of 0.008 + 2 * 0.002
    assert not fit(0.0, flight())
    promised.done = 9  # eight gaps in 60 ms: 65 ms are left for two
    assert fit(0.06, flight())
    assert not fit(0.098, flight())
    assert fit(1.0, flight())  # it is broken in any case


def test_a_promised_answer_needs_room_for_its_full_length():
    small = DecodeBatch(seat(DECODING._replace(available=10.0)), [])
    margins = calibrated()
    assert fits(small, flight(100, 44, itl_s=1.0), margins, 0.0)
    assert not fits(small, flight(100, 45, itl_s=1.0), margins, 0.0)
    assert fits(small, flight(100, 45), margins, 0.0)  # nothing is promised


def test_a_promised_answer_needs_a_row_of_each_step():
    """Requests of other routers take rows, too."""
    two, margins = seat(DECODING)._replace(rows=2.0), calibrated()
    assert fits(DecodeBatch(two, [flight()]), flight(itl_s=1.0), margins, 0.0)
    assert not fits(DecodeBatch(two, [flight(), flight()]), flight(itl_s=1.0), margins, 0.0)
    taken = DecodeBatch(two._replace(facts=DECODING._replace(requests=2.0)), [])
    assert taken.is_full
    assert not fits(taken, flight(itl_s=1.0), margins, 0.0)
    assert not DecodeBatch(two, [flight(), flight()]).is_full, "its own requests end"


async def test_a_promise_waits_for_a_row_of_its_decode_worker():
    desk = Desk(rows=1)
    first = await desk.ask(flight())
    assert isinstance(first, Placement)
    second = await desk.ask(flight(ttft_s=5.0))
    assert isinstance(second, asyncio.Task), "in the lane"
    first.release()
    await turns()
    assert isinstance(second.result(), Placement)


def teach(pool, name: str, role: Role, step_s: float, token_s: float) -> None:
    """Report steps of several sizes with these costs, so that the pool learns them."""
    total = Pace()
    for number in range(40):
        more = pace(8, 2 * (1 + number % 5), 100 * (1 + number % 7), step_s, token_s)
        total = Pace(*(ours + theirs for ours, theirs in zip(astuple(total), astuple(more), strict=True)))
        say(pool, name, report={"step": total.steps, f"{role}_pace": total})


class Desk:
    """An admission with promises on one pair of workers with known costs, and a manual clock."""

    def __init__(self, rows: float = math.inf, **limits) -> None:
        self.clock = FakeClock()
        self.pool = pool_of(prefill(), decode(free=90), policy="predicted", clock=self.clock)
        self.pool._options = PoolOptions(rows=rows)
        teach(self.pool, "p", Role.PREFILL, 0.004, 0.001)
        teach(self.pool, "d", Role.DECODE, 0.008, 0.002)
        self.promises = Promises(self.pool.outlook, self.pool.place, self.pool.seats_of, self.clock)
        self.promises.margins = calibrated()
        bounds = QueueLimits(**{"requests": 100, "tokens": 10**6, "wait_s": 10.0, **limits})
        free, serves = Placement.release, self.pool.can_serve
        capability = {"capability_of": attrgetter("capability"), "why_not": self.pool.reasons_not_to_serve}
        self.admission = PromisingAdmission(self.promises, free, serves, self.clock, bounds, **capability)
        self.pool.on_change = self.admission.changed
        self.arrivals = 0

    async def ask(self, one: Flight, wanted: Requirements | None = None, **rest):
        """Return its placement, or the task that waits for one."""
        self.arrivals += 1
        one.arrived = self.clock.monotonic()
        wanted = Requirements(flight=one) if wanted is None else wanted._replace(flight=one)
        task = asyncio.create_task(self.admission.admit(ticket_for(self.arrivals, 0), one.prompt, wanted, **rest))
        await turns()
        return task.result() if task.done() else task


async def test_a_refusal_has_the_limit_that_can_be_promised_and_the_time_after_which_the_wish_can():
    desk = Desk()
    first = await desk.ask(flight(300, ttft_s=1.0))
    with pytest.raises(PromiseRefused, match="a TTFT of 350 ms cannot be promised now") as caught:
        await desk.ask(flight(ttft_s=0.35))
    await desk.ask(flight(ttft_s=caught.value.ttft_ms / 1000 + 0.001))
    with pytest.raises(PromiseRefused) as caught:
        await desk.ask(flight(ttft_s=0.5))
    assert desk.promises.outcomes["refused"] == 2
    desk.clock.advance(caught.value.retry_after_s + 0.001)
    assert isinstance(await desk.ask(flight(ttft_s=0.5)), Placement)
    assert first.prefill is not None


async def test_a_prompt_that_has_no_room_before_others_end_is_refused_for_a_short_time():
    with pytest.raises(PromiseRefused, match="no decode worker has room for 1511 tokens now") as caught:
        await Desk().ask(flight(1500, ttft_s=5.0))
    assert caught.value.retry_after_s == 1.0


async def test_a_prompt_that_would_delay_a_promised_one_is_refused_for_a_short_time():
    desk = Desk()
    for before in (flight(100, 2), flight(50, 2, ttft_s=0.2)):
        await desk.ask(before)
    with pytest.raises(PromiseRefused, match="it would delay a promise") as caught:
        await desk.ask(flight(100, 2, ttft_s=0.6))
    assert caught.value.retry_after_s == 1.0


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        (flight(ttft_s=0.05), "idle workers do not reach it either"),
        (flight(900, ttft_s=0.12345), "a TTFT of 123.45 ms cannot be promised now, [0-9.]+ ms can"),
        (flight(itl_s=0.009), "a mean time of 9 ms between tokens cannot be promised now, 10.2 ms can"),
        (flight(100, 10_000, ttft_s=9.0), "no decode worker has room for 10100 tokens; set a smaller max_tokens"),
    ],
)
async def test_what_no_wait_makes_possible_is_refused_with_the_reason(wish, text):
    with pytest.raises(PromiseRefused, match=text) as caught:
        await Desk().ask(wish)
    assert caught.value.retry_after_s == 60.0
    assert caught.value.itl_ms == (pytest.approx(10.2, rel=0.001) if wish.promise.itl_s < 1.0 else 0.0)


async def test_rows_that_requests_of_other_routers_take_are_the_reason_of_a_refusal():
    desk = Desk(rows=2)
    say(desk.pool, "d", report={"running": 2})
    with pytest.raises(PromiseRefused, match="requests of other routers take all max_running places") as caught:
        await desk.ask(flight(itl_s=1.0))
    assert caught.value.retry_after_s == 1.0
    say(desk.pool, "d", report={"running": 1})
    assert isinstance(await desk.ask(flight(itl_s=1.0)), Placement)


async def test_nothing_is_promised_before_steps_are_measured_or_without_a_pair():
    desk = Desk()
    say(desk.pool, "p", usable=False)
    with pytest.raises(PromiseRefused, match="no prefill and decode worker"):
        await desk.ask(flight(ttft_s=9.0))
    unknown = pool_of(prefill(), decode(), policy="predicted")
    desk.promises._outlook = unknown.outlook
    with pytest.raises(PromiseRefused, match="before each worker has measured some steps"):
        await desk.ask(flight(ttft_s=9.0))


async def test_a_refusal_of_a_gap_counts_the_handoff():
    desk = Desk()
    outlook = desk.promises._outlook

    def slow(*asked):
        prefills, decodes = outlook(*asked)
        return prefills, [seat._replace(move_s=1e-4) for seat in decodes]

    desk.promises._outlook = slow
    with pytest.raises(PromiseRefused, match=r"a mean time of 10\.5 ms between tokens cannot be promised") as caught:
        await desk.ask(flight(itl_s=0.0105))
    assert caught.value.itl_ms == pytest.approx(11.2, rel=0.001)


async def test_no_promise_is_given_to_a_request_that_no_worker_can_compute():
    desk = Desk()
    with pytest.raises(InvalidRequest, match="the served model does not think"):
        await desk.ask(flight(ttft_s=9.0), Requirements(thinks=("thoughts",)))
    certain = Requirements(spec=SequenceSpec((1,), Sampling(), deterministic=True))
    with pytest.raises(InvalidRequest, match="no worker can compute such requests"):
        await desk.ask(flight(ttft_s=9.0), certain)
    assert desk.promises.outcomes["refused"] == 0
    say(desk.pool, "d", usable=False)
    with pytest.raises(PromiseRefused, match="no decode worker with the system fingerprint f that computes"):
        await desk.ask(flight(ttft_s=9.0), certain._replace(determinism="f"))
    assert (desk.promises.outcomes["refused"], desk.promises.in_force) == (1, 0)


async def test_a_promise_that_a_worker_rejected_waits_in_the_lane_again():
    desk, one = Desk(), flight(ttft_s=60.0)
    (await desk.ask(one)).release()  # as after NO_ROOM
    blocking = await desk.ask(flight(100, 60, itl_s=0.0103))
    desk.clock.advance(1.0)
    again = await desk.ask(one, returning=True, since=0.0)
    plain = await desk.ask(flight(), returning=True, accepted=True)
    assert ([each.flight for each in desk.promises.lane], desk.admission.waiting) == ([one], 1)
    blocking.release()
    (await again).release()
    (await plain).release()


async def test_queued_requests_are_those_of_the_queue_and_of_the_lane():
    desk = Desk()
    blocking = await desk.ask(flight(100, 60, itl_s=0.0103))
    tasks = [await desk.ask(flight(120, ttft_s=9.0)), await desk.ask(flight(50))]
    desk.clock.advance(2.0)
    admission = desk.admission
    assert (admission.queued, admission.queued_tokens) == (2, 170)
    assert admission.longest_s == pytest.approx(2.0)
    blocking.release()
    (await tasks[0]).release()
    (await tasks[1]).release()
    assert (admission.queued, admission.queued_tokens, admission.longest_s) == (0, 0, 0.0)


async def test_a_request_without_a_promise_waits_while_it_would_break_one_and_then_no_more_promises_are_given():
    desk = Desk()
    promised = flight(100, 200, itl_s=0.0125)
    placement = await desk.ask(promised)
    assert isinstance(await desk.ask(flight(ttft_s=9.0)), Placement)
    waiting = await desk.ask(flight())
    assert isinstance(waiting, asyncio.Task)
    desk.clock.advance(5.1)
    with pytest.raises(PromiseRefused, match=r"a request without a promise has waited 5\.1 s"):
        await desk.ask(flight(ttft_s=9.0))
    placement.release()
    assert isinstance(await waiting, Placement)


async def test_accepted_promises_wait_by_deadline_and_before_the_queue():
    desk = Desk()
    blocking = await desk.ask(flight(100, 60, itl_s=0.0103))
    late, soon = await desk.ask(flight(ttft_s=9.0)), await desk.ask(flight(ttft_s=8.0))
    plain = await desk.ask(flight())
    tasks, order = {"late": late, "soon": soon, "plain": plain}, []
    for name, task in tasks.items():
        task.add_done_callback(lambda _, name=name: order.append(name))
    blocking.release()
    await asyncio.gather(*tasks.values())
    assert order == ["soon", "late", "plain"]
    assert desk.promises.lane == []


async def test_a_tenant_with_its_share_of_promises_gets_none_while_others_wait():
    desk = Desk()
    await desk.ask(flight(100, 60, itl_s=0.0125), tenant="a")
    await desk.ask(flight(ttft_s=9.0), tenant="a")
    other = await desk.ask(flight(), tenant="b")
    assert isinstance(other, asyncio.Task)
    with pytest.raises(PromiseRefused, match="this tenant has its share"):
        await desk.ask(flight(ttft_s=9.0), tenant="a")
    other.cancel()


@pytest.mark.parametrize(
    ("facts", "end", "outcome"),
    [
        ({"first_at": 0.5, "last_at": 0.6, "done": 11}, {"complete": True}, "kept"),
        ({"first_at": 1.5, "last_at": 1.6, "done": 11}, {"complete": True}, "broken_ttft"),
        ({"first_at": 0.5, "last_at": 0.8, "done": 11}, {"complete": True}, "broken_itl"),
        ({"first_at": 1.5, "last_at": 1.8, "done": 11}, {"complete": True, "lost": True}, "broken_death"),
        (
            {"first_at": 0.5, "last_at": 0.6, "done": 4},
            {"complete": False, "failed": True, "lost": True},
            "broken_death",
        ),
        ({"first_at": 0.5, "last_at": 0.55, "done": 4}, {"complete": False}, ""),
        ({"first_at": 0.5, "last_at": 0.55, "done": 4}, {"complete": False, "failed": True}, "broken_itl"),
        ({}, {"complete": False, "failed": True}, "broken_ttft"),
        ({"arrived": -9.0}, {"complete": False}, "broken_ttft"),
    ],
)
async def test_each_promise_has_one_outcome(facts, end, outcome):
    desk = Desk()
    one = flight(ttft_s=1.0, itl_s=0.02)
    (await desk.ask(one)).release()
    one.arrived = desk.clock.monotonic() if "first_at" not in facts else 0.0
    for name, value in facts.items():
        setattr(one, name, value)
    assert desk.promises.settle(one, **end) == outcome
    assert desk.promises.settle(one, **end) == ""
    assert sum(desk.promises.outcomes.values()) == bool(outcome)
    assert desk.promises.in_force == 0
