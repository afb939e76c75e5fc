"""The prefix directory: a reader, and PrefixPublisher over a store with the rules of the script.

The reader meets a store that trims its events, forgets, and changes incarnations. The publisher's store fails when the
test sets it so.
"""

import asyncio
import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core import Incarnation, WorkerRef
from baton.errors import LedgerError
from baton.ledger import prefix_directory
from baton.ledger.prefix_directory import DONE, GAP, REFUSED, PrefixPublisher
from baton.ledger.prefix_index import NAME_BYTES, Change, Holder, PrefixIndex
from baton.ledger.registry import Ledger
from baton.testing import FakeClock
from tests.support.ledger import StubConnection, holders

A, B = Holder("prefill-0", Incarnation(5, 1)), Holder("decode-0", Incarnation(5, 2))
NAMES = [bytes([n]) * NAME_BYTES for n in range(6)]


def test_a_change_out_of_order_is_not_applied():
    prefixes = PrefixIndex()
    assert not prefixes.apply(Change(A, 1, added=NAMES))  # earlier changes are unknown
    assert prefixes.apply(Change(A, 1, reset=True, added=NAMES[:1]))
    assert not prefixes.apply(Change(A, 3, added=NAMES[1:2]))
    assert prefixes.apply(Change(A, 1, added=NAMES))  # known already
    assert holders(prefixes, NAMES) == {A: 1}
    assert prefixes.apply(Change(A, 2, added=NAMES[1:2]))
    assert prefixes.apply(Change(B, 1, reset=True, added=NAMES[:1]))
    assert prefixes.apply(Change(A, 3, added=NAMES[2:3], removed=NAMES[:1]))
    assert holders(prefixes, NAMES) == {B: 1}
    assert holders(prefixes, NAMES[1:]) == {A: 2}


def test_a_chain_is_read_no_further_than_somebody_has_it():
    prefixes, asked = PrefixIndex(), []
    prefixes.apply(Change(A, 1, reset=True, added=NAMES[:2]))
    prefixes.apply(Change(B, 1, reset=True, added=NAMES[:1]))

    def digests():
        for name in NAMES:
            asked.append(name)
            yield name

    assert prefixes.leading(digests()) == [(1 << prefixes.slot(B), 1), (1 << prefixes.slot(A), 2)]
    assert asked == NAMES[:3]


def test_a_slot_is_given_again_and_that_is_told():
    prefixes = PrefixIndex()
    prefixes.apply(Change(A, 1, reset=True, added=NAMES[:2]))
    slot, told = prefixes.slot(A), prefixes.generation
    prefixes.apply(Change(A, 2, added=NAMES[2:3]))
    assert prefixes.generation == told
    prefixes.behind({})
    assert (prefixes.slot(A), prefixes.leading(NAMES)) == (0, [])
    prefixes.apply(Change(B, 1, reset=True, added=NAMES[:1]))
    assert prefixes.slot(B) == slot
    assert prefixes.generation == told + 2


@given(
    st.lists(st.sampled_from(NAMES), max_size=8),
    st.dictionaries(st.sampled_from([A, B]), st.sets(st.sampled_from(NAMES))),
    st.sampled_from([b"", b"the other half!!"]),
)
def test_leading_blocks_are_counted_for_each_holder(chain, sets, other_half):
    """The reference is a plain loop. Whole digests are looked up by their names; holders without any are left out."""
    prefixes = PrefixIndex()
    for holder, names in sets.items():
        prefixes.apply(Change(holder, 1, reset=True, added=names))
    counts = {h: sum(1 for _ in itertools.takewhile(names.__contains__, chain)) for h, names in sets.items()}
    found = holders(prefixes, (name + other_half for name in chain))
    assert found == {holder: count for holder, count in counts.items() if count}


OWNER = WorkerRef("prefill-0", Incarnation(5, 1), "127.0.0.1:1")


def digest(number: int) -> bytes:
    return number.to_bytes(NAME_BYTES, "big") + b"second half"


def name(number: int) -> bytes:
    return digest(number)[:NAME_BYTES]


