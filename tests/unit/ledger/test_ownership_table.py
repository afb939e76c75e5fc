from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import HandoffId, Incarnation, WorkerRef
from baton.ledger.ownership import OwnershipRecord, RecordState
from tests.support.ownership_records import OwnershipTable

RESERVED, COMMITTED, ABORTED, RELEASED = RecordState


def worker(name: str = "decode-0", counter: int = 1, epoch: int = 5) -> WorkerRef:
    return WorkerRef(name, Incarnation(epoch, counter), "127.0.0.1:1")


FIRST = HandoffId("r", 1)


def test_records_of_version_1_are_still_read():
    assert [RecordState(old) for old in (1, 2, 3, 4)] == [RESERVED, COMMITTED, ABORTED, RELEASED]
    for damaged in (0, 5, -1, 11):
        with pytest.raises(ValueError):
            RecordState(damaged)


def test_a_replaced_incarnation_writes_nothing_any_more():
    table = OwnershipTable()
    assert table.register(worker(counter=1))
    assert table.write(FIRST, worker(counter=1), "router", RESERVED)
    assert table.register(worker(counter=2))
    assert not table.write(FIRST, worker(counter=1), "router", COMMITTED)
    assert not table.register(worker(counter=1))
    assert table.register(worker(counter=1, epoch=6))


OWNERS = st.sampled_from([worker(), worker("decode-1"), worker(counter=2), worker(epoch=6)])
WRITES = st.tuples(st.integers(1, 3), OWNERS, st.sampled_from(["a", "b"]), st.sampled_from(RecordState))


@given(st.lists(WRITES, max_size=40))
def test_attempts_rise_states_move_forward_and_an_attempt_belongs_to_the_first_who_wrote_it(writes):
    """An attempt's router is the one that started it. A released record rejects older attempts."""
    table, owner, record = OwnershipTable(), worker(), None
    for attempt, writer, router, state in writes:
        handoff = HandoffId("r", attempt)
        if record is None or attempt > record.handoff.attempt:
            accepted, owner = True, writer
            record = OwnershipRecord(handoff, state, owner.worker_id, owner.incarnation, router)
        else:
            accepted = (handoff, writer) == (record.handoff, owner) and state >= record.state
            record = replace(record, state=state) if accepted else record
        assert table.write(handoff, writer, router, state) is accepted
        assert table.read("r") == record
