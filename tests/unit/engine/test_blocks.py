from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.engine.block_pool import HOLDING, BlockPool, BlockState
from tests.support.engines import allocated

TOTAL = 12
CHAINS = "abc"  # a block's content is a chain's name and a length: "a1", "a2", ...


def names(chain, first, end):
    return [f"{chain}{number}".encode() for number in range(first, end)]


def has(*states):
    return precondition(lambda self: any(a.state in states for a in self.holders))


class PoolMachine(RuleBasedStateMachine):
    """Random allocations, compared with a model of the content of each block and of the prefix cache.

    Each allocation writes one chain: its first `full` blocks have the chain's first contents.
    """

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.holders = {}  # allocation -> (chain, number of its full and cached blocks)
        self.uses = {}  # block -> its last generation
        self.written = {}  # block -> its content since its last allocation
        self.doubted = set()  # blocks that may not be found any more in this use

    def note(self, allocation, first):
        """Record fresh blocks: a new use of each, without its old content."""
        for block, generation in zip(allocation.blocks[first:], allocation.generations[first:], strict=True):
            assert generation > self.uses.get(block, 0)
            assert not any(block in other.blocks for other in self.holders if other is not allocation)
            self.uses[block] = generation
            self.written.pop(block, None)
            self.doubted.discard(block)

    def room(self):
        return TOTAL - len({block for holder in self.holders for block in holder.blocks})

    def pick(self, data, *states):
        return data.draw(st.sampled_from([a for a in self.holders if a.state in states]))

    @rule(n=st.integers(0, TOTAL + 1), reserved=st.booleans(), chain=st.sampled_from(CHAINS), spare=st.integers(0, 3))
    def allocate(self, n, reserved, chain, spare):
        room = self.room()
        allocation = self.pool.allocate(n, reserved=reserved, spare=spare)
        assert (allocation is not None) == (n + spare <= room)
        if allocation is not None:
            self.holders[allocation] = (chain, 0)
            self.note(allocation, 0)

    @rule(n=st.integers(0, 4), chain=st.sampled_from(CHAINS), most=st.integers(0, 5))
    def allocate_behind_what_is_found(self, n, chain, most):
        shared = self.pool.find(names(chain, 0, most))
        assert [self.written[block] for block in shared] == names(chain, 0, len(shared)), "stale content"
        assert not self.doubted & set(shared)
        held = {block for holder in self.holders for block in holder.blocks}
        room = self.room()
        allocation = self.pool.allocate(n, shared=shared)
        assert (allocation is not None) == (n + len(set(shared) - held) <= room)
        if allocation is not None:
            self.holders[allocation] = (chain, len(shared))
            assert allocation.blocks[: len(shared)] == shared
            assert allocation.generations[: len(shared)] == [self.uses[block] for block in shared]
            self.note(allocation, len(shared))

    @rule(n=st.integers(0, 4), chain=st.sampled_from(CHAINS), most=st.integers(0, 5))
    def reserve_behind_what_is_found(self, n, chain, most):
        """Allocate like a reservation: pin shared blocks, reserve the rest, join both."""
        shared = self.pool.find(names(chain, 0, most))
        head = allocated(self.pool, 0, shared=shared)
        own = self.pool.allocate(n, reserved=True)
        if own is None:
            head.release()
            assert self.pool.available == self.room()
            return
        self.holders[own] = (chain, 0)
        self.note(own, 0)
        own.activate()
        whole = head.blocks + own.blocks, head.generations + own.generations
        own.prepend(head)
        self.holders[own] = (chain, len(shared))
        assert (own.blocks, own.generations) == whole
        assert (head.blocks, head.generations, head.state) == ([], [], BlockState.RELEASED)

    @has(BlockState.OWNED)
    @rule(data=st.data(), n=st.integers(1, 4))
    def fill_and_publish(self, data, n):
        allocation = self.pick(data, BlockState.OWNED)
        chain, full = self.holders[allocation]
        end = min(full + n, len(allocation))
        allocation.check_writable(full, end)
        for block, content in zip(allocation.blocks[full:end], names(chain, full, end), strict=True):
            self.written[block] = content
        allocation.publish(full, names(chain, full, end))
        self.holders[allocation] = (chain, end)

    @has(BlockState.OWNED)
    @rule(data=st.data())
    def full_blocks_cannot_be_written(self, data):
        allocation = self.pick(data, BlockState.OWNED)
        chain, full = self.holders[allocation]
        for i in range(full):
            known = allocation.blocks[i] not in self.doubted
            if known or sum(allocation.blocks[i] in holder.blocks for holder in self.holders) > 1:
                with pytest.raises(AssertionError, match="must not change"):
                    allocation.check_writable(i, i + 1)
            if known:
                with pytest.raises(AssertionError, match="must not change"):
                    allocation.publish(i, names(chain, i, i + 1))

    @has(*HOLDING)
    @rule(data=st.data(), n=st.integers(0, 4))
    def grow(self, data, n):
        allocation = self.pick(data, *HOLDING)
        before, room = list(allocation.blocks), self.room()
        grown = allocation.grow(n)
        assert grown == (n <= room)
        assert allocation.blocks[: len(before)] == before
        assert len(allocation) == len(before) + n * grown
        self.note(allocation, len(before))

    @has(*HOLDING)
    @rule(data=st.data())
    def activate(self, data):
        allocation = self.pick(data, *HOLDING)
        if allocation.state is BlockState.RESERVED:
            with pytest.raises(ValueError, match="is reserved"):
                allocation.publish(0, names("a", 0, 1))
            allocation.activate()
            return
        with pytest.raises(ValueError, match="not reserved"):
            allocation.activate()

    @has(*HOLDING)
    @rule(data=st.data())
    def release(self, data):
        allocation = self.pick(data, *HOLDING)
        wanted = self.pool.available + self.pool.freed_by([allocation])
        allocation.release()
        allocation.release()
        assert self.pool.available == wanted
        del self.holders[allocation]
        assert allocation.blocks == allocation.generations == []
        with pytest.raises(ValueError, match="is released"):
            allocation.grow(1)

    @has(*HOLDING)
    @rule(data=st.data(), isolate=st.booleans())
    def withdraw_or_quarantine(self, data, isolate):
        allocation = self.pick(data, *HOLDING)
        self.doubted |= set(allocation.blocks[: self.holders[allocation][1]])
        if not isolate:
            allocation.withdraw()
            return
        allocation.quarantine()
        with pytest.raises(ValueError, match="is quarantined"):
            allocation.release()

    @has(BlockState.QUARANTINED)
    @rule(data=st.data())
    def unquarantine(self, data):
        allocation = self.pick(data, BlockState.QUARANTINED)
        with pytest.raises(ValueError, match="another pool"):
            BlockPool(TOTAL).unquarantine(allocation)
        self.pool.unquarantine(allocation)
        del self.holders[allocation]

    @invariant()
    def ledger(self):
        by_state = {state: {b for h in self.holders if h.state is state for b in h.blocks} for state in BlockState}
        isolated = by_state[BlockState.QUARANTINED]
        counts = self.pool.counts()
        assert counts.available == self.room() == self.pool.available
        assert counts.reserved == len(by_state[BlockState.RESERVED])
        assert counts.quarantined == len(isolated)
        assert counts.owned == len(by_state[BlockState.OWNED] - isolated)

    @invariant()
    def only_what_is_published_is_shared_and_found(self):
        held = Counter(block for holder in self.holders for block in holder.blocks)
        for allocation, (chain, full) in self.holders.items():
            assert allocation.generations == [self.uses[block] for block in allocation.blocks], "used by others since"
            assert all(held[block] == 1 for block in allocation.blocks[full:])
            if allocation.state is not BlockState.RESERVED:
                assert [self.written[block] for block in allocation.blocks[:full]] == names(chain, 0, full)
        for chain in CHAINS:
            for content in names(chain, 0, 8):
                for block in self.pool.find([content]):
                    assert self.written[block] == content
                    assert block not in self.doubted


