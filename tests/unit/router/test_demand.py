"""The router's demand report: the predictions that also select workers, and the queue."""

import asyncio
from itertools import cycle
from typing import cast
from unittest.mock import AsyncMock

import pytest

from baton.core import BlockCounts, Role
from baton.errors import LedgerError
from baton.testing import FakeClock
from router import server
from router.placement.policy import itl_s, ttft_s
from router.workers.placement import NO_REQUIREMENTS
from router.workers.pool import TypicalRequest
from tests.support.waiting import until
from tests.unit.router import fakes
from tests.unit.router.fakes import floor_of, pace, say

PROMPTS = pace(20, 400, 80_200, step_s=0.01, token_s=0.001)
STEPS = pace(100, 4, 2000, step_s=0.02, token_s=0.002)


def current(context):
    return server.current_demand(context, "")


def pair(**facts):
    return fakes.prefill("p", pace=PROMPTS, **facts), fakes.decode("d", pace=STEPS)


def test_what_is_predicted_is_what_workers_are_chosen_by():
    context = floor_of(*pair(queued_tokens=700), fakes.prefill("q", pace=PROMPTS, queued_tokens=200))
    placement = context.pool.place(100)
    assert placement is not None
    report = current(context)
    snapshot = context.pool._fleet.snapshot()
    ask = context.pool._fleet.ask(100, 0, None, None)
    assert report.prompt_tokens == 100
    assert report.ttft_s == pytest.approx(ttft_s(snapshot, ask).min())
    assert report.itl_s == pytest.approx(itl_s(snapshot, ask).min())
    assert 0 < report.ttft_alone_s < report.ttft_s  # 300 tokens wait on q, and a step runs
    placement.release()
    for name in "pq":
        say(context.pool, name, queued_tokens=0)
    report = current(context)
    assert report.ttft_s == pytest.approx(report.ttft_alone_s)
    assert report.itl_s == pytest.approx(report.itl_alone_s)


def test_nothing_is_predicted_of_workers_that_are_unknown_or_take_nothing_new():
    report = current(floor_of(fakes.prefill(), fakes.decode()))
    assert (report.ttft_s, report.ttft_alone_s, report.itl_s, report.itl_alone_s) == (0, 0, 0, 0)
    assert current(floor_of()).workers == {}
    left, right = pair()
    left.usable = False
    report = current(floor_of(left, right))
    assert (list(report.workers), report.ttft_s) == (["d"], 0)


def test_a_typical_prompt_is_a_mean_of_the_last_and_what_was_cached_costs_nothing():
    typical = TypicalRequest()
    for _ in range(200):
        typical.add(1000, 0)
    for _ in range(200):
        typical.add(300, 260)
    assert [typical.tokens, typical.cached] == pytest.approx([300, 260], abs=1)
    context = floor_of(*pair())
    context.pool._typical = typical
    cached = current(context).ttft_alone_s
    typical.cached = 0.0
    assert current(context).ttft_alone_s > 3 * cached


def test_each_worker_says_what_it_has():
    context = floor_of(*pair(reported=700))
    say(context.pool, "p", report={"waiting": 3})
    blocks = BlockCounts(100, free=30, owned=50, reserved=10, cached=10)
    say(context.pool, "d", report={"running": 5, "waiting": 2, "blocks": blocks})
    report = current(context)
    prefill, decode = report.workers["p"], report.workers["d"]
    assert (prefill.role, prefill.waiting, prefill.queued_tokens, prefill.step_s) == (Role.PREFILL, 3, 700, 0)
    assert prefill.busy_s == pytest.approx(PROMPTS.seconds)
    assert report.ttft_s - report.ttft_alone_s == pytest.approx(700 * 0.001, rel=0.2)
    assert (decode.role, decode.running, decode.waiting, decode.used, decode.reserved) == (Role.DECODE, 5, 2, 0.6, 0.1)
    assert decode.step_s > 0.02


def test_full_decode_workers_have_a_next_token_too():
    context = floor_of(*pair(), fakes.decode("e", pace=pace(100, 4, 2000, step_s=0.2)))
    both = current(context).itl_s
    say(context.pool, "d", full=True)
    assert current(context).itl_s > 4 * both  # a new request gets e
    say(context.pool, "e", full=True)
    assert current(context).itl_s == pytest.approx(both)


async def queued(context, count):
    say(context.pool, "d", full=True)
    waiting = [asyncio.create_task(context.admission.admit((n, n), 50, NO_REQUIREMENTS)) for n in range(count)]
    await asyncio.sleep(0)
    return waiting


async def test_the_queue_is_in_the_first_token():
    context = floor_of(*pair())
    waiting = await queued(context, 3)
    cast("FakeClock", context.sinks.clock).advance(4.0)
    report = current(context)
    assert (report.queued, report.queued_tokens, report.oldest_s, report.queue_s) == (3, 150, 4.0, 4.0)
    assert report.ttft_s == pytest.approx(4.0 + report.ttft_alone_s)
    say(context.pool, "d", full=False)
    placements = [await task for task in waiting]
    report = current(context)
    assert (report.queued, report.oldest_s, report.queue_s) == (0, 0, 0)
    for placement in placements:
        placement.release()


async def test_a_wait_is_predicted_by_how_fast_the_queue_drains():
    context = floor_of(*pair())
    waiting = await queued(context, 30)
    for _ in range(10):  # two a second
        cast("FakeClock", context.sinks.clock).advance(0.5)
        context.admission.drain.served(50)
    assert current(context).queue_s == pytest.approx(15.0, rel=0.01)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def test_requests_are_counted_from_the_beginning():
    context = floor_of()
    context.sinks.outcomes.update(finished=5, refused=2, failed=1, accepted=6)
    report = current(context)
    assert (report.arrived, report.refused, report.running) == (8, 2, 0)


async def test_a_board_that_is_away_is_told_when_it_is_back(monkeypatch):
    monkeypatch.setattr(server, "_DEMAND_S", 0.0)
    board, context = AsyncMock(), floor_of()
    board.put_router.side_effect = cycle([LedgerError("away"), None])
    telling = asyncio.create_task(server.publish_demand(lambda: current(context), board))
    await until(lambda: board.put_router.await_count >= 6)
    telling.cancel()
    await asyncio.wait([telling])
    for asked in board.put_router.await_args_list:
        report, lease_s = asked.args
        assert (report.router_id, lease_s > 2.0) == (context.sinks.router_id, True)
