"""Policies return only pairs that fit, the best of all pairs, and spread the load."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import Role
from router.placement.policy import POLICIES, least_loaded, local_prefill_if_faster, predicted, prefix, round_robin
from router.placement.snapshot import Ask, Facts, Snapshot, has_pair, misfit
from tests.unit.router.fakes import LAYOUT, decode, fleet_of, holder, link, pace, prefill


def asked(links, tokens, turn=0, cached=None, slo_itl_s=np.inf, keep=None):
    """Return a fleet, its snapshot, and a request. `cached`: tokens by worker id."""
    fleet = fleet_of(*links, slo_itl_s=slo_itl_s)
    snapshot = fleet.snapshot()
    ask = fleet.ask(tokens, turn, keep and keep.info.ref, None)
    for one in links:
        column = ask.prefill_cached if one.info.role is Role.PREFILL else ask.decode_cached
        column[fleet._members[holder(one)].row] = (cached or {}).get(one.info.ref.worker_id, 0)
    return fleet, snapshot, ask


def choose(policy, links, tokens=10, **facts):
    """Return the ids of the pair."""
    fleet, snapshot, ask = asked(links, tokens, **facts)
    pair = policy(snapshot, ask)
    if pair is None:
        return None
    return tuple(fleet.ref(role, row).worker_id for role, row in zip(Role, pair[:2], strict=True))


names = st.sampled_from(["a", "b"])
rows = st.tuples(
    st.integers(0, 9), names, st.integers(0, 100), st.integers(0, 5), st.integers(0, 5), st.integers(0, 50),
    st.booleans(), st.booleans(),
)  # fmt: skip


def build(role, drawn):
    return [
        link(role, f"{role}-{number}-{i}", fp, free, running, dispatched=dispatched, pending_blocks=pending, full=full)
        for number, (i, fp, free, running, dispatched, pending, full, _) in enumerate(drawn)
    ]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@given(st.lists(rows, max_size=5), st.lists(rows, max_size=5), st.integers(1, 2000), st.integers(0, 99))
def test_a_pair_fits_and_is_found_whenever_there_is_one(policy, left, right, tokens, turn):
    sides = build(Role.PREFILL, left), build(Role.DECODE, right)
    for one, drawn in zip(sides[0] + sides[1], left + right, strict=True):
        one.usable = drawn[-1]
    pair = choose(policy, sides[0] + sides[1], tokens, turn=turn)
    able = {
        (p.info.ref.worker_id, d.info.ref.worker_id)
        for p, d in product(*sides)
        if p.usable and d.usable and p.info.fingerprint == d.info.fingerprint
        if not p.view.full and not d.view.full and d.view.blocks_for(tokens) <= d.view.capacity_blocks
    }
    assert (pair in able) if able else pair is None
    fingerprints = ({one.info.fingerprint for one in each} for each in sides)
    assert has_pair(*([one.view for one in each] for each in sides)) == bool(set.intersection(*fingerprints))


costs = st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, 2.0])] * 4)
numbers = st.tuples(
    st.integers(0, 3), st.integers(0, 2), st.integers(0, 40), st.sampled_from([0, 1, 50]), st.integers(0, 5), costs
)
several = st.lists(numbers, min_size=1, max_size=6)


def side(snapshot_side, drawn):
    for order, (requests, dispatched, backlog, room, group, cost) in enumerate(drawn):
        loads = requests, dispatched, backlog, 16.0 * room, room, 8.0 * requests
        facts = Facts(1.0, *loads, group % 2, order, 4.0, *cost, *[0.0] * 3)
        snapshot_side.put(snapshot_side.add(), facts)


@given(several, several, st.data(), st.integers(1, 60), st.sampled_from([np.inf, 3.0, 30.0]))
def test_predicted_is_the_best_of_all_pairs(left, right, data, tokens, slo):
    snapshot = Snapshot(groups=2, byte_s=0.01, slo_itl_s=slo)
    side(snapshot.prefill, left)
    side(snapshot.decode, right)
    part = st.integers(0, tokens - 1).map(float)
    cached = [np.array(data.draw(st.lists(part, min_size=len(x), max_size=len(x)))) for x in (left, right)]
    found = predicted(snapshot, Ask(tokens, cached[0], cached[1]))

    def rank(pair):
        p, d = (Facts(*(column[row] for column in at)) for at, row in zip(ats, pair, strict=True))
        new, held = tokens - cached[0][pair[0]], cached[0][pair[0]]
        attended = sum(held + n + 1 for n in range(int(new)))
        ttft = p.backlog * p.queued_s + p.step_s + p.token_s * new + p.context_s * attended
        ttft += p.step_s * (p.backlog > 0)
        itl = d.step_s + d.token_s * (d.requests + 1) + d.context_s * (d.kv_tokens + tokens)
        second = itl and itl + (tokens - cached[1][pair[1]]) * d.token_bytes * 0.01 + d.backlog * d.queued_s
        rest = (d.requests, -d.available, d.order, p.backlog - held, p.dispatched, p.order)
        return (round(max(itl - slo, 0.0), 9), round(ttft, 9), round(second, 9), *rest)

    ats = snapshot.prefill.at, snapshot.decode.at
    able = [
        (p, d) for p, d in product(range(len(left)), range(len(right)))
        if ats[0].group[p] == ats[1].group[d] and -(-(tokens + 1) // 16) <= ats[1].available[d]
    ]  # fmt: skip
    assert (found is None) == (not able)
    if found is not None:
        assert rank(found[:2]) == min(map(rank, able))
        assert found.ttft_s == pytest.approx(rank(found[:2])[1])


@given(several, several)
def test_while_nothing_is_known_predicted_is_least_loaded(left, right):
    snapshot = Snapshot(groups=1)
    for which, drawn in ((snapshot.prefill, left), (snapshot.decode, right)):
        side(which, [(*row[:4], 0, (0.0,) * 4) for row in drawn])
    ask = Ask(5, np.zeros(len(left)), np.zeros(len(right)))
    assert predicted(snapshot, ask) == least_loaded(snapshot, ask)


def test_round_robin_takes_turns():
    workers = [prefill("p0"), prefill("p1"), *(decode(f"d{i}") for i in range(3))]
    pairs = [choose(round_robin, workers, turn=turn) for turn in range(6)]
    assert Counter(right for _, right in pairs) == {"d0": 2, "d1": 2, "d2": 2}
    assert Counter(left for left, _ in pairs) == {"p0": 3, "p1": 3}


FAST = pace(100, 100, 5050, 0.01, 0.001)


@pytest.mark.parametrize("policy", [predicted, prefix])
def test_a_cached_prefix_is_worth_what_it_saves(policy):
    def taken(backlog):
        workers = [prefill("has", pace=FAST, reported=backlog), prefill("not", pace=FAST), decode()]
        return choose(policy, workers, tokens=500, cached={"has": 400})[0]

    assert taken(0) == taken(300) == "has"
    assert taken(500) == "not", "it would wait for longer than the prompt takes elsewhere"


def alone_at(*links, tokens=100, **facts):
    """Return the decode worker chosen for local prefill."""
    fleet, snapshot, ask = asked(links, tokens, **facts)
    pair = predicted(snapshot, ask)
    assert pair is not None
    found = local_prefill_if_faster(snapshot, ask, pair)
    return None if found is None else fleet.ref(Role.DECODE, found.decode).worker_id


STEPS = pace(100, 4, 400, 0.01, 0.0)  # a decode step takes 10 ms; at FAST, a prompt 10 ms and 1 ms for each token


def test_prompts_that_a_decode_worker_has_to_compute_already_count():
    """Without this, all prompts of a burst would go to one decode worker, in one step far beyond the SLO."""
    busy = prefill(pace=FAST, reported=1000)
    assert alone_at(busy, decode(pace=STEPS, queued_tokens=500)) == "d"
    assert alone_at(busy, decode(pace=STEPS, queued_tokens=1000)) is None
    assert alone_at(busy, decode(pace=STEPS, queued_tokens=60), tokens=40, slo_itl_s=0.1) is None
    assert alone_at(busy, decode(pace=STEPS, queued_tokens=20), tokens=40, slo_itl_s=0.1) == "d"


def test_prefix_does_not_crowd_the_decode_worker_that_has_it():
    busy, idle = decode("1", running=6), decode("2", running=1)
    assert choose(prefix, [prefill(), busy, idle], cached={"1": 9})[1] == "1"
    busy.view.load = replace(busy.view.load, running=7)
    assert choose(prefix, [prefill(), busy, idle], cached={"1": 9})[1] == "2"


def test_only_the_worker_that_holds_the_kv_is_taken():
    kept, other = prefill("kept", reported=1000), prefill("other")
    for policy in POLICIES.values():
        assert choose(policy, [other, kept, decode()], keep=kept)[0] == "kept"
    kept.view.full = True
    assert choose(predicted, [other, kept, decode()], keep=kept) is None


@pytest.mark.parametrize(
    ("worker", "tokens", "room"),
    [
        (decode(free=2, dispatched=1), 31, True),  # 31 known tokens and one more fill two blocks
        (decode(free=2, dispatched=1), 32, False),
        (decode(free=2, running=1, dispatched=1), 31, False),  # one block is kept for the running request to grow
        (decode(free=2, pending_blocks=1, dispatched=1), 31, False),
        (decode(free=0), 31, True),  # a worker without our requests is tried even if its report has no free block
        (decode(free=50, full=True), 31, False),
    ],
)
def test_room(worker, tokens, room):
    assert (choose(predicted, [prefill(), worker], tokens) is not None) is room


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layout": replace(LAYOUT, dtype="bfloat16")}, "KV dtype bfloat16, d has float32"),
        ({"layout": replace(LAYOUT, dtype="int8")}, "KV dtype int8, d has float32"),
        ({"model": "other"}, "model other, d has m"),
        ({"layout": replace(LAYOUT, layers=2)}, "KV layout"),
        ({}, "weights or config differ from those of d"),
        ({"layout": replace(LAYOUT, block_size=32)}, "weights or config differ from those of d"),
    ],
)
def test_a_worker_that_fits_nobody_is_told_why(change, named):
    mine, other = replace(prefill("p", "b").info, **change), decode("d").info
    assert misfit(mine, [other, prefill("q").info]).startswith(named)
    assert misfit(mine, [other, decode("e", "b").info]) == "", "one that fits is enough"
    assert misfit(mine, [mine, prefill("q").info]) == "", "it is alone"
    assert misfit(other, [mine]) != ""
