"""Claims on pairs of workers: who is taken, who is kept, and what they count as loaded with."""

from collections import Counter
from dataclasses import replace
from typing import cast

import pytest

from baton.clock import FakeClock
from baton.core import Role, Sampling, SequenceSpec
from baton.engine.prefix import Chain, scope_key
from baton.errors import LedgerError
from baton.ledger.prefix_map import NAME_BYTES, Change, Holder, PrefixMap
from baton.load import BlockCounts
from router.claim import Wish
from router.link import WorkerLink
from router.policy import POLICIES
from router.workers import WorkerPool
from tests.unit.router import fakes


def pool_of(count, policy="least_loaded", **facts):
    async def nobody():
        return []

    made = WorkerPool(nobody, POLICIES[policy], "router-a", 1.0, facts.pop("clock", FakeClock()), **facts)
    for role in Role:
        for number in range(count):
            made._add(cast("WorkerLink", fakes.link(role, f"{role}-{number}")))
    return made


@pytest.fixture
def pool():
    return pool_of(2)


def link(pool, name):
    return next(link for link in pool.links if link.info.ref.worker_id == name)


def say(pool, name, **facts):
    """Something is known of this worker's view now."""
    one = link(pool, name)
    for field, value in facts.items():
        setattr(one.view if hasattr(one.view, field) else one, field, value)
    pool._changed(one.info.ref)


def names(claim):
    return claim.prefill.info.ref.worker_id, claim.decode.info.ref.worker_id


def test_the_worker_that_holds_the_kv_is_taken_while_it_is_there(pool):
    kept = link(pool, "prefill-1")
    say(pool, "prefill-1", queued_tokens=1000)
    assert names(pool.claim(10)) == ("prefill-0", "decode-0")
    assert names(pool.claim(10, Wish(kept))) == ("prefill-1", "decode-1")
    say(pool, "prefill-1", usable=False)
    assert names(pool.claim(10, Wish(kept)))[0] == "prefill-0"


def test_nobody_else_is_taken_when_it_finds_no_decode_worker(pool):
    for name in ("decode-0", "decode-1"):
        say(pool, name, full=True)
    assert pool.claim(10, Wish(link(pool, "prefill-1"))) is None


def test_what_is_held_is_given_up_when_nobody_is_there_who_could_take_it():
    """Else the request would wait for ever, and all others behind it: two models, as in the middle of an upgrade."""
    pool = pool_of(0)
    for role in Role:
        for model in "ab":
            pool._add(fakes.link(role, f"{role}-{model}", model))
    kept = Wish(link(pool, "prefill-a"))
    assert names(pool.claim(10, kept)) == ("prefill-a", "decode-a")
    say(pool, "decode-a", usable=False)
    assert names(pool.claim(10, kept)) == ("prefill-b", "decode-b")


def test_a_claim_counts_until_it_is_given_back(pool):
    claim = pool.claim(40, Wish(link(pool, "prefill-1")))
    prefill, decode = link(pool, "prefill-1").view, link(pool, "decode-0").view
    assert (prefill.dispatched, prefill.queued_tokens) == (1, 40)
    assert (decode.dispatched, decode.pending_blocks) == (1, 3)
    claim.release()
    assert (prefill.dispatched, prefill.queued_tokens, decode.dispatched, decode.pending_blocks) == (0, 0, 0, 0)


def test_load_counts_from_the_choice_on(pool):
    pairs = Counter(names(pool.claim(100)) for _ in range(10))
    assert set(pairs.values()) == {5}, pairs


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_of_one_moment_spread(policy):
    pool = pool_of(4, policy)
    done = fakes.pace(1000, 100, 5050, 0.01, 0.001)
    for one in pool.links:
        load = replace(one.view.load, step=1000, prefill_pace=done, decode_pace=done)
        say(pool, one.info.ref.worker_id, load=load)
    claims = [pool.claim(100) for _ in range(16)]
    for role in range(2):
        assert Counter(names(claim)[role] for claim in claims).most_common(1)[0][1] == 4
    for claim in claims:
        claim.release()
    assert all((one.view.dispatched, one.view.queued_tokens) == (0, 0) for one in pool.links)


def test_the_cached_part_of_a_prompt_is_no_backlog():
    spec, prefixes = SequenceSpec(tuple(range(100)), Sampling()), PrefixMap()
    pool = pool_of(2, "prefix", prefixes=prefixes)
    ref = link(pool, "prefill-1").info.ref
    chain = Chain(scope_key("a", ""), spec.prompt, 16)
    prefixes.apply(
        Change(Holder(ref.worker_id, ref.incarnation), 1, True, [chain.digest(n)[:NAME_BYTES] for n in range(4)])
    )
    claim = pool.claim(100, Wish(spec=spec))
    assert names(claim)[0] == "prefill-1"
    assert claim.prefill.view.queued_tokens == 100 - 64
    claim.computed()
    assert claim.prefill.view.queued_tokens == 0


