"""The worker pool: placements on pairs of workers, the load that they count for, and the demand report."""

import asyncio
from collections import Counter
from itertools import cycle
from typing import cast
from unittest.mock import AsyncMock, Mock

import pytest

from baton.control_plane import Slot
from baton.core import BlockCounts, Role, Sampling, SequenceSpec
from baton.errors import LedgerError
from baton.ledger.prefix_index import PrefixIndex
from baton.testing import FakeClock
from router import server
from router.placement.policy import POLICIES, itl_s, ttft_s
from router.workers.placement import NO_REQUIREMENTS, Requirements
from router.workers.pool import PoolOptions, TypicalRequest
from tests.support.waiting import until
from tests.unit.router import fakes
from tests.unit.router.fakes import block_names, floor_of, named, pace, pair_of, pool_of, publish, say


def workers(count, **facts):
    """Create a pool with `count` workers of each role."""
    return pool_of(*(fakes.link(role, f"{role}-{number}") for role in Role for number in range(count)), **facts)


@pytest.fixture
def pool():
    return workers(2)


def test_the_worker_that_holds_the_kv_is_taken_while_it_is_there(pool):
    kept = Requirements(named(pool, "prefill-1"))
    say(pool, "prefill-1", queued_tokens=1000)
    assert pair_of(pool.place(10)) == ("prefill-0", "decode-0")
    assert pair_of(pool.place(10, kept)) == ("prefill-1", "decode-1")
    for name in ("decode-0", "decode-1"):
        say(pool, name, full=True)
    assert pool.place(10, kept) is None, "it finds no decode worker, and no other is taken"
    say(pool, "decode-0", full=False)
    say(pool, "prefill-1", usable=False)
    assert pair_of(pool.place(10, kept))[0] == "prefill-0"


def test_what_is_held_is_given_up_when_nobody_is_there_who_could_take_it():
    """A request with unusable held KV would block the queue forever. Two models occur during an upgrade."""
    pool = pool_of(*(fakes.link(role, f"{role}-{model}", model) for role in Role for model in "ab"))
    kept = Requirements(named(pool, "prefill-a"))
    assert pair_of(pool.place(10, kept)) == ("prefill-a", "decode-a")
    say(pool, "decode-a", usable=False)
    assert pair_of(pool.place(10, kept)) == ("prefill-b", "decode-b")


