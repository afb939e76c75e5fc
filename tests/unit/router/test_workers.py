"""Placements on pairs of workers: the choice, the worker with held KV, and the load that they count for."""

from collections import Counter
from unittest.mock import AsyncMock

import pytest

from baton.core import BlockCounts, Role, Sampling, SequenceSpec
from baton.errors import LedgerError
from baton.ledger.prefix_index import PrefixIndex
from baton.testing import FakeClock
from router.placement.policy import POLICIES
from router.workers.placement import Requirements
from router.workers.pool import PoolOptions
from tests.unit.router import fakes
from tests.unit.router.fakes import block_names, named, pair_of, pool_of, publish, say


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
