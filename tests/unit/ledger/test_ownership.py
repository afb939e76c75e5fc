"""The rules of ownership records, and OwnershipLog over a connection whose answers the test controls."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import HandoffId, Incarnation, WorkerRef
from baton.errors import LedgerError
from baton.ledger.ownership import OwnershipLog, OwnershipRecord, RecordState
from baton.ledger.registry import Ledger
from baton.testing import FakeClock
from tests.support.ledger import OwnershipTable, StubConnection

Note = tuple[str, int, RecordState]
OWNER = WorkerRef("decode-0", Incarnation(5, 1), "127.0.0.1:1")
RESERVED, COMMITTED, ABORTED, RELEASED = RecordState
A, B, C = (("a", 1, RESERVED), ("b", 1, RESERVED), ("c", 1, RESERVED))
A_COMMITTED, B_COMMITTED, NEWER = ("a", 1, COMMITTED), ("b", 1, COMMITTED), ("a", 2, COMMITTED)
A_RELEASED = ("a", 1, RELEASED)
FIRST = HandoffId("r", 1)


def worker(name: str = "decode-0", counter: int = 1, epoch: int = 5) -> WorkerRef:
    return WorkerRef(name, Incarnation(epoch, counter), "127.0.0.1:1")


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


class Store(StubConnection):
    """Records each batch as (request, attempt, state). `decide` returns the answer to a note of a router."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[Note]] = []
        self.decide: Callable[[Note, str], int | LedgerError] = lambda note, router: 1

    async def run_many(self, script: Any, calls: Sequence[Any]) -> list[int | LedgerError]:
        notes = [(keys[0].removeprefix("req:"), args[0], RecordState(args[1])) for keys, args in calls]
        self.batches.append(notes)
        routers = [args[4] for _, args in calls]
        answers: list[int | LedgerError] = await self.answered(lambda: list(map(self.decide, notes, routers)))
        return answers


@pytest.fixture
def stub():
    return Store()


@pytest.fixture
def ledger(stub):
    return Ledger(stub, 1.0, FakeClock())


@pytest.fixture
async def log(ledger):
    made = OwnershipLog(ledger, OWNER, max_pending=4)
    yield made
    await made.close(0.1)


def note(log: OwnershipLog, *notes: Note) -> None:
    for request, attempt, state in notes:
        log.note(HandoffId(request, attempt), "router", state)


async def written(log: OwnershipLog, *notes: Note) -> None:
    """Note each after the previous one was written."""
    for one in notes:
        note(log, one)
        await log.flush()


def noted_for(requests: range, state: RecordState = RESERVED) -> list[Note]:
    return [(str(n), 1, state) for n in requests]


@asynccontextmanager
async def during_a_write(log: OwnershipLog, stub: Store, *notes: Note, lost: bool = True) -> AsyncIterator[None]:
    """Run the block while Redis holds these without an answer. The write fails if `lost`. Then all is written."""
    stub.lose_next = [False] if lost else []
    stub.gate.clear()
    stub.arrived.clear()
    note(log, *notes)
    await stub.arrived.wait()
    yield
    stub.gate.set()
    await log.flush()


@pytest.mark.parametrize(
    ("rounds", "batches"),
    [
        ([[A], [A_COMMITTED], [A_RELEASED]], [[A], [A_COMMITTED], [A_RELEASED]]),
        ([[A, A_COMMITTED, A_RELEASED, B]], [[A_RELEASED, B]]),
        ([[("a", 2, RESERVED), A_RELEASED, B_COMMITTED, B]], [[("a", 2, RESERVED), B_COMMITTED]]),
    ],
    ids=["in order", "overtaken", "late"],
)
async def test_only_the_latest_state_of_a_request_is_written(log, stub, rounds, batches):
    for notes in rounds:
        note(log, *notes)
        await log.flush()
    assert stub.batches == batches


@pytest.mark.parametrize(("lost", "again"), [(False, []), (True, [B])], ids=["written", "failed"])
async def test_what_is_noted_during_a_round_trip_goes_with_the_next(log, stub, lost, again):
    async with during_a_write(log, stub, A, B, lost=lost):
        note(log, A_COMMITTED, C)
    assert stub.batches == [[A, B], [A_COMMITTED, *again, C]]


