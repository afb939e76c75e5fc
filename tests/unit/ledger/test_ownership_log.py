"""OwnershipLog over a connection that answers when the test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from baton.clock import FakeClock
from baton.core import HandoffId, Incarnation, WorkerRef
from baton.errors import LedgerError
from baton.ledger.ledger import Ledger
from baton.ledger.ownership import OwnershipLog, RecordState

OWNER = WorkerRef("decode-0", Incarnation(5, 1), "127.0.0.1:1")
RESERVED, COMMITTED, ABORTED, RELEASED = RecordState


class StubConnection:
    """Records each batch as (request, attempt, state) and answers as told; `gate` holds the answers back."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[str, int, RecordState]]] = []
        self.arrived = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures = 0
        self.answer: int | LedgerError = 1

    def key(self, *parts: str) -> str:
        return ":".join(parts)

    async def run_many(self, script: Any, calls: Sequence[Any]) -> list[int | LedgerError]:
        self.batches.append([(keys[0].removeprefix("req:"), args[0], RecordState(args[1])) for keys, args in calls])
        self.arrived.set()
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            raise LedgerError("away")
        return [self.answer] * len(calls)


@pytest.fixture
def stub():
    return StubConnection()


@pytest.fixture
async def log(stub):
    made = OwnershipLog(Ledger(stub, 1.0, FakeClock()), OWNER, max_pending=4)
    yield made
    await made.close(0.1)


def identity(log: OwnershipLog) -> bool:
    c = log.counters
    return c.noted == c.coalesced + c.written + c.refused + c.dropped + len(log._pending) + len(log._in_flight)


async def test_notes_are_written_in_order(log, stub):
    for state in (RESERVED, COMMITTED, RELEASED):
        log.note(HandoffId("a", 1), "router", state)
        await log.flush()
    assert stub.batches == [[("a", 1, RESERVED)], [("a", 1, COMMITTED)], [("a", 1, RELEASED)]]
    assert (log.counters.written, log.counters.round_trips) == (3, 3)


async def test_states_that_were_overtaken_are_not_written(log, stub):
    for state in (RESERVED, COMMITTED, RELEASED):
        log.note(HandoffId("a", 1), "router", state)
    log.note(HandoffId("b", 1), "router", RESERVED)
    await log.flush()
    assert stub.batches == [[("a", 1, RELEASED), ("b", 1, RESERVED)]]
    assert log.counters.coalesced == 2
    assert identity(log)


async def test_what_is_noted_during_a_round_trip_goes_with_the_next(log, stub):
    stub.gate.clear()
    log.note(HandoffId("a", 1), "router", RESERVED)
    await stub.arrived.wait()
    log.note(HandoffId("a", 1), "router", COMMITTED)
    log.note(HandoffId("b", 1), "router", RESERVED)
    stub.gate.set()
    await log.flush()
    assert stub.batches == [[("a", 1, RESERVED)], [("a", 1, COMMITTED), ("b", 1, RESERVED)]]


async def test_a_late_note_of_an_older_attempt_or_state_changes_nothing(log, stub):
    log.note(HandoffId("a", 2), "router", RESERVED)
    log.note(HandoffId("a", 1), "router", RELEASED)
    log.note(HandoffId("b", 1), "router", COMMITTED)
    log.note(HandoffId("b", 1), "router", RESERVED)
    await log.flush()
    assert stub.batches == [[("a", 2, RESERVED), ("b", 1, COMMITTED)]]


async def test_failed_writes_are_tried_again_at_their_latest_state(log, stub):
    stub.failures = 1
    stub.gate.clear()
    log.note(HandoffId("a", 1), "router", RESERVED)
    log.note(HandoffId("b", 1), "router", RESERVED)
    await stub.arrived.wait()
    log.note(HandoffId("c", 1), "router", RESERVED)
    log.note(HandoffId("a", 1), "router", COMMITTED)
    stub.gate.set()
    await log.flush()
    assert stub.batches[1] == [("a", 1, COMMITTED), ("b", 1, RESERVED), ("c", 1, RESERVED)]
    assert (log.counters.failures, log.counters.written, log.counters.coalesced) == (1, 3, 1)
    assert identity(log)


async def test_the_queue_is_bounded_and_counts_what_it_drops(log, stub):
    stub.failures = 1
    stub.gate.clear()
    log.note(HandoffId("0", 1), "router", RESERVED)
    await stub.arrived.wait()
    for i in range(1, 7):
        log.note(HandoffId(str(i), 1), "router", RESERVED)
    stub.gate.set()
    await log.flush()
    assert [request for request, _, _ in stub.batches[1]] == ["3", "4", "5", "6"]
    assert log.counters.dropped == 3
    assert identity(log)


async def test_refused_writes_are_counted_and_not_repeated(log, stub):
    stub.answer = 0
    log.note(HandoffId("a", 1), "router", RESERVED)
    await log.flush()
    assert (log.counters.refused, len(stub.batches)) == (1, 1)


async def test_one_bad_record_does_not_hold_up_the_others(log, stub):
    answers = [LedgerError("bad"), 1]

    async def run_many(script: Any, calls: Sequence[Any]) -> list[int | LedgerError]:
        return [answers[keys[0] != "req:bad"] for keys, _ in calls]

    stub.run_many = run_many
    log.note(HandoffId("bad", 1), "router", RESERVED)
    log.note(HandoffId("good", 1), "router", RESERVED)
    with pytest.raises(LedgerError, match="1 ownership records not written"):
        await log.flush(0.1)
    assert log.counters.written == 1
    answers[0] = 1
    await log.flush()
    assert log.counters.written == 2


async def test_note_from_many_threads(stub):
    log = OwnershipLog(Ledger(stub, 1.0, FakeClock()), OWNER)

    def work(thread: int) -> None:
        for i in range(100):
            for state in (RESERVED, COMMITTED, RELEASED):
                log.note(HandoffId(f"{thread}-{i}", 1), "router", state)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    await log.flush()
    last = {request: state for batch in stub.batches for request, _, state in batch}
    assert len(last) == 400
    assert set(last.values()) == {RELEASED}
    assert identity(log)
    await log.close()


async def test_close_gives_up_on_a_redis_that_is_away_and_counts(stub):
    log = OwnershipLog(Ledger(stub, 1.0, FakeClock()), OWNER)
    stub.failures = 10**6
    log.note(HandoffId("a", 1), "router", RESERVED)
    await log.close(0.05)
    log.note(HandoffId("b", 1), "router", RESERVED)
    assert log.counters.dropped == 2
    assert identity(log)
