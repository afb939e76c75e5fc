from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import BlockCounts, Incarnation, KVLayout, Load, Role, WorkerInfo, WorkerRef
from router.policy import POLICIES, Pair, Policy, WorkerView, has_pair, least_loaded, misfit, round_robin

LAYOUT = KVLayout(1, 1, 8, 16, "float32")


def view(role: Role, name: str, fingerprint: str = "a", free: int = 100, running: int = 0, **fields) -> WorkerView:
    ref = WorkerRef(name, Incarnation(1, 1), "x:1")
    load = Load(running=running, queued_tokens=fields.pop("reported", 0), blocks=BlockCounts(100, free, 100 - free))
    return WorkerView(WorkerInfo(ref, role, fingerprint, "m", 2048, 100, LAYOUT), load, **fields)


def prefill(name: str = "p", *args, **fields) -> WorkerView:
    return view(Role.PREFILL, name, *args, **fields)


def decode(name: str = "d", *args, **fields) -> WorkerView:
    return view(Role.DECODE, name, *args, **fields)


def chosen(policy: Policy, left: list[WorkerView], right: list[WorkerView], turn: int = 0) -> Pair:
    pair = policy(left, right, 10, turn)
    assert pair is not None
    return pair


names = st.sampled_from(["a", "b"])
views = st.tuples(
    st.integers(0, 9), names, st.integers(0, 100), st.integers(0, 5), st.integers(0, 5), st.integers(0, 50),
    st.booleans(),
)  # fmt: skip


def build(role: Role, rows) -> list[WorkerView]:
    return [
        view(role, f"{role}-{i}", fp, free, running, dispatched=dispatched, pending_blocks=pending, full=full)
        for i, fp, free, running, dispatched, pending, full in rows
    ]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@given(st.lists(views, max_size=5), st.lists(views, max_size=5), st.integers(1, 2000), st.integers(0, 99))
def test_a_pair_fits_and_is_found_whenever_there_is_one(policy, left, right, tokens, turn):
    workers = build(Role.PREFILL, left), build(Role.DECODE, right)
    pair = policy(*workers, tokens, turn)
    able = [
        (p, d) for p in workers[0] for d in workers[1]
        if p.info.fingerprint == d.info.fingerprint and not p.full and d.has_room(tokens)
    ]  # fmt: skip
    assert (pair is None) == (not able)
    if pair is not None:
        assert any(pair.prefill is p and pair.decode is d for p, d in able)
        assert has_pair(*workers)


def test_least_loaded_counts_what_was_dispatched_and_what_others_sent():
    busy, mine, idle = decode("1", running=3), decode("2", dispatched=2), decode("3", running=1)
    assert chosen(least_loaded, [prefill()], [busy, mine, idle]).decode is idle
    reported, sent, free = prefill("1", reported=500), prefill("2", queued_tokens=400), prefill("3", queued_tokens=10)
    assert chosen(least_loaded, [reported, sent, free], [decode()]).prefill is free


def test_least_loaded_prefers_room_among_equals():
    assert (
        chosen(least_loaded, [prefill()], [decode("1", free=5), decode("2", free=50)]).decode.info.ref.worker_id == "2"
    )


def test_round_robin_takes_turns():
    workers = [prefill("p0"), prefill("p1")], [decode(f"d{i}") for i in range(3)]
    pairs = [chosen(round_robin, *workers, turn) for turn in range(6)]
    assert Counter(pair.decode.info.ref.worker_id for pair in pairs) == {"d0": 2, "d1": 2, "d2": 2}
    assert Counter(pair.prefill.info.ref.worker_id for pair in pairs) == {"p0": 3, "p1": 3}


@pytest.mark.parametrize(
    ("worker", "tokens", "room"),
    [
        (decode(free=2, dispatched=1), 31, True),  # 31 known and one more fill two blocks
        (decode(free=2, dispatched=1), 32, False),
        (decode(free=2, running=1, dispatched=1), 31, False),  # a block to grow is kept for the running one
        (decode(free=2, pending_blocks=1, dispatched=1), 31, False),
        (decode(free=0), 31, True),  # nothing of ours is there: it is asked
        (decode(free=50, full=True), 31, False),
    ],
)
def test_room(worker, tokens, room):
    assert worker.has_room(tokens) is room


def test_workers_of_different_fingerprints_are_no_pair():
    assert not has_pair([prefill("p", "a")], [decode("d", "b")])
    assert least_loaded([prefill("p", "a")], [decode("d", "b")], 10, 0) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layout": replace(LAYOUT, dtype="bfloat16")}, "dtype bfloat16, d has float32"),
        ({"model": "other"}, "model other, d has m"),
        ({"layout": replace(LAYOUT, layers=2)}, "KV layout"),
        ({}, "weights or config differ from those of d"),
    ],
)
def test_a_worker_that_fits_nobody_is_told_why(change, named):
    mine, other = replace(prefill("p", "b").info, **change), decode("d").info
    assert misfit(mine, [other, prefill("q").info]).startswith(named)
    assert misfit(mine, [other, decode("e", "b").info]) == "", "one that fits is enough"
    assert misfit(mine, [mine, prefill("q").info]) == "", "it is alone"
    assert misfit(other, [mine]) != ""


def test_the_size_of_blocks_is_no_reason():
    mine = replace(prefill("p", "b").info, layout=replace(LAYOUT, block_size=32))
    assert misfit(mine, [decode("d").info]) == "weights or config differ from those of d"