MANY = noted_for(range(1, 7))


@pytest.mark.parametrize(
    ("notes", "kept", "last"),
    [
        (MANY, "3456", dict.fromkeys("0123456", RESERVED)),
        ([*MANY, ("6", 1, RELEASED)], "3456", {**dict.fromkeys("012345", RESERVED), "6": RELEASED}),
        (noted_for(range(5), RELEASED), "1234", dict.fromkeys("1234", RELEASED)),  # "0" is in flight
    ],
    ids=["held", "one is released", "all are released"],
)
async def test_the_queue_is_bounded_and_what_is_held_is_written_after_the_return(log, stub, notes, kept, last):
    async with during_a_write(log, stub, ("0", 1, RESERVED)):
        note(log, *notes)
    assert [request for request, _, _ in stub.batches[1]] == list(kept)
    assert {request: state for batch in stub.batches[1:] for request, _, state in batch} == last
    assert set(log._entries) == {request for request, state in last.items() if state is not RELEASED}


async def test_one_bad_record_does_not_hold_up_the_others(log, stub):
    bad, good = ("bad", 1, RESERVED), ("good", 1, RESERVED)
    stub.decide = lambda note, router: LedgerError("bad") if note == bad else 1
    note(log, bad, good)
    with pytest.raises(LedgerError, match="1 ownership records not written"):
        await log.flush(0.1)
    stub.decide = lambda note, router: 1
    await log.flush()
    assert stub.batches[-1] == [bad]
    assert [batch for batch in stub.batches if good in batch] == [[bad, good]], "it is not written again"


async def test_note_from_many_threads(stub, ledger):
    log = OwnershipLog(ledger, OWNER)

    def work(thread: int) -> None:
        for i in range(100):
            for state in (RESERVED, COMMITTED, RELEASED):
                log.note(HandoffId(f"{thread}-{i}", 1), "router", state)

    await asyncio.gather(*(asyncio.to_thread(work, thread) for thread in range(4)))
    await log.flush()
    last = {request: state for batch in stub.batches for request, _, state in batch}
    assert len(last) == 400
    assert set(last.values()) == {RELEASED}
    await log.close()


async def test_close_gives_up_on_a_redis_that_is_away(log, stub):
    stub.lose_next = [False] * 10**6
    note(log, A)
    await log.close(0.05)
    note(log, B)
    assert log._left() == 1, "nothing is noted after the end"


@pytest.mark.parametrize("states", [list(RecordState), [RESERVED, *[COMMITTED] * 4, ABORTED, RELEASED]], ids=len)
async def test_a_handoff_is_written_four_times_at_most_and_its_end_always(log, stub, states):
    await written(log, *(("a", 1, state) for state in states))
    await written(log, *(("a", 2, state) for state in states))
    by_attempt = [[write for batch in stub.batches for write in batch if write[1] == attempt] for attempt in (1, 2)]
    for writes in by_attempt:
        assert len(writes) == 4
        assert writes[-1][2] is RELEASED


@pytest.mark.parametrize(
    ("answer", "notes", "again"),
    [
        (1, [A, B, B_COMMITTED, C, ("c", 1, RELEASED)], [A, B_COMMITTED]),
        (1, [A, NEWER, A_RELEASED], [NEWER]),
        (0, [A], []),
    ],
    ids=["what is held", "the newer attempt", "nothing that was refused"],
)
async def test_a_store_that_forgot_is_told_again_once(log, stub, ledger, answer, notes, again):
    ledger._saw(5)
    stub.decide = lambda note, router: answer
    await written(log, *notes)
    seen, stub.decide = len(stub.batches), lambda note, router: 1
    for epoch in (6, 6, 5):
        ledger._saw(epoch)
        await log.flush()
        assert stub.batches[seen:] == [again] * bool(again)


