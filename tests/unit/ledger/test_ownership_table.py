from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import HandoffId, Incarnation, WorkerRef
from baton.ledger.ownership import OwnershipTable, RecordState

RESERVED, PREPARED, COMMITTED, ABORTED, RELEASED = RecordState


def worker(name: str = "decode-0", counter: int = 1, epoch: int = 5) -> WorkerRef:
    return WorkerRef(name, Incarnation(epoch, counter), "127.0.0.1:1")


FIRST, SECOND = HandoffId("r", 1), HandoffId("r", 2)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(RecordState, RecordState)))
def test_states_of_one_attempt_only_move_forward(before, after):
    table = OwnershipTable()
    assert table.write(FIRST, worker(), "router", before)
    assert table.write(FIRST, worker(), "router", after) is (after >= before)
    record = table.read("r")
    assert record is not None
    assert record.state is max(before, after)


@pytest.mark.parametrize("state", RecordState)
def test_a_higher_attempt_takes_over_from_any_state_and_the_lower_one_is_refused_for_good(state):
    table = OwnershipTable()
    assert table.write(FIRST, worker("decode-0"), "a", state)
    assert table.write(SECOND, worker("decode-1"), "b", RESERVED)
    assert not any(table.write(FIRST, worker("decode-0"), "a", late) for late in RecordState)
    assert table.write(SECOND, worker("decode-1"), "b", RELEASED)
    assert not any(table.write(FIRST, worker("decode-0"), "a", late) for late in RecordState), (
        "a tombstone keeps it out"
    )
    record = table.read("r")
    assert record is not None
    assert (record.worker_id, record.router_id, record.handoff) == ("decode-1", "b", SECOND)


@pytest.mark.parametrize("other", [worker("decode-1"), worker(counter=2), worker(epoch=6)], ids=str)
def test_an_attempt_belongs_to_the_first_who_wrote_it(other):
    table = OwnershipTable()
    assert table.write(FIRST, worker(), "router", RESERVED)
    assert not table.write(FIRST, other, "router", COMMITTED)


def test_records_of_version_1_are_still_read():
    assert [RecordState(old) for old in (1, 2, 3, 4)] == [RESERVED, COMMITTED, ABORTED, RELEASED]
    for damaged in (0, 5, -1, 11):
        with pytest.raises(ValueError):
            RecordState(damaged)


def test_the_router_of_an_attempt_is_the_one_that_started_it():
    table = OwnershipTable()
    table.write(FIRST, worker(), "a", RESERVED)
    table.write(FIRST, worker(), "b", COMMITTED)
    record = table.read("r")
    assert record is not None
    assert record.router_id == "a"


def test_a_replaced_incarnation_writes_nothing_any_more():
    table = OwnershipTable()
    assert table.register(worker(counter=1))
    assert table.write(FIRST, worker(counter=1), "router", RESERVED)
    assert table.register(worker(counter=2))
    assert not table.write(FIRST, worker(counter=1), "router", COMMITTED)
    assert not table.register(worker(counter=1))
    assert table.register(worker(counter=1, epoch=6))


@dataclass(frozen=True)
class Step:
    attempt: int
    name: str
    counter: int
    state: RecordState


STEPS = st.builds(
    Step, st.integers(1, 3), st.sampled_from(["decode-0", "decode-1"]), st.integers(1, 2), st.sampled_from(RecordState)
)


@given(st.lists(STEPS, max_size=40))
def test_any_interleaving_is_monotone_with_one_owner_an_attempt(steps):
    table, reached = OwnershipTable(), (0, 0)
    owners: dict[int, WorkerRef] = {}
    for step in steps:
        owner = worker(step.name, step.counter)
        accepted = table.write(HandoffId("r", step.attempt), owner, "router", step.state)
        record = table.read("r")
        assert record is not None
        assert (record.handoff.attempt, record.state) >= reached
        reached = (record.handoff.attempt, record.state)
        if accepted:
            assert reached == (step.attempt, step.state)
            assert owners.setdefault(step.attempt, owner) == owner
