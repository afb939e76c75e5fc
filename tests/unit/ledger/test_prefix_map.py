"""A reader of the directory against a store that trims its events, forgets, and changes incarnations."""

import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.core import Incarnation
from baton.ledger.prefix_index import NAME_BYTES, Change, Holder, PrefixIndex
from tests.support.prefixes import holders

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
    assert prefixes.apply(Change(A, 3, added=NAMES[2:3], removed=NAMES[:1]))
    assert holders(prefixes, NAMES) == {}
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


class Directory(RuleBasedStateMachine):
    """Two writers, a store whose stream drops changes, and a reader that is sometimes late."""

    def __init__(self) -> None:
        super().__init__()
        self.holders = {"prefill-0": A, "decode-0": B}
        self.history: dict[tuple[Holder, int], set[bytes]] = {}  # blocks of each holder after each change
        self.stored: dict[str, tuple[Holder, int]] = {}
        self.unread: list[Change] = []
        self.reader = PrefixIndex()

    workers = st.sampled_from(["prefill-0", "decode-0"])
    some = st.sets(st.sampled_from(NAMES))
    events = st.integers(1, 4)

    @rule(worker=workers, added=some, removed=some)
    def change(self, worker: str, added: set[bytes], removed: set[bytes]) -> None:
        holder = self.holders[worker]
        last = max((seq for one, seq in self.history if one == holder), default=0)
        reset = self.stored.get(worker) != (holder, last)
        names, lost = (set(), set()) if reset else (self.history[holder, last], removed - added)
        self.stored[worker] = holder, last + 1
        self.history[holder, last + 1] = names - lost | added
        self.unread.append(Change(holder, last + 1, reset=reset, added=added, removed=lost))

    @rule(worker=workers)
    def restart(self, worker: str) -> None:
        last = self.holders[worker].incarnation
        self.holders[worker] = Holder(worker, replace(last, counter=last.counter + 10))

    @rule()
    def forget_everything(self) -> None:
        self.stored.clear()
        self.unread.clear()

    @rule(events=events)
    def miss(self, events: int) -> None:
        del self.unread[:events]

    @rule(events=events)
    def follow(self, events: int) -> None:
        for change in self.unread[:events]:
            if not self.reader.apply(change):
                self.read(change.holder.worker_id)
        del self.unread[:events]

    def read(self, worker_id: str) -> None:
        if worker_id in self.stored:
            holder, seq = self.stored[worker_id]
            self.reader.apply(Change(holder, seq, reset=True, added=self.history[holder, seq]))

    @rule()
    def compare(self) -> None:
        for holder in self.reader.behind(dict(self.stored.values())):
            self.read(holder.worker_id)
        held = {holder: names for holder, (_, names) in self.reader._held.items()}
        assert held == {holder: self.history[holder, seq] for holder, seq in self.stored.values()}

    @invariant()
    def never_wrong_for_its_change(self) -> None:
        for holder, (seq, names) in self.reader._held.items():
            assert names == self.history[holder, seq]

    @invariant()
    def each_name_knows_who_has_it(self) -> None:
        slots = {holder: self.reader.slot(holder) for holder in self.reader._held}
        assert 0 not in slots.values()
        assert len(set(slots.values())) == len(slots)
        given = sorted([*slots.values(), *self.reader._vacant])
        assert given == list(range(1, len(given) + 1))
        bits: dict[bytes, int] = {}
        for holder, (_, names) in self.reader._held.items():
            for name in names:
                bits[name] = bits.get(name, 0) | 1 << slots[holder]
        assert self.reader._bits == bits


TestDirectory = Directory.TestCase
TestDirectory.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


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
