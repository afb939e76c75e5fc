"""Forecasts of promises, by numbers that were computed by hand."""

import math
from dataclasses import replace

import pytest

from router.admission.calibration import Calibration, _Scores
from router.admission.forecast import DecodeBatch, Margins, Plan, PrefillQueue, fits, work_of
from router.parsing.ranges import Promise
from router.placement.promise import Flight, Seat
from router.placement.snapshot import BLANK
from tests.unit.router.fakes import decode, prefill

PROMPTS = BLANK._replace(able=1.0, step_s=0.004, token_s=0.001, context_s=1e-6)
DECODING = BLANK._replace(able=1.0, step_s=0.008, token_s=0.002, context_s=1e-5, capacity=1000.0, available=100.0)


def flight(prompt: int = 100, answer: int = 11, ttft_s: float = math.inf, itl_s: float = math.inf, **facts) -> Flight:
    return Flight(prompt, answer, promise=Promise(ttft_s, itl_s), **facts)


def sent(prompt: int, **facts) -> Flight:
    """A prompt whose tokens attend to themselves only, as in a step that costs nothing for positions."""
    return replace(flight(prompt, **facts), work=(float(prompt), 0.0))


def target(name: str = "d", **facts) -> Seat:
    return Seat(decode(name).info.ref, DECODING._replace(**facts), 0.0, 16)


def source(name: str = "p", **facts) -> Seat:
    return Seat(prefill(name).info.ref, PROMPTS._replace(**facts), 0.0, 16)


class Exact(Margins):
    """Margins of forecasts that are always right."""

    def ttft_s(self, forecast_s: float) -> float:
        return forecast_s

    def longest_s(self, flight: Flight, left: int, now: float) -> float:
        return flight.longest_s(left, now)


def plan(prefills, decodes, queue: PrefillQueue, placed=(), now: float = 0.0) -> Plan:
    return Plan(prefills, decodes, lambda ref: queue, lambda ref: placed, Exact(), now)


@pytest.mark.parametrize(
    ("done", "cached", "work"),
    [
        (0, 0.0, (100.0, 100 * 50.5)),  # token i of 100 attends to i positions
        (0, 40.0, (60.0, 60 * 70.5)),  # token i of 60 attends to 40 + i
        (3, 0.0, (103.0, 103 * 52.0)),
        (0, 100.0, (1.0, 101.0)),  # the last token is computed in any case
    ],
)
def test_the_work_of_a_prompt_is_its_new_tokens_and_the_positions_that_they_attend_to(done, cached, work):
    assert work_of(flight(done=done), cached) == pytest.approx(work)


def test_a_prompt_alone_takes_a_step_for_each_chunk():
    queue = PrefillQueue(250)
    assert queue.idle_s(PROMPTS, (600.0, 1000.0)) == pytest.approx(3 * 0.004 + 0.6 + 0.001)
    assert queue.idle_s(PROMPTS, (250.0, 0.0)) == pytest.approx(0.254)
    assert queue.idle_s(PROMPTS, (0.0, 0.0)) == pytest.approx(0.004)


def test_a_prompt_has_its_first_token_behind_the_present_step_and_not_before_its_decode_worker_has_room():
    queue, running, waiting, new = PrefillQueue(100), sent(100), sent(100), sent(50)
    assert queue.first(PROMPTS, 2.0, new, 0.0) == pytest.approx(2.054)
    queue.put(running, 1.0)
    queue.put(waiting, 1.0)
    assert queue.finishes(PROMPTS, 1.5) == pytest.approx({running: 1.5, waiting: 1.604})  # the step is overdue
    assert queue.first(PROMPTS, 1.0, new, 0.0) == pytest.approx(1.0 + 0.104 + 0.104 + 0.054)
    assert queue.first(PROMPTS, 1.0, waiting, 0.0, [new]) == pytest.approx(1.208)
    assert queue.first(PROMPTS, 1.0, new, 3.0) == pytest.approx(3.054)


def test_urgent_prompts_are_computed_before_waiting_ones_but_not_before_the_present_step():
    queue, running, waiting, urgent, other = PrefillQueue(100), sent(100), sent(100), sent(50, priority=1), sent(70)
    queue.put(running, 0.0)
    queue.put(waiting, 0.0)
    found = queue.finishes(PROMPTS, 0.0, [other, urgent])
    assert [found[one] for one in (running, urgent, waiting, other)] == pytest.approx([0.104, 0.158, 0.262, 0.336])


def test_prompts_wait_in_the_order_of_their_priorities_however_they_came():
    queue, running = PrefillQueue(100), sent(100)
    first, low, high, higher = sent(100), sent(100, priority=-1), sent(100, priority=1), sent(100, priority=2)
    for one in (running, first, low, high, higher):
        queue.put(one, 0.0)
    after = sent(100, priority=1)
    found = queue.finishes(PROMPTS, 0.0, [after])
    assert sorted(found, key=found.__getitem__) == [running, higher, high, after, first, low]
    queue.remove(running, 0.104)  # the next step has the first in rank
    found = queue.finishes(PROMPTS, 0.104)
    assert sorted(found, key=found.__getitem__) == [higher, high, first, low]


def test_a_promised_gap_includes_the_handoff():
    far, margins = target()._replace(move_s=0.0001), Exact()  # 10 ms for the prompt, in 10 gaps
    step_s = DecodeBatch(far).step_s(flight())
    assert not fits(DecodeBatch(far), flight(itl_s=step_s + 0.0009), margins, 0.0)
    assert fits(DecodeBatch(far), flight(itl_s=step_s + 0.0011), margins, 0.0)
    assert fits(DecodeBatch(target()), flight(itl_s=step_s + 0.0001), margins, 0.0)


