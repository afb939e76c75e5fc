"""Who holds which KV block: a pool, and allocations that carry their own release. Pure bookkeeping, no memory.

    free | cached ──allocate──> owned ──release──> cached if it is published, else free
    free | cached ──allocate(reserved)──> reserved ──activate──> owned
    cached | owned ──allocate(shared=)──> owned, by one more holder
    reserved | owned ──quarantine──> quarantined ──unquarantine──> free

A published block is full, is found by the digest of its content, and never changes again. It may have several holders,
but counts once. Without a holder it is cached: still found, until the room is needed (the least recently used goes
first, the tail of a chain before its head). A quarantined block may still be read or written by a peer, so only proof
of the contrary frees it, never a timer, and nobody new finds it.

Room for a sequence whose KV comes from elsewhere: what is here already, and blocks for the rest.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from baton.core import BlockCounts
from baton.event_journal import OFF

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from baton.core import KVLayout
    from baton.event_journal import History


class BlockState(enum.Enum):
    """Where the blocks of one allocation are. All blocks of an allocation share one state."""

    RESERVED = "reserved"
    OWNED = "owned"
    QUARANTINED = "quarantined"
    RELEASED = "released"


HOLDING = (BlockState.RESERVED, BlockState.OWNED)


class Allocation:
    """Blocks of one holder, in the order of the positions that they hold.

    `generations[i]` tells this use of `blocks[i]` from earlier and later ones; those who share a block share it. Both
    lists are empty after `release`. Methods raise ValueError in a state that the picture above does not allow.
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
        self._pool._activate(self)

    def grow(self, n: int) -> bool:
        """Append `n` more blocks in the same state; False, and nothing changed, if that many are not available."""
        self._expect(*HOLDING)
        return self._pool._grow(self, n)

    def prepend(self, head: Allocation) -> None:
        """The blocks of `head`, shared ones, come before its own and are its own from now on. Both must be owned."""
        self._expect(BlockState.OWNED)
        head._expect(BlockState.OWNED)
        self.blocks, self.generations = head.blocks + self.blocks, head.generations + self.generations
        head.blocks, head.generations, head.state = [], [], BlockState.RELEASED

    def publish(self, first: int, digests: Sequence[bytes]) -> None:
        """From its `first` block on, these are the contents: full, to be found by others, never to change again.

        Raises AssertionError for a block that is published already: it was written twice.
        """
        self._expect(BlockState.OWNED)
        self._pool._publish(self.blocks[first : first + len(digests)], digests)

    def withdraw(self) -> None:
        """What its blocks hold is in doubt: nobody finds them any more. Other holders go on."""
        for block in self.blocks:
            self._pool._withdraw(block)

    def check_writable(self, first: int, end: int) -> None:
        """Raises AssertionError if one of its blocks first..end-1 is published or shared: others may read it."""
        self._pool._check_writable(self.blocks[first:end])

    def release(self) -> None:
        """Let go of the blocks. Again on a released allocation: nothing happens."""
        if self.state is BlockState.RELEASED:
            return
        self._expect(*HOLDING)
        self._pool._let_go(self)

    def quarantine(self) -> None:
        """Set the blocks aside until `BlockPool.unquarantine`: somebody may still touch them. Other holders go on."""
        self._expect(*HOLDING)
        self._pool._quarantine(self)

    def belongs_to(self, pool: BlockPool) -> bool:
        """Whether the blocks are of `pool`."""
        return self._pool is pool

    def _expect(self, *states: BlockState) -> None:
        if self.state not in states:
            raise ValueError(f"allocation is {self.state.value}, not {' or '.join(s.value for s in states)}")


