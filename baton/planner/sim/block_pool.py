"""Block pool of a simulated worker: the accounting of `baton.engine.block_pool` in counts, without a list of blocks.

Blocks with content that other requests may share have a block hash and are found while they are cached. Other full
blocks stay and age in the same LRU order when they are freed, but are never found. Time and memory therefore grow with
the number of hashes, not of blocks. Block hashes are integers made by `BlockHashes`; 0 means that a block has none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from baton.bench.traces import Arrival
from baton.core import BlockCounts
from baton.engine.block_pool import Allocation, BlockPool, BlockState
from baton.event_journal import OFF
from baton.ledger.prefix_index import NAME_BYTES

Listener = Callable[[Sequence[int], Sequence[int]], None]


class Held(Allocation):
    """An allocation of `count` blocks. The first ones are found by `hashes`; `full` others have content but no hash."""

    __slots__ = ("count", "full", "hashes")

    def __init__(self, pool: CountedPool, hashes: list[int], state: BlockState) -> None:
        super().__init__(pool, [], [], state)
        self.hashes, self.count, self.full = hashes, len(hashes), 0

    def __len__(self) -> int:
        return self.count

    def publish(self, first: int, digests: Sequence[bytes]) -> None:
        """See `Allocation.publish`. Blocks with hashes precede those without."""
        assert isinstance(self._pool, CountedPool)
        self._pool.publish(self, cast("Sequence[int]", digests))

    def prepend(self, head: Allocation) -> None:
        assert isinstance(head, Held)
        self.hashes, self.count = head.hashes + self.hashes, head.count + self.count
        head.hashes, head.count, head.state = [], 0, BlockState.RELEASED

    def check_writable(self, first: int, end: int) -> None:
        """Do nothing: simulated blocks are never written."""


class CountedPool(BlockPool):
    """See `BlockPool`; `on_hashes(added, removed)` corresponds to `on_index`. `used_most`: peak of the blocks in use.
    `growing`: blocks of decoding sequences that are not part of an allocation yet (see `baton.planner.sim.engine`).
    """

    def __init__(self, total: int) -> None:  # without the constructor of BlockPool, which lists all blocks
        self.total = total
        self.history = OFF
        self.on_hashes: Listener = lambda added, removed: None
        self.used_most = self.growing = 0
        self._unused = total
        self._reserved = self._owned = 0
        self._kept: OrderedDict[int, int] = OrderedDict()  # freed blocks by hash, or by a negative number; oldest first
        self._kept_blocks = 0
        self._use_counts: dict[int, int] = {}  # reference count of each hash
        self._next = 0  # next negative number

    @property
    def available(self) -> int:
        return self._unused + self._kept_blocks

    def counts(self) -> BlockCounts:
        return BlockCounts(self.total, self._unused, self._reserved, self._owned + self.growing, self._kept_blocks)

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """See `BlockPool.find`. The hashes themselves identify the shared blocks."""
        found: list[int] = []
        for block_hash in cast("Iterable[int]", digests):
            if block_hash not in self._use_counts:
                break
            found.append(block_hash)
        return found

    def allocate(
        self, n: int, *, reserved: bool = False, shared: Sequence[int] = (), spare: int = 0, sequence: bool = False
    ) -> Allocation | None:
        references = self._use_counts
        if self.available < n + spare + (sum(not references[block_hash] for block_hash in shared) if shared else 0):
            return None
        for block_hash in shared:
            if not references[block_hash]:
                del self._kept[block_hash]
                self._kept_blocks -= 1
                self._owned += 1
            references[block_hash] += 1
        held = Held(self, list(shared), BlockState.RESERVED if reserved else BlockState.OWNED)
        self._grow(held, n)
        return held

    def freed_by(self, allocations: Iterable[Allocation]) -> int:
        """See `BlockPool.freed_by`. A block shared by several of the allocations counts as in use elsewhere."""
        freed = 0
        for held in allocations:
            assert isinstance(held, Held)
            freed += held.count - sum(self._use_counts[block_hash] > 1 for block_hash in held.hashes if block_hash)
        return freed

    def take(self, blocks: int) -> None:
        """Grow decoding sequences by `blocks` blocks, which must be available."""
        self._use(blocks)
        self.growing += blocks
        self._peak()

    def settle(self, allocation: Allocation, blocks: int) -> None:
        """Move `blocks` blocks from `growing` to an allocation. A negative number returns blocks taken in advance."""
        assert isinstance(allocation, Held)
        allocation.count += blocks
        self.growing -= blocks
        self._owned += blocks

    def publish(self, held: Held, hashes: Sequence[int]) -> None:
        """Cache the next full blocks of an allocation under these hashes."""
        if not hashes[0]:
            held.full += len(hashes)
            return
        added = [block_hash for block_hash in hashes if block_hash and block_hash not in self._use_counts]
        for block_hash in hashes:
            if not block_hash:
                held.full += 1
            elif block_hash in self._use_counts:
                held.hashes.append(0)
            else:
                self._use_counts[block_hash] = 1
                held.hashes.append(block_hash)
        self.on_hashes(added, ())

    def _grow(self, allocation: Allocation, n: int) -> bool:
        assert isinstance(allocation, Held)
        if n > self.available:
            return False
        self._use(n)
        allocation.count += n
        self._hold(allocation.state, n)
        self._peak()
        return True

    def _use(self, n: int) -> None:
        self._unused -= n
        lost: list[int] = []
        while self._unused < 0:
            key, blocks = self._kept.popitem(last=False)
            taken = min(blocks, -self._unused)
            if taken < blocks:
                self._kept[key] = blocks - taken
                self._kept.move_to_end(key, last=False)
            elif key > 0:
                del self._use_counts[key]
                lost.append(key)
            self._kept_blocks -= taken
            self._unused += taken
        if lost:
            self.on_hashes((), lost)

    def _hold(self, state: BlockState, n: int) -> None:
        if state is BlockState.RESERVED:
            self._reserved += n
        else:
            self._owned += n

    def _peak(self) -> None:
        self.used_most = max(self.used_most, self.total - self._unused - self._kept_blocks)

    def _activate(self, allocation: Allocation) -> None:
        self._reserved -= len(allocation)
        self._owned += len(allocation)
        allocation.state = BlockState.OWNED

    def _let_go(self, allocation: Allocation) -> None:
        assert isinstance(allocation, Held)
        held, references = allocation, self._use_counts
        self._hold(held.state, -held.count)
        self._unused += held.count - len(held.hashes) - held.full
        if held.full:
            self._next -= 1
            self._kept[self._next] = held.full
            self._kept_blocks += held.full
        for block_hash in reversed(held.hashes):  # evict the tail of a chain before its head
            if not block_hash:  # another block has the same hash
                self._unused += 1
            elif references[block_hash] == 1:
                references[block_hash] = 0
                self._kept[block_hash] = 1
                self._kept_blocks += 1
            else:
                references[block_hash] -= 1
                self._hold(held.state, 1)  # still in use by others
        held.hashes, held.count, held.full, held.state = [], 0, 0, BlockState.RELEASED


class Content:
    """Block hashes of a request as far as others may share them. It replaces the engine's `BlockHashChain`."""

    __slots__ = ("hashes",)

    def __init__(self, hashes: Sequence[int]) -> None:
        self.hashes = hashes

    def digest(self, block: int) -> int:
        """Return the hash of a block, or 0 if it has none."""
        return self.hashes[block] if block < len(self.hashes) else 0

    def digests(self, first: int, end: int) -> list[int]:
        hashes = self.hashes[first:end]
        return [*hashes, *[0] * (end - first - len(hashes))]