def test_a_claim_counts_until_it_is_given_back_and_blocks_until_they_are_reserved(pool):
    placement = pool.place(40, Requirements(named(pool, "prefill-1")))
    prefill, decode = named(pool, "prefill-1").view, named(pool, "decode-0").view
    assert (prefill.dispatched, prefill.queued_tokens) == (1, 40)
    assert (decode.dispatched, decode.pending_blocks) == (1, 3)
    assert pool._fleet.snapshot().decode.at.kv_tokens.sum() == 48
    placement.reserved()
    assert pool._fleet.snapshot().decode.at.kv_tokens.sum() == 0
    placement.release()
    assert (prefill.dispatched, prefill.queued_tokens, decode.dispatched, decode.pending_blocks) == (0, 0, 0, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_of_one_moment_spread(policy):
    pool = workers(4, policy=policy)
    done = fakes.pace(1000, 100, 5050, 0.01, 0.001)
    for one in pool.links:
        say(pool, one.info.ref.worker_id, report={"step": 1000, "prefill_pace": done, "decode_pace": done})
    placements = [pool.place(100) for _ in range(16)]
    for role in range(2):
        assert Counter(pair_of(placement)[role] for placement in placements).most_common(1)[0][1] == 4
    for placement in placements:
        placement.release()
    left = {(one.view.dispatched, one.view.queued_tokens, one.view.pending_blocks) for one in pool.links}
    assert left == {(0, 0, 0)}


def test_the_cached_part_of_a_prompt_is_no_backlog():
    spec, prefixes = SequenceSpec(tuple(range(100)), Sampling()), PrefixIndex()
    pool = workers(2, policy="prefix", prefixes=prefixes)
    publish(prefixes, named(pool, "prefill-1"), block_names(spec.prompt, 4))
    placement = pool.place(100, Requirements(spec=spec))
    assert pair_of(placement)[0] == "prefill-1"
    assert placement.prefill.view.queued_tokens == 100 - 64
    placement.computed()
    assert placement.prefill.view.queued_tokens == 0


def test_a_prediction_is_compared_with_what_came():
    clock = FakeClock()
    options = PoolOptions(on_predicted=(off := list[float]()).append)
    pool = workers(1, policy="predicted", clock=clock, options=options)
    unknown = pool.place(100)
    assert fakes.predicted_ttft_s(unknown) is None
    unknown.computed()
    unknown.release()
    say(pool, "prefill-0", report={"step": 9, "prefill_pace": fakes.pace(1000, 100, 5050, 0.0, 0.001)})
    placement = pool.place(100)
    assert fakes.predicted_ttft_s(placement) == pytest.approx(0.1, rel=0.01)
    clock.advance(0.35)
    placement.computed()
    placement.computed()
    placement.release()
    assert off == pytest.approx([0.25], abs=0.01)
    pool.place(100).release()
    assert len(off) == 1, "no first token came"
    kept = pool.place(100, Requirements(named(pool, "prefill-0")))
    assert fakes.predicted_ttft_s(kept) is None, "its KV is there already"


def test_a_worker_that_comes_back_is_counted_from_nothing(pool):
    placement = pool.place(40)
    one = placement.decode
    one.view = type(one.view)(one.info)
    say(pool, one.info.ref.worker_id, report={"blocks": BlockCounts(100, 100)})
    placement.release()
    assert (one.view.dispatched, one.view.pending_blocks) == (0, 0)


def test_a_decode_worker_is_asked_alone_where_that_is_sooner_and_allowed():
    pool = workers(1, policy="predicted")
    paces = {"prefill_pace": fakes.pace(100, 100, 5050, 0.01, 0.001), "decode_pace": fakes.pace(100, 4, 400, 0.01)}
    for name in ("prefill-0", "decode-0"):
        say(pool, name, report={"step": 100, **paces})
    say(pool, "prefill-0", queued_tokens=1000)
    paired = pool.place(100)
    assert pair_of(paired) == ("prefill-0", "decode-0")
    paired.release()
    pool._options = PoolOptions(local_prefill=True, on_predicted=(off := list[float]()).append)
    placement = pool.place(100)
    assert (placement.prefill, placement.decode.info.ref.worker_id) == (None, "decode-0")
    assert named(pool, "decode-0").view.queued_tokens == 100
    predicted_s = fakes.predicted_ttft_s(placement)
    assert predicted_s
    pool._clock.advance(predicted_s + 0.5)
    placement.prefill_done()  # its first token is here
    assert off == pytest.approx([0.5])
    placement.release()
    pool.place(100).release()
    assert len(off) == 1, "no first token came"
    view = named(pool, "decode-0").view
    assert (view.dispatched, view.queued_tokens, view.pending_blocks) == (0, 0, 0)


def test_who_does_it_all_has_one_request_more(pool):
    """A request counts once, also before its first token. Else the worker that sent one would get the next request."""
    for name in ("prefill-0", "prefill-1"):
        say(pool, name, usable=False)
    placements = [pool.place(10) for _ in range(4)]
    assert Counter(placement.decode.info.ref.worker_id for placement in placements) == {"decode-0": 2, "decode-1": 2}
    decodes = [named(pool, name).view for name in ("decode-0", "decode-1")]
    assert [view.dispatched for view in decodes] == [2, 2]
    placements[0].prefill_done()
    assert [view.dispatched for view in decodes] == [2, 2]
    for placement in placements:
        placement.release()
    assert [view.dispatched for view in decodes] == [0, 0]


async def test_a_worker_without_a_lease_takes_nothing_new(pool):
    one = named(pool, "prefill-0")
    assert pair_of(pool.place(10))[0] == "prefill-0"
    one.usable = False  # like a retired link
    await pool._check(one.info.ref, one, 0.5)
    assert pair_of(pool.place(10))[0] == "prefill-1"
    assert pair_of(pool.place(10))[0] == "prefill-1"
    one.usable = True
    await pool._check(one.info.ref, one, 0.0)
    assert pair_of(pool.place(10))[0] == "prefill-0"


@pytest.mark.parametrize("failed", [1, 3])
async def test_a_ledger_that_comes_back_empty_ends_nothing_however_long_it_was_away(pool, failed):
    """The workers have not registered again yet."""
    clock = pool._clock
    pool._source = AsyncMock(side_effect=[*[LedgerError("away")] * failed, []])
    pool._seen = {one.info.ref: clock.monotonic() for one in pool.links}
    for _ in range(failed):
        clock.advance(0.9)
        await pool._follow()
    clock.advance(0.5)
    await pool._follow()
    assert [one.retired for one in pool.links] == [True] * 4


# --- the demand report: the predictions that also select workers, and the queue

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
    board.control.return_value = None
    telling = asyncio.create_task(server.follow_control(lambda: current(context), context.pool, board))
    await until(lambda: board.put_router.await_count >= 6)
    telling.cancel()
    await asyncio.wait([telling])
    for asked in board.put_router.await_args_list:
        report, lease_s = asked.args
        assert (report.router_id, lease_s > 2.0) == (context.sinks.router_id, True)


@pytest.mark.parametrize(
    ("workers", "found", "text"),
    [
        ((), [("decode", "starting"), ("decode", "ready"), ("prefill", "starting"), ("decode", "starting")], "w0, w3"),
        ((), [("decode", "failed"), ("decode", "draining")], ""),
        ((), None, ""),
        (pair(), [("decode", "starting")], ""),
    ],
    ids=["starting", "failed", "no controller", "one serves"],
)
async def test_decode_workers_that_start_are_known_while_none_can_serve(workers, found, text):
    slots = [Slot(f"w{n}", role, state, 0, 0, "") for n, (role, state) in enumerate(found or ())]
    board = AsyncMock()
    board.control.return_value = None if found is None else Mock(slots=slots)
    assert await server.starting(floor_of(*workers).pool, board) == text
