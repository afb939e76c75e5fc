"""Who holds which KV block: a pool, and allocations that carry their own release. Pure bookkeeping, no memory.

    free ──allocate──> owned ──────────┬──release──> free
    free ──allocate(reserved)──> reserved ──activate──> owned
    reserved | owned ──quarantine──> quarantined ──unquarantine──> free

A quarantined block may still be read or written by a peer, so only proof of the contrary frees it, never a timer.
"""

from __future__ import annotations

import enum

from baton.core import BlockCounts


class BlockState(enum.Enum):
    """Where the blocks of one allocation are. All blocks of an allocation share one state."""

    RESERVED = "reserved"
    OWNED = "owned"
    QUARANTINED = "quarantined"
    RELEASED = "released"


HOLDING = (BlockState.RESERVED, BlockState.OWNED)


class Allocation:
    """Blocks of one holder, in the order of the positions that they hold.

    `generations[i]` tells this use of `blocks[i]` from earlier and later ones. Both lists are empty after `release`.
    Methods raise ValueError in a state that the picture above does not allow.
    """

    __slots__ = ("_pool", "blocks", "generations", "state")

    def __init__(self, pool: BlockPool, blocks: list[int], generations: list[int], state: BlockState) -> None:
        self._pool = pool
        self.blocks = blocks
        self.generations = generations
        self.state = state

    def __len__(self) -> int:
        return len(self.blocks)

    def activate(self) -> None:
        """Reserved blocks become owned: what they hold is in use from now on."""
        self._expect(BlockState.RESERVED)
        self._pool._move(self, BlockState.OWNED)

    def grow(self, n: int) -> bool:
        """Append `n` more blocks in the same state; False, and nothing changed, if that many are not free."""
        self._expect(*HOLDING)
        return self._pool._grow(self, n)

    def release(self) -> None:
        """Free the blocks. Again on a released allocation: nothing happens."""
        if self.state is BlockState.RELEASED:
            return
        self._expect(*HOLDING)
        self._pool._free_all(self)

    def quarantine(self) -> None:
        """Set the blocks aside until `BlockPool.unquarantine`: somebody may still touch them."""
        self._expect(*HOLDING)
        self._pool._move(self, BlockState.QUARANTINED)

    def belongs_to(self, pool: BlockPool) -> bool:
        """Whether the blocks are of `pool`."""
        return self._pool is pool

    def _expect(self, *states: BlockState) -> None:
        if self.state not in states:
            raise ValueError(f"allocation is {self.state.value}, not {' or '.join(s.value for s in states)}")


class BlockPool:
    """The blocks 0..total-1 of one worker. Used by one thread. After every transition the ledger must add up."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one block, got {total}")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._generation = [0] * total
        self._held = dict.fromkeys(BlockState, 0)

    @property
    def free(self) -> int:
        """How many blocks can be allocated now."""
        return len(self._free)

    def counts(self) -> BlockCounts:
        """The ledger, checked. Raises AssertionError if a block was lost or counted twice."""
        return BlockCounts(
            total=self.total,
            free=len(self._free),
            reserved=self._held[BlockState.RESERVED],
            owned=self._held[BlockState.OWNED],
            quarantined=self._held[BlockState.QUARANTINED],
        ).check()

    def allocate(self, n: int, *, reserved: bool = False) -> Allocation | None:
        """`n` blocks, owned or reserved, or None if that many are not free."""
        allocation = Allocation(self, [], [], BlockState.RESERVED if reserved else BlockState.OWNED)
        return allocation if self._grow(allocation, n) else None

    def unquarantine(self, allocation: Allocation) -> None:
        """Free quarantined blocks: it is proven that nobody will touch them. Raises ValueError for any other."""
        if not allocation.belongs_to(self):
            raise ValueError("allocation of another pool")
        allocation._expect(BlockState.QUARANTINED)
        self._free_all(allocation)

    def _grow(self, allocation: Allocation, n: int) -> bool:
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > len(self._free):
            return False
        taken = [self._free.pop() for _ in range(n)]
        for block in taken:
            self._generation[block] += 1
        allocation.blocks += taken
        allocation.generations += [self._generation[block] for block in taken]
        self._held[allocation.state] += n
        self.counts()
        return True

    def _move(self, allocation: Allocation, state: BlockState) -> None:
        self._held[allocation.state] -= len(allocation)
        self._held[state] += len(allocation)
        allocation.state = state
        self.counts()

    def _free_all(self, allocation: Allocation) -> None:
        now = [self._generation[block] for block in allocation.blocks]
        if now != allocation.generations:
            raise AssertionError(f"blocks {allocation.blocks} have generations {now}, not {allocation.generations}")
        self._held[allocation.state] -= len(allocation)
        self._free += reversed(allocation.blocks)
        allocation.blocks, allocation.generations = [], []
        allocation.state = BlockState.RELEASED
        self.counts()