UNSHARED = Content(())
_NUMBER_BITS = 24  # bits for the block number and a flag for the last worker block of an arrival's block


class BlockHashes:
    """Hashes for the shared blocks of arrivals, in blocks of `block_size` tokens. Equal prefixes have equal hashes."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._chains: dict[tuple[int, int], int] = {}  # (chain, next block) to chain, from 1 on

    def of(self, arrival: Arrival) -> tuple[Content, list[bytes]]:
        """Return the hashes of the worker's blocks, and those of the arrival's whole blocks for the directory."""
        chains, before = [], 0
        for block in arrival.blocks:
            before = self._chains.setdefault((before, block), len(self._chains) + 1)
            chains.append(before)
        size, each = self._block_size, arrival.block_tokens
        full = min(len(chains) * each, arrival.prompt_tokens) // size
        last = {place * each // size for place in range(1, len(chains) + 1)}
        ends = range(1, full + 1)
        hashes = [chains[-(-end * size // each) - 1] << _NUMBER_BITS | end << 1 | (end in last) for end in ends]
        return Content(hashes), [directory_hash(chain) for chain in chains]


def directory_hashes(hashes: Iterable[int]) -> list[bytes]:
    """Return the directory hashes for these hashes of a worker's blocks."""
    return [directory_hash(block_hash >> _NUMBER_BITS) for block_hash in hashes if block_hash & 1]


def directory_hash(chain: int) -> bytes:
    """Return a hash in the format of `baton.ledger.prefix_index`."""
    return chain.to_bytes(NAME_BYTES, "big")
