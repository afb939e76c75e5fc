"""Engines whose free blocks are poisoned and whose accesses are checked, to find use of a foreign block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from baton.engine.block_pool import BlockPool
from baton.engine.kv_cache import KVCache
from baton.engine.oracle import OracleBackend, oracle_layout

if TYPE_CHECKING:
    from torch import Tensor

    from tests.simulation.world import World

BLOCK = 4
LAYOUT = oracle_layout(block_size=BLOCK, kv_heads=1, head_dim=2)
MAX_LEN = 64
POISON = -1.25e30


class PoisonedPool(BlockPool):
    """A pool that fills each block with poison when it is freed."""

    kv: CheckedCache | None = None

    def _take(self) -> int:
        block = super()._take()
        self._poison(block)
        return block

    def _retire(self, block: int) -> None:
        super()._retire(block)
        if block not in self._cached:
            self._poison(block)

    def _poison(self, block: int) -> None:
        if self.kv is not None:
            for tensor in self.kv.tensors:
                tensor[:, block] = POISON

    def untouched(self) -> bool:
        """Return whether no free block was written."""
        assert self.kv is not None
        return all(bool((tensor[:, self._free] == POISON).all()) for tensor in self.kv.tensors)

    def held(self, block: int) -> bool:
        return self._references[block] > 0

    def writable(self, block: int) -> bool:
        """Return whether the block has one reference and is not in the prefix cache."""
        return self._references[block] == 1 and self._digest[block] is None


Fine = Callable[[PoisonedPool, int], bool]


class CheckedCache(KVCache):
    """Checks transfers: they read only referenced blocks, and write only uncached blocks with one reference."""

    def __init__(self, total_blocks: int) -> None:
        shape = (LAYOUT.layers, total_blocks, BLOCK, LAYOUT.kv_heads, LAYOUT.head_dim)
        storage = [torch.full(shape, POISON) for _ in LAYOUT.tensors]
        super().__init__(LAYOUT, total_blocks, storage=storage)
        self.pool: PoisonedPool | None = None
        self.world: World | None = None
        self.name = ""

    def gather(self, layers: range, blocks: Sequence[int], begin: int, end: int, out: Tensor) -> None:
        self._check("reads", blocks, begin, end, PoisonedPool.held)
        super().gather(layers, blocks, begin, end, out)

    def scatter(self, layers: range, blocks: Sequence[int], begin: int, end: int, data: Tensor) -> None:
        self._check("writes", blocks, begin, end, PoisonedPool.writable)
        super().scatter(layers, blocks, begin, end, data)

    def _check(self, does: str, blocks: Sequence[int], begin: int, end: int, fine: Fine) -> None:
        assert self.pool is not None
        assert self.world is not None
        wrong = [block for block in blocks[begin // BLOCK : -(-end // BLOCK)] if not fine(self.pool, block)]
        if wrong:
            self.world.broken(f"{self.name}: a transfer {does} blocks {wrong} that are not its own")


class SimBackend(OracleBackend):
    """The oracle over checked caches. All engines share one, because it has no state."""

    def make_cache(self, total_blocks: int) -> KVCache:
        return CheckedCache(total_blocks)


BACKEND = SimBackend(LAYOUT, max_model_len=MAX_LEN)
