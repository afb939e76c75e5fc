import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from baton.engine.blocks import BlockPool, BlockState

TOTAL = 12


class PoolMachine(RuleBasedStateMachine):
    """Random lives of allocations, against a model that only counts."""

    live = Bundle("live")
    quarantined = Bundle("quarantined")

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.holders = []
        self.uses = {}  # block -> generations seen

    def note(self, blocks, generations):
        for block, generation in zip(blocks, generations, strict=True):
            assert generation > self.uses.get(block, 0)
            self.uses[block] = generation

    def free(self):
        return TOTAL - sum(len(holder) for holder in self.holders)

    @rule(target=live, n=st.integers(0, TOTAL + 1), reserved=st.booleans())
    def allocate(self, n, reserved):
        room = self.free()
        allocation = self.pool.allocate(n, reserved=reserved)
        assert (allocation is not None) == (n <= room)
        if allocation is None:
            allocation = self.pool.allocate(0)
            assert allocation is not None
        self.note(allocation.blocks, allocation.generations)
        self.holders.append(allocation)
        return allocation

    @rule(allocation=live, n=st.integers(0, 4))
    def grow(self, allocation, n):
        before, room = list(allocation.blocks), self.free()
        grown = allocation.grow(n)
        assert grown == (n <= room)
        assert allocation.blocks[: len(before)] == before
        assert len(allocation) == len(before) + n * grown
        self.note(allocation.blocks[len(before) :], allocation.generations[len(before) :])

    @rule(allocation=live)
    def activate(self, allocation):
        if allocation.state is BlockState.RESERVED:
            allocation.activate()
            return
        with pytest.raises(ValueError, match="not reserved"):
            allocation.activate()

    @rule(allocation=consumes(live))
    def release(self, allocation):
        allocation.release()
        allocation.release()
        self.holders.remove(allocation)
        assert allocation.blocks == allocation.generations == []
        with pytest.raises(ValueError, match="is released"):
            allocation.grow(1)

    @rule(target=quarantined, allocation=consumes(live))
    def quarantine(self, allocation):
        allocation.quarantine()
        with pytest.raises(ValueError, match="is quarantined"):
            allocation.release()
        return allocation

    @rule(allocation=consumes(quarantined))
    def unquarantine(self, allocation):
        with pytest.raises(ValueError, match="another pool"):
            BlockPool(TOTAL).unquarantine(allocation)
        self.pool.unquarantine(allocation)
        self.holders.remove(allocation)

    @invariant()
    def ledger(self):
        counts = self.pool.counts()
        by_state = {state: sum(len(h) for h in self.holders if h.state is state) for state in BlockState}
        assert counts.free == self.free() == self.pool.free
        assert counts.reserved == by_state[BlockState.RESERVED]
        assert counts.owned == by_state[BlockState.OWNED]
        assert counts.quarantined == by_state[BlockState.QUARANTINED]
        assert counts.cached == 0

    @invariant()
    def nobody_shares(self):
        held = [block for holder in self.holders for block in holder.blocks]
        assert len(held) == len(set(held))
        assert set(held) <= set(range(TOTAL))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_block_held_twice_is_noticed():
    pool = BlockPool(4)
    first, second = pool.allocate(1), pool.allocate(1)
    assert first
    assert second
    second.blocks[:] = first.blocks
    first.release()
    pool.allocate(1)
    with pytest.raises(AssertionError, match="generations"):
        second.release()


def test_lost_block_is_noticed():
    pool = BlockPool(4)
    pool._free.pop()
    with pytest.raises(AssertionError, match="does not add up"):
        pool.counts()


@pytest.mark.parametrize("total", [0, -1])
def test_empty_pool_is_refused(total):
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(total)


def test_negative_allocation_is_refused():
    with pytest.raises(ValueError, match="-1 blocks"):
        BlockPool(2).allocate(-1)
