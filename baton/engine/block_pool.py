"""Ownership of KV blocks: a pool, and allocations that carry their own release. Pure bookkeeping, no memory.

    free | cached ──allocate──> owned ──release──> cached if it has a hash, else free
    free | cached ──allocate(reserved)──> reserved ──activate──> owned
    cached | owned ──allocate(shared=)──> owned, with reference count + 1
    reserved | owned ──quarantine──> quarantined ──unquarantine──> free

A block with a hash is full, can be found, and never changes again. Several allocations may share it, but it counts
once. At reference count 0 it stays cached until its space is needed: the least recently used goes first, the tail of a
chain before its head. A quarantined block may still be read or written by a peer. It is not found any more, and only
proof that access has ended frees it, never a timer.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import chain

from baton.core import BlockCounts, KVLayout
from baton.event_journal import OFF, History


class BlockState(enum.Enum):
    """State of an allocation, and of all its blocks."""

    RESERVED = "reserved"
    OWNED = "owned"
    QUARANTINED = "quarantined"
    RELEASED = "released"


HOLDING = (BlockState.RESERVED, BlockState.OWNED)


class Allocation:
    """Blocks of one owner, in the order of the positions that they hold. `generations[i]` distinguishes this use of
    `blocks[i]` from earlier and later ones. Methods raise ValueError in states that the diagram above forbids.
    """

    __slots__ = ("_pool", "blocks", "generations", "slot", "state")

    def __init__(self, pool: BlockPool, blocks: list[int], generations: list[int], state: BlockState) -> None:
        self._pool, self.state = pool, state
        self.blocks, self.generations = blocks, generations
        self.slot: int | None = None  # of the state of recurrent layers, in a pool with slots

    def __len__(self) -> int:
        return len(self.blocks)

    def activate(self) -> None:
        """Change reserved blocks to owned, because their content is in use from now on."""
        self._expect(BlockState.RESERVED)
        self._pool._activate(self)

    def grow(self, n: int) -> bool:
        """Append `n` blocks in the same state. If that many are not available, change nothing and return False."""
        self._expect(*HOLDING)
        return self._pool._grow(self, n)

    def prepend(self, head: Allocation) -> None:
        """Move the shared blocks of `head` in front of the blocks here. Both allocations must be owned."""
        self._expect(BlockState.OWNED)
        head._expect(BlockState.OWNED)
        self.blocks, self.generations = head.blocks + self.blocks, head.generations + self.generations
        head.blocks, head.generations, head.state = [], [], BlockState.RELEASED

    def publish(self, first: int, digests: Sequence[bytes]) -> None:
        """Cache full blocks from number `first` on. Raises AssertionError if one is cached or shared already."""
        self._expect(BlockState.OWNED)
        self._pool._publish(self.blocks[first : first + len(digests)], digests)

    def withdraw(self) -> None:
        """Remove the blocks from the cache, because their content is in doubt. Other allocations keep them."""
        for block in self.blocks:
            self._pool._withdraw(block)

    def check_writable(self, first: int, end: int) -> None:
        """Raise AssertionError if one of the blocks first..end-1 is cached or shared."""
        self._pool._check_writable(self.blocks[first:end])

    def release(self) -> None:
        """Release the blocks. A second call does nothing."""
        if self.state is BlockState.RELEASED:
            return
        self._expect(*HOLDING)
        self._pool._let_go(self)

    def quarantine(self) -> None:
        """Set blocks aside until `unquarantine`: a peer may still access them. Other allocations keep them."""
        self._expect(*HOLDING)
        self._pool._quarantine(self)

    def _expect(self, *states: BlockState) -> None:
        if self.state not in states:
            raise ValueError(f"the allocation is {self.state.value}, not {' or '.join(s.value for s in states)}")


class BlockPool:
    """The blocks 0..total-1 of one worker. Used by one thread. The counts must add up after every transition.
    `on_index(added, removed)` receives hashes that can be found from now on, and those that no longer can.
    `generations` has a number for each block, which changes before the block is given out again; by default a list.
    In a pool of `slots`, each sequence also has one of so many slots for the state of recurrent layers, from the
    allocation or reservation of its blocks until they are free.
    """

    def __init__(
        self, total: int, generations: MutableSequence[int] | None = None, *, slots: int | None = None
    ) -> None:
        if total < 1:
            raise ValueError(f"a pool needs at least one block, got {total}")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._slots = None if slots is None else list(range(slots - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._generation = [0] * total if generations is None else generations
        self._references = [0] * total  # allocations in any state
        self._isolated: Counter[int] = Counter()  # references in quarantine; no zeros
        self._digest: list[bytes | None] = [None] * total
        self._index: dict[bytes, int] = {}  # for equal content, the first block
        self.on_index: Callable[[Sequence[bytes], Sequence[bytes]], None] = lambda added, removed: None
        self._held = dict.fromkeys(BlockState, 0)
        self.history: History = OFF  # written by the users of the pool, which have the request id

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated now: free blocks, and cached ones without references."""
        return len(self._free) + len(self._cached)

    def counts(self) -> BlockCounts:
        """Return the block counts. Raises AssertionError if a block is missing or counted twice."""
        return BlockCounts(
            total=self.total,
            free=len(self._free),
            reserved=self._held[BlockState.RESERVED],
            owned=self._held[BlockState.OWNED],
            cached=len(self._cached),
            quarantined=self._held[BlockState.QUARANTINED],
        ).check()

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks with these hashes, up to the first miss. Share them before any other change."""
        found: list[int] = []
        for digest in digests:
            if (block := self._index.get(digest)) is None:
                break
            found.append(block)
        return found

    def can_share(self, blocks: Iterable[int]) -> bool:
        """Return whether all these blocks, found earlier, still have their content: none was withdrawn."""
        return all(self._digest[block] is not None for block in blocks)

    def allocate(
        self, n: int, *, reserved: bool = False, shared: Sequence[int] = (), spare: int = 0, sequence: bool = False
    ) -> Allocation | None:
        """Allocate the `shared` blocks (from `find`) and `n` more. None if fewer than `spare` would remain, or if they
        are for a `sequence` and the pool has no slot left.
        """
        if reserved and shared:
            raise ValueError("a reservation cannot share blocks, because a peer may write into all of it")
        if sequence and self._slots == []:
            return None
        if self.available < n + spare + sum(not self._references[block] for block in shared):
            return None
        for block in shared:
            self._share(block)
        state = BlockState.RESERVED if reserved else BlockState.OWNED
        allocation = Allocation(self, list(shared), [self._generation[block] for block in shared], state)
        self._grow(allocation, n)
        if sequence and self._slots is not None:
            allocation.slot = self._slots.pop()
        return allocation

    def unquarantine(self, allocation: Allocation) -> None:
        """Free quarantined blocks, after proof that no peer will access them. Raises ValueError in other states."""
        if allocation._pool is not self:
            raise ValueError("the allocation belongs to another pool")
        allocation._expect(BlockState.QUARANTINED)
        self._let_go(allocation)

    def freed_by(self, allocations: Iterable[Allocation]) -> int:
        """Return how many more blocks would be available if all these allocations were released."""
        counts = Counter(chain.from_iterable(allocation.blocks for allocation in allocations))
        return sum(self._references[block] == count for block, count in counts.items())

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
        self._references[block] = 1
        return block

    def _share(self, block: int) -> None:
        if self._digest[block] is None:
            raise AssertionError(f"block {block} is not cached, so it cannot be shared")
        if not self._references[block]:
            del self._cached[block]
            self._held[BlockState.OWNED] += 1
        self._references[block] += 1

    def _publish(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        self._check_writable(blocks)
        new = [digest for digest in digests if digest not in self._index]
        for block, digest in zip(blocks, digests, strict=True):
            self._digest[block] = digest
            self._index.setdefault(digest, block)
        self.on_index(new, ())

    def _withdraw(self, block: int) -> None:
        """Remove a block from the index for good. If it has no references, this only happens when it is taken."""
        digest, self._digest[block] = self._digest[block], None
        if digest is not None and self._index.get(digest) == block:
            del self._index[digest]
            self.on_index((), (digest,))

    def _check_writable(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._digest[block] is not None or self._references[block] != 1:
                raise AssertionError(f"block {block} is cached or shared, so it must not change")

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
        for block in reversed(allocation.blocks):  # so that the tail of a chain is evicted first
            drop(block, allocation.state)
        if allocation.slot is not None and self._slots is not None:
            self._slots.append(allocation.slot)
        allocation.blocks, allocation.generations, allocation.slot = [], [], None
        allocation.state = BlockState.RELEASED
        self.counts()

    def _drop(self, block: int, state: BlockState) -> None:
        self._references[block] -= 1
        if not self._references[block]:
            self._held[state] -= 1
            self._retire(block)

    def _end_quarantine(self, block: int, _: BlockState) -> None:
        """Drop one quarantined reference. The block counts as quarantined until the last one is dropped."""
        self._isolated[block] -= 1
        if not self._isolated[block]:
            del self._isolated[block]
            self._held[BlockState.QUARANTINED] -= 1
            self._held[BlockState.OWNED] += 1  # for allocations that share it; else `_drop` subtracts it
        self._drop(block, BlockState.OWNED)

    def _retire(self, block: int) -> None:
        """Cache or free a block without references. One block per content stays, marked as most recently used."""
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
    """Blocks for KV from elsewhere: `shared` are read-only with the first `cached_tokens` positions, `own` reserved."""

    shared: Allocation
    own: Allocation
    cached_tokens: int

    @classmethod
    def of(
        cls, pool: BlockPool, layout: KVLayout, positions: int, hashes: Iterable[bytes], spare: int
    ) -> Reservation | None:
        """Reserve blocks for `positions`, sharing those with `hashes`. None if fewer than `spare` would remain."""
        shared = pool.allocate(0, shared=pool.find(hashes))
        assert shared is not None  # sharing needs no free blocks
        own = pool.allocate(layout.blocks_for(positions) - len(shared), reserved=True, spare=spare, sequence=True)
        if own is None:
            shared.release()
            return None
        return cls(shared, own, len(shared) * layout.block_size)

    @property
    def blocks(self) -> list[int]:
        return self.shared.blocks + self.own.blocks

    @property
    def generations(self) -> list[int]:
        return self.shared.generations + self.own.generations

    def check(self, pool: BlockPool, blocks: int) -> None:
        """Raise ValueError if it is of another pool, has fewer than `blocks` blocks, or is already used."""
        if self.own._pool is not pool or len(self.blocks) < blocks:
            raise ValueError(f"the reservation has {len(self.blocks)} blocks; {blocks} of this pool are needed")
        if self.own.state is not BlockState.RESERVED:
            raise ValueError(f"the reservation is {self.own.state.value}, not reserved")

    def activate(self) -> Allocation:
        """Return all blocks as one owned allocation, after all KV has arrived. Ends the reservation."""
        self.own.activate()
        self.own.prepend(self.shared)
        return self.own

    def release(self) -> None:
        self.own.release()
        self.shared.release()