class BlockPool:
    """The blocks 0..total-1 of one worker. Used by one thread. After every transition the ledger must add up.

    `on_index(added, removed)`: contents that are found from now on, and that are not any more.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one block, got {total}")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._generation = [0] * total
        self._holders = [0] * total  # allocations that name the block, in whatever state
        self._isolated: Counter[int] = Counter()  # those of them in quarantine; no zeros
        self._digest: list[bytes | None] = [None] * total
        self._index: dict[bytes, int] = {}  # of blocks with equal content, the first one published
        self.on_index: Callable[[Sequence[bytes], Sequence[bytes]], None] = lambda added, removed: None
        self._held = dict.fromkeys(BlockState, 0)
        self.history: History = OFF  # kept by those who allocate here: they know for whom

    @property
    def available(self) -> int:
        """How many blocks can be allocated now: those that are free, and those that are only cached."""
        return len(self._free) + len(self._cached)

    def counts(self) -> BlockCounts:
        """The ledger, checked. Raises AssertionError if a block was lost or counted twice."""
        return BlockCounts(
            total=self.total,
            free=len(self._free),
            reserved=self._held[BlockState.RESERVED],
            owned=self._held[BlockState.OWNED],
            cached=len(self._cached),
            quarantined=self._held[BlockState.QUARANTINED],
        ).check()

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Blocks with these contents, up to the first that nobody has. To be shared before anything else happens."""
        found: list[int] = []
        for digest in digests:
            if (block := self._index.get(digest)) is None:
                break
            found.append(block)
        return found

    def can_share(self, blocks: Iterable[int]) -> bool:
        """Whether all of these, which were found once, still are what they were: none was withdrawn."""
        return all(self._digest[block] is not None for block in blocks)

    def allocate(
        self, n: int, *, reserved: bool = False, shared: Sequence[int] = (), spare: int = 0
    ) -> Allocation | None:
        """The `shared` blocks (from `find`) and `n` more, or None if that leaves less than `spare` available.

        A reservation shares nothing: a peer may write into all of it.
        """
        if reserved and shared:
            raise ValueError("reserved blocks are not shared")
        if self.available < n + spare + sum(not self._holders[block] for block in shared):
            return None
        for block in shared:
            self._share(block)
        state = BlockState.RESERVED if reserved else BlockState.OWNED
        allocation = Allocation(self, list(shared), [self._generation[block] for block in shared], state)
        self._grow(allocation, n)
        return allocation

    def unquarantine(self, allocation: Allocation) -> None:
        """Free quarantined blocks: it is proven that nobody will touch them. Raises ValueError for any other."""
        if not allocation.belongs_to(self):
            raise ValueError("allocation of another pool")
        allocation._expect(BlockState.QUARANTINED)
        self._let_go(allocation)

    def freed_by(self, allocations: Iterable[Allocation]) -> int:
        """How many more blocks were available if all these were released."""
        named = Counter(chain.from_iterable(allocation.blocks for allocation in allocations))
        return sum(self._holders[block] == holders for block, holders in named.items())

    def _grow(self, allocation: Allocation, n: int) -> bool:
        if n < 0:
            raise ValueError(f"cannot allocate {n} blocks")
        if n > self.available:
            return False
        taken = [self._take() for _ in range(n)]
        allocation.blocks += taken
        allocation.generations += [self._generation[block] for block in taken]
        self._held[allocation.state] += n
        self.counts()
        return True

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._withdraw(block)
        self._generation[block] += 1
        self._holders[block] = 1
        return block

    def _share(self, block: int) -> None:
        if self._digest[block] is None:
            raise AssertionError(f"block {block} is not published")
        if not self._holders[block]:
            del self._cached[block]
            self._held[BlockState.OWNED] += 1
        self._holders[block] += 1

    def _publish(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        self._check_writable(blocks)
        new = [digest for digest in digests if digest not in self._index]
        for block, digest in zip(blocks, digests, strict=True):
            self._digest[block] = digest
            self._index.setdefault(digest, block)
        self.on_index(new, ())

    def _withdraw(self, block: int) -> None:
        """Out of the index, for good. A cached block is only withdrawn when it is taken."""
        digest, self._digest[block] = self._digest[block], None
        if digest is not None and self._index.get(digest) == block:
            del self._index[digest]
            self.on_index((), (digest,))

    def _check_writable(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._digest[block] is not None or self._holders[block] != 1:
                raise AssertionError(f"block {block} is published, or not one's own: it must not change")

    def _activate(self, allocation: Allocation) -> None:
        self._held[BlockState.RESERVED] -= len(allocation)
        self._held[BlockState.OWNED] += len(allocation)
        allocation.state = BlockState.OWNED
        self.counts()

    def _quarantine(self, allocation: Allocation) -> None:
        for block in allocation.blocks:
            self._withdraw(block)
            if block not in self._isolated:
                self._held[allocation.state] -= 1
                self._held[BlockState.QUARANTINED] += 1
            self._isolated[block] += 1
        allocation.state = BlockState.QUARANTINED
        self.counts()

    def _let_go(self, allocation: Allocation) -> None:
        now = [self._generation[block] for block in allocation.blocks]
        if now != allocation.generations:
            raise AssertionError(f"blocks {allocation.blocks} have generations {now}, not {allocation.generations}")
        drop = self._end_quarantine if allocation.state is BlockState.QUARANTINED else self._drop
        for block in reversed(allocation.blocks):  # the tail of a chain is cached first, and evicted first
            drop(block, allocation.state)
        allocation.blocks, allocation.generations = [], []
        allocation.state = BlockState.RELEASED
        self.counts()

    def _drop(self, block: int, state: BlockState) -> None:
        self._holders[block] -= 1
        if not self._holders[block]:
            self._held[state] -= 1
            self._retire(block)

    def _end_quarantine(self, block: int, _: BlockState) -> None:
        """One holder in quarantine less. The block counts as quarantined until the last of these is gone."""
        self._isolated[block] -= 1
        if not self._isolated[block]:
            del self._isolated[block]
            self._held[BlockState.QUARANTINED] -= 1
            self._held[BlockState.OWNED] += 1  # of those who shared it, if any; else `_drop` takes it back
        self._drop(block, BlockState.OWNED)

    def _retire(self, block: int) -> None:
        """Nobody holds the block any more. One of each content stays, as recently used as the last holder of any."""
        digest = self._digest[block]
        if digest is not None and digest not in self._index:
            self._index[digest] = block
            self.on_index((digest,), ())
        kept = block if digest is None else self._index[digest]
        if digest is not None and kept == block:
            self._cached[block] = None
            return
        if kept in self._cached:
            self._cached.move_to_end(kept)
        self._digest[block] = None
        self._free.append(block)


@dataclass(frozen=True, slots=True)
class Reservation:
    """`shared` holds the first `cached_tokens` positions, in blocks that nobody may write; `own` is reserved."""

    shared: Allocation
    own: Allocation
    cached_tokens: int

    @classmethod
    def of(
        cls, pool: BlockPool, layout: KVLayout, positions: int, names: Iterable[bytes], spare: int
    ) -> Reservation | None:
        """Room for so many positions, of whose first full blocks those that are found by their names are shared; None:
        not while `spare` blocks are to be left.
        """
        shared = pool.allocate(0, shared=pool.find(names))
        assert shared is not None  # nobody has to make room for them
        own = pool.allocate(layout.blocks_for(positions) - len(shared), reserved=True, spare=spare)
        if own is None:
            shared.release()
            return None
        return cls(shared, own, len(shared) * layout.block_size)

    @property
    def blocks(self) -> list[int]:
        """All blocks, in the order of their positions."""
        return self.shared.blocks + self.own.blocks

    @property
    def generations(self) -> list[int]:
        """Of these blocks."""
        return self.shared.generations + self.own.generations

    def check(self, pool: BlockPool, blocks: int) -> None:
        """Raises ValueError if it is not of `pool`, has fewer blocks, or is used already."""
        if not self.own.belongs_to(pool) or len(self.blocks) < blocks:
            raise ValueError(f"a reservation of {len(self.blocks)} blocks does not fit: {blocks} are needed")
        if self.own.state is not BlockState.RESERVED:
            raise ValueError(f"the reservation is {self.own.state.value}, not reserved")

    def activate(self) -> Allocation:
        """All KV is there: one allocation, owned. The reservation must not be used any more."""
        self.own.activate()
        self.own.prepend(self.shared)
        return self.own

    def release(self) -> None:
        """Let go of all of it. Idempotent."""
        self.own.release()
        self.shared.release()