TestPool = pytest.mark.slow(PoolMachine.TestCase)
TestPool.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def filled(pool, chain, n, shared=()):
    """Return an allocation of `n` cached blocks. The first ones are `shared`."""
    allocation = allocated(pool, n - len(shared), shared=shared)
    allocation.publish(len(shared), names(chain, len(shared), n))
    return allocation


def chain_left(pool, chain):
    return len(pool.find(names(chain, 0, TOTAL)))


def test_the_least_recently_used_goes_first_and_tails_before_heads():
    pool = BlockPool(TOTAL)
    for chain in ("a", "b"):
        filled(pool, chain, 4).release()
    filled(pool, "a", 4, pool.find(names("a", 0, 4))).release()  # used again, so "b" is older now
    left = []
    taken = allocated(pool, 4)
    while taken.grow(1):
        left.append((chain_left(pool, "a"), chain_left(pool, "b")))
    assert left == [(4, 3), (4, 2), (4, 1), (4, 0), (3, 0), (2, 0), (1, 0), (0, 0)]
    assert pool.counts().owned == TOTAL


def test_of_equal_contents_one_stays_and_is_as_fresh_as_the_last_used():
    pool = BlockPool(TOTAL)
    first, second = filled(pool, "a", 3), filled(pool, "a", 4)  # computed concurrently
    first.release()
    filled(pool, "b", 1).release()
    second.release()
    assert pool.counts().cached == 5
    pool.allocate(TOTAL - 4)
    assert (chain_left(pool, "a"), chain_left(pool, "b")) == (4, 0)


def test_the_twin_of_an_evicted_block_takes_its_place():
    pool = BlockPool(4)
    first, second = filled(pool, "a", 2), filled(pool, "a", 2)
    first.release()
    other = allocated(pool, 2)
    assert chain_left(pool, "a") == 0
    second.release()
    assert chain_left(pool, "a") == 2
    other.release()
    assert pool.counts().cached == 2


def test_a_shared_block_is_quarantined_until_both_quarantines_end():
    pool = BlockPool(4)
    one, two = filled(pool, "a", 2), allocated(pool, 1, shared=pool.find(names("a", 0, 2)))
    one.quarantine()
    two.quarantine()
    pool.unquarantine(one)
    assert (pool.counts().quarantined, pool.available) == (3, 1)


def test_a_reservation_shares_nothing():
    pool = BlockPool(4)
    filled(pool, "a", 2).release()
    with pytest.raises(ValueError, match="cannot share blocks"):
        pool.allocate(1, reserved=True, shared=pool.find(names("a", 0, 2)))
    allocated(pool, 4, reserved=True)
    assert chain_left(pool, "a") == 0
    with pytest.raises(AssertionError, match="is not cached"):
        pool.allocate(0, shared=[0])


def test_a_block_that_is_held_twice_or_lost_is_noticed():
    pool = BlockPool(4)
    first, second = allocated(pool, 1), allocated(pool, 1)
    second.blocks[:] = first.blocks
    first.release()
    allocated(pool, 1)
    with pytest.raises(AssertionError, match="generations"):
        second.release()
    pool = BlockPool(4)
    pool._free.pop()
    with pytest.raises(AssertionError, match="does not add up"):
        pool.counts()


def test_sizes_that_cannot_be_are_refused():
    for total in (0, -1):
        with pytest.raises(ValueError, match="at least one block"):
            BlockPool(total)
    with pytest.raises(ValueError, match="-1 blocks"):
        BlockPool(2).allocate(-1)