def test_a_step_of_a_batch_counts_requests_and_half_of_the_answers_to_come():
    mine = flight(100, 20, done=8)  # 12 tokens to come
    batch = DecodeBatch(target(requests=3.0, kv_tokens=508.0), [mine])  # two of others, with 508 - 108 positions
    assert batch.step_s() == pytest.approx(0.008 + 3 * 0.002 + 1e-5 * (400 + 114))
    assert batch.step_s(flight(50, 10)) == pytest.approx(0.008 + 4 * 0.002 + 1e-5 * (400 + 114 + 55))
    assert batch.running_s == batch.step_s()
    assert batch.alone_s(flight(50, 10)) == pytest.approx(0.008 + 0.002 + 1e-5 * 60)
    alone = DecodeBatch(target(requests=1.0, kv_tokens=108.0), [mine])
    assert alone.step_s() == pytest.approx(0.008 + 0.002 + 1e-5 * 114), "no positions of others"
    assert DecodeBatch(target()).running_s == 0.0
    assert DecodeBatch(target(requests=1.0)).running_s > 0.0


def test_the_room_of_a_batch_is_less_what_answers_may_still_take():
    mine = flight(100, 20, done=8)
    assert DecodeBatch(target(), [mine]).free == 1000 - 12 - 16
    batch = DecodeBatch(target(available=50.0), [mine])
    assert batch.free == 800 - 12 - 16
    before = batch.free, batch.step_s(), batch.limit_s(Exact(), 0.0)
    more = flight(50, 10, itl_s=0.5)
    batch.put(more)
    assert batch.free == before[0] - 50 - 10 - 16
    assert batch.limit_s(Exact(), 0.0) == pytest.approx(0.5)
    batch.end(more)
    assert (batch.free, batch.step_s(), batch.limit_s(Exact(), 0.0)) == pytest.approx(before)


def test_a_promise_that_would_fail_alone_limits_no_step():
    alone_s = 0.008 + 0.002 + 1e-5 * 111
    for itl_s, limit_s in ((alone_s, alone_s), (alone_s - 1e-6, math.inf)):
        assert DecodeBatch(target(), [flight(itl_s=itl_s)]).limit_s(Exact(), 0.0) == pytest.approx(limit_s)


def test_a_forecast_at_the_deadline_is_not_late():
    wish = flight(ttft_s=2.0, arrived=1.0)
    assert not Exact().late(wish, 3.0, 0.0)
    assert Exact().late(wish, 3.001, 0.0)
    assert Exact().late(flight(), math.inf, 0.0)


def test_a_plan_places_later_prompts_behind_earlier_ones():
    """Two prompts start now. The decode worker has room for the third when the first answer ends."""
    queue, decodes = PrefillQueue(100), [target(capacity=2.5 * (100 + 11 + 16))]
    made = plan([source(context_s=0.0)], decodes, queue)
    wishes = [flight(100, 11, ttft_s=9.0) for _ in range(4)]
    first, second, third, fourth = (made.put(one) for one in wishes)
    assert (first.start, first.first) == pytest.approx((0.0, 0.104))
    assert (second.start, second.first) == pytest.approx((0.0, 0.208))
    assert third.start == pytest.approx(0.104 + 11 * first.step_s)
    running_s = second.step_s  # of the present step of both, when its room is reserved
    assert third.first >= third.start + 0.104
    assert third.first <= third.start + running_s + 0.104 + 1e-9
    assert fourth.first >= max(third.first, fourth.start) + 0.104


def test_a_plan_keeps_workers_of_one_fingerprint_together():
    decodes, prefills = [target(group=1.0)], [source(group=0.0), source("q", group=1.0, step_s=0.5)]
    assert plan(prefills, decodes, PrefillQueue(100)).put(sent(100, ttft_s=9.0)).first > 0.5
    assert plan(prefills[:1], decodes, PrefillQueue(100)).put(sent(100, ttft_s=9.0)).first == math.inf
    assert plan(prefills, [], PrefillQueue(100)).put(sent(100)).start == math.inf


def test_a_prompt_that_makes_a_promised_one_late_is_not_placed():
    queue, promised = PrefillQueue(100), sent(100, ttft_s=0.25)
    queue.put(sent(100), 0.0)
    queue.put(promised, 0.0)  # at 0.208, before its deadline
    made = plan([source(context_s=0.0)], [target()], queue)
    assert made.put(flight(100, priority=1)).first == math.inf  # it would be at 0.312
    assert made.put(flight(100)).first < math.inf  # behind it
    lost = PrefillQueue(100)
    lost.put(sent(100), 0.0)
    lost.put(sent(100, ttft_s=0.2), 0.0)  # late in any case
    assert plan([source(context_s=0.0)], [target()], lost).put(flight(100, priority=1)).first < math.inf


def test_the_oldest_score_is_forgotten_first():
    scores = _Scores()
    for number in range(513):
        scores.add(1.0 + number, 0.0)
    assert (len(scores), scores.quantile(0.0001), scores.below(2.0)) == (512, 2.0, 0.5 / 512)


def test_old_outliers_of_both_latencies_are_forgotten():
    margins = Margins(Calibration(), Calibration())
    for each in (margins.ttft, margins.itl):
        each.relax(0.0)
        for _ in range(250):
            each.observe(-3, 1.0)
        each.observe(-3, 3.0)
    assert min(margins.ttft.factor(-3), margins.itl.factor(-3)) > 3.0
    margins.relax(301.0)
    assert max(margins.ttft.factor(-3), margins.itl.factor(-3)) < 1.1