async def test_a_worker_whose_place_is_not_its_own_yet_writes_later(log, stub):
    """An older copy of Redis may hold the place of the worker before, until the next heartbeat claims it again."""
    stub.decide = lambda note, router: -2 if note[0] == "a" else 1
    note(log, A_COMMITTED, B)
    with pytest.raises(LedgerError, match="1 ownership records not written"):
        await log.flush(0.05)
    stub.decide = lambda note, router: 1
    await log.flush()
    assert stub.batches[-1] == [A_COMMITTED]
    assert [B] not in stub.batches


async def test_a_newer_attempt_that_found_no_room_is_not_forgotten_with_the_end_of_the_older(log, stub):
    await written(log, ("0", 1, RESERVED))
    async with during_a_write(log, stub, ("0", 1, RELEASED), lost=False):
        note(log, ("0", 2, RESERVED), *noted_for(range(1, 5)))
    assert ("0", 2, RESERVED) in [write for batch in stub.batches for write in batch]


async def test_what_is_held_for_long_is_written_again_before_it_expires(stub, ledger, monkeypatch):
    monkeypatch.setattr("baton.ledger.ownership.REPEAT_S", 0.01)
    log = OwnershipLog(ledger, OWNER)
    await written(log, A_COMMITTED)
    for _ in range(2):
        stub.arrived.clear()
        await stub.arrived.wait()
    assert stub.batches[:3] == [[A_COMMITTED]] * 3
    await log.close()


async def test_a_closed_log_follows_nothing(log, stub, ledger):
    ledger._saw(5)
    await written(log, A)
    await log.close()
    ledger._saw(6)
    await asyncio.sleep(0)
    assert len(stub.batches) == 1
    assert ledger._followers == set()


NOTES = st.tuples(st.sampled_from("abc"), st.integers(1, 2), st.sampled_from(RecordState))
STEPS = st.lists(st.one_of(NOTES, st.sampled_from(["fail", "wipe", "flush", "let it run"])), max_size=40)


class Trouble:
    """A log whose store is the in-memory table. `wipe` empties it, which the ledger sees at the next heartbeat."""

    def __init__(self) -> None:
        self.stub = Store()
        self.stub.decide = self.decide
        self.ledger = Ledger(self.stub, 1.0, FakeClock())  # type: ignore[arg-type]
        self.ledger._saw(1)
        self.table = OwnershipTable()
        self.log = OwnershipLog(self.ledger, OWNER)
        self.noted: dict[str, tuple[int, RecordState]] = {}

    def decide(self, note: Note, router: str) -> int:
        request, attempt, state = note
        return self.table.write(HandoffId(request, attempt), OWNER, router, state)

    def wipe(self) -> None:
        self.table = OwnershipTable()
        self.ledger._saw(self.ledger._epoch + 1)

    def note(self, request: str, attempt: int, state: RecordState) -> None:
        if self.noted.get(request, (0, RESERVED)) <= (attempt, state):
            self.noted[request] = (attempt, state)
            self.log.note(HandoffId(request, attempt), f"router {attempt}", state)

    async def step(self, step: Any) -> None:
        match step:
            case "fail":
                self.stub.lose_next = [True]
            case "wipe":
                self.wipe()
            case "flush":
                await self.log.flush()
            case "let it run":
                await asyncio.sleep(0)
            case (request, attempt, state):
                self.note(request, attempt, state)

    def check(self) -> None:
        held = {request for request, (_, state) in self.noted.items() if state is not RELEASED}
        assert set(self.log._entries) == held
        for request, (attempt, state) in self.noted.items():
            record = self.table.read(request)
            if request not in held:  # released, before or after the store forgot
                assert record is None or (record.handoff.attempt, record.state) == (attempt, state)
                continue
            assert record is not None
            assert (record.handoff.attempt, record.router_id) == (attempt, f"router {attempt}")
            assert record.state == state or (record.state < state and self.log._entries[request].queued >= 3)


async def trouble(steps: list[Any]) -> None:
    case = Trouble()
    for step in [*steps, "flush"]:
        await case.step(step)
    case.check()
    await case.log.close()


@given(STEPS)
def test_after_any_trouble_the_store_says_what_is_held(steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("baton.ledger.background_writer.FIRST_DELAY_S", 0.0)
        asyncio.run(trouble(steps))
