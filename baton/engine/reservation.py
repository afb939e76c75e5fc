"""Room for a sequence whose KV comes from elsewhere: what is here already, and blocks for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.engine.blocks import BlockState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from baton.core import KVLayout
    from baton.engine.blocks import Allocation, BlockPool


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