def test_a_prediction_is_compared_with_what_came():
    clock = FakeClock()
    pool = pool_of(1, "predicted", clock=clock)
    off: list[float] = []
    pool.on_predicted = off.append
    unknown = pool.claim(100)
    assert unknown.predicted_ttft_s is None
    unknown.computed()
    unknown.release()
    load = replace(link(pool, "prefill-0").view.load, step=9, prefill_pace=fakes.pace(1000, 100, 5050, 0.0, 0.001))
    say(pool, "prefill-0", load=load)
    claim = pool.claim(100)
    assert claim.predicted_ttft_s == pytest.approx(0.1, rel=0.01)
    clock.advance(0.35)
    claim.computed()
    claim.computed()
    claim.release()
    assert off == pytest.approx([0.25], abs=0.01)
    pool.claim(100).release()
    assert len(off) == 1, "no first token came"
    assert pool.claim(100, Wish(link(pool, "prefill-0"))).predicted_ttft_s is None, "its KV is there already"


def test_a_worker_that_comes_back_is_counted_from_nothing(pool):
    claim = pool.claim(40)
    one = claim.decode
    one.view = type(one.view)(one.info)
    say(pool, one.info.ref.worker_id, load=replace(one.view.load, blocks=BlockCounts(100, 100)))
    claim.release()
    assert (one.view.dispatched, one.view.pending_blocks) == (0, 0)


def test_a_decode_worker_is_asked_alone_where_that_is_sooner_and_allowed():
    pool = pool_of(1, "predicted")
    steps = fakes.pace(100, 100, 5050, 0.01, 0.001)
    for name in ("prefill-0", "decode-0"):
        say(
            pool,
            name,
            load=replace(
                link(pool, name).view.load, step=100, prefill_pace=steps, decode_pace=fakes.pace(100, 4, 400, 0.01)
            ),
        )
    say(pool, "prefill-0", queued_tokens=1000)
    paired = pool.claim(100)
    assert names(paired) == ("prefill-0", "decode-0")
    paired.release()
    pool.local_prefill = True
    off: list[float] = []
    pool.on_predicted = off.append
    claim = pool.claim(100)
    assert (claim.prefill, claim.decode.info.ref.worker_id) == (None, "decode-0")
    assert link(pool, "decode-0").view.queued_tokens == 100
    pool._clock.advance(claim.predicted_ttft_s + 0.5)
    claim.prefill_done()  # its first token is here
    assert off == pytest.approx([0.5])
    claim.release()
    pool.claim(100).release()
    assert len(off) == 1, "no first token came"
    view = link(pool, "decode-0").view
    assert (view.dispatched, view.queued_tokens, view.pending_blocks) == (0, 0, 0)


def test_who_does_it_all_has_one_request_more():
    """Not two until the first token: the next one would go to who has just said it, and not in turn."""
    pool = pool_of(2)
    for name in ("prefill-0", "prefill-1"):
        say(pool, name, usable=False)
    claims = [pool.claim(10) for _ in range(4)]
    assert Counter(claim.decode.info.ref.worker_id for claim in claims) == {"decode-0": 2, "decode-1": 2}
    assert [link(pool, name).view.dispatched for name in ("decode-0", "decode-1")] == [2, 2]
    claims[0].prefill_done()
    assert [link(pool, name).view.dispatched for name in ("decode-0", "decode-1")] == [2, 2]
    for claim in claims:
        claim.release()
    assert [link(pool, name).view.dispatched for name in ("decode-0", "decode-1")] == [0, 0]


def test_what_was_reserved_is_pending_no_more(pool):
    claim = pool.claim(40)
    assert pool._fleet.snapshot().decode.at.kv_tokens.sum() == 48
    claim.reserved()
    assert pool._fleet.snapshot().decode.at.kv_tokens.sum() == 0


async def test_a_worker_without_a_lease_takes_nothing_new(pool):
    one = link(pool, "prefill-0")
    assert names(pool.claim(10))[0] == "prefill-0"
    one.usable = False  # as a link's is that is retired
    await pool._check(one.info.ref, one, 0.5)
    assert names(pool.claim(10))[0] == "prefill-1"
    assert names(pool.claim(10))[0] == "prefill-1"
    one.usable = True
    await pool._check(one.info.ref, one, 0.0)
    assert names(pool.claim(10))[0] == "prefill-0"


@pytest.mark.parametrize("failed", [1, 3])
async def test_a_ledger_that_comes_back_empty_ends_nothing_however_long_it_was_away(pool, failed):
    """The workers had no time yet to register again."""
    away = [LedgerError("away")] * failed

    async def source():
        if away:
            raise away.pop()
        return []

    pool._source, clock = source, pool._clock
    pool._seen = {one.info.ref: clock.monotonic() for one in pool.links}
    for _ in range(failed):
        clock.advance(0.9)
        await pool._follow()
    clock.advance(0.5)
    await pool._follow()
    assert [one.retired for one in pool.links] == [True] * 4