class Store(StubConnection):
    """Keeps one worker's set."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[bytes] | None = None
        self.seq = 0
        self.calls: list[tuple[str, int, int]] = []  # kind, number added, number removed
        self.fenced = False

    async def run(self, script: Any, keys: Any, args: Any) -> int:
        worker_id, _, seq, kind, _, added, removed, *_ = args
        assert worker_id == OWNER.worker_id
        self.calls.append((kind, len(split(added)), len(split(removed))))
        answer: int = await self.answered(lambda: self._publish(seq, kind, split(added), split(removed)))
        return answer

    def _publish(self, seq: int, kind: str, added: set[bytes], removed: set[bytes]) -> int:
        if self.fenced:
            return REFUSED
        if self.names is not None and seq == self.seq:
            return DONE
        if kind == "reset":
            self.names = set()
        elif kind == "touch" or self.names is None or self.seq != seq - 1:
            return GAP
        self.names = (self.names or set()) - removed | added
        self.seq = seq
        return DONE

    def wipe(self) -> None:
        self.names, self.seq = None, 0


def split(names: bytes) -> set[bytes]:
    assert len(names) % NAME_BYTES == 0
    return {names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)}


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
    monkeypatch.setattr(prefix_directory, "INTERVAL_S", 0.0)
    monkeypatch.setattr("baton.ledger.background_writer.FIRST_DELAY_S", 0.0)


@pytest.fixture
def stub():
    return Store()


@pytest.fixture
def ledger(stub):
    made = Ledger(stub, 1.0, FakeClock())
    made._saw(1)
    return made


@pytest.fixture
async def log(ledger):
    made = PrefixPublisher(ledger, OWNER)
    yield made
    await made.close(0.1)


async def written(log: PrefixPublisher, added: Iterable[int], removed: Iterable[int] = ()) -> None:
    log.note(list(map(digest, added)), list(map(digest, removed)))
    await log.flush()


async def test_the_first_write_starts_from_nothing_and_later_ones_tell_what_changed(log, stub):
    await written(log, [1, 2])
    await written(log, [3], [1])
    assert stub.calls == [("reset", 2, 0), ("delta", 1, 1)]
    assert stub.names == {name(2), name(3)}
    log.note([digest(4)])  # blocks that are added and removed between two writes are not written
    log.note([], [digest(3)])
    log.note([digest(3)], [digest(4)])
    await written(log, [3, 3], [9])
    assert stub.calls[2:] == []


async def test_many_are_written_in_pieces(log, stub, monkeypatch):
    monkeypatch.setattr(prefix_directory, "BATCH", 10)
    await written(log, range(35))
    assert stub.calls == [("reset", 10, 0), ("delta", 10, 0), ("delta", 10, 0), ("delta", 5, 0)]
    assert stub.names == {name(n) for n in range(35)}


async def test_a_store_that_forgot_is_given_the_whole_set(log, stub, ledger):
    await written(log, [1, 2])
    stub.wipe()
    ledger._saw(2)
    await log.flush()
    assert stub.calls[1:] == [("touch", 0, 0), ("reset", 2, 0)]
    stub.wipe()
    await written(log, [3])
    assert stub.calls[3:] == [("delta", 1, 0), ("reset", 3, 0)]


async def test_a_lost_answer_costs_one_repetition_and_not_the_whole_set(log, stub):
    await written(log, range(5))
    for lost in (False, True):
        stub.lose_next = [lost]
        await written(log, [5 + lost], [0 + lost])
    assert stub.calls == [("reset", 5, 0), *[("delta", 1, 1)] * 4]
    assert stub.names == {name(n) for n in range(2, 7)}


async def test_an_idle_worker_says_that_it_is_still_there(stub, ledger):
    log = PrefixPublisher(ledger, OWNER, ttl_s=0.03)
    await written(log, [1])
    stub.arrived.clear()
    await stub.arrived.wait()
    assert stub.calls[1] == ("touch", 0, 0)
    assert log._repeat_s <= 0.03 / 2, "one lost touch does not expire the blocks"
    await log.close()


async def test_a_worker_whose_place_is_not_its_own_yet_writes_later(log, stub):
    stub.fenced = True
    log.note([digest(1)])
    with pytest.raises(LedgerError, match="prefix blocks not written"):
        await log.flush(0.05)
    stub.fenced = False
    await log.flush()
    assert stub.names == {name(1)}


async def test_the_queue_is_bounded_by_what_is_held_and_was_written(log, stub):
    await written(log, range(10))
    stub.lose_next = [False] * 10**6
    for n in range(10, 5000):
        log.note([digest(n)], [digest(n - 10)])
    assert log._left() <= 20 + 2
    stub.lose_next = []
    await log.flush()
    assert stub.names == {name(n) for n in range(4990, 5000)}


async def test_notes_after_close_are_nothing(log, stub):
    await log.close()
    log.note([digest(1)])
    assert (stub.calls, log._left()) == ([], 0)


async def test_note_from_many_threads(log, stub):
    def work(thread: int) -> None:
        for n in range(200):
            log.note([digest(1000 * (thread + 1) + n)])
            log.note([], [digest(1000 * (thread + 1) + n - 50)])

    await asyncio.gather(*(asyncio.to_thread(work, thread) for thread in range(4)))
    await log.flush()
    assert stub.names == {name(1000 * t + n) for t in range(1, 5) for n in range(150, 200)}
