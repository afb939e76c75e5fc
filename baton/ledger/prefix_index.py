"""An index in memory of which worker has which blocks cached. A router reads it to choose workers.

Blocks are identified by the first 16 bytes of their hash (`baton.engine.prefix_cache`): half the memory, here and in
Redis, and still 128 bits of a keyed hash. A collision only makes routing worse, because workers compare whole hashes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from baton.core import Incarnation

NAME_BYTES = 16


class Holder(NamedTuple):
    """One incarnation of a worker."""

    worker_id: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Change:
    """Change number `seq`, from 1, of the blocks of `holder`. `reset`: all its earlier blocks are gone."""

    holder: Holder
    seq: int
    reset: bool = False
    added: Collection[bytes] = ()
    removed: Collection[bytes] = ()


class PrefixIndex:
    """The blocks of all holders, each as of its last applied change. Used by one thread.

    Each holder has a slot, a small number from 1, until it is forgotten; callers use it as a column index. `generation`
    changes whenever a slot changes hands.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._held: dict[Holder, tuple[int, set[bytes]]] = {}
        self._slots: dict[Holder, int] = {}
        self._vacant: list[int] = []
        self._bits: dict[bytes, int] = {}  # by block hash: bit n is the holder in slot n

    @property
    def slots(self) -> int:
        """The highest slot ever assigned."""
        return len(self._slots) + len(self._vacant)

    def slot(self, holder: Holder) -> int:
        """Return the slot of a holder, or 0 if unknown."""
        return self._slots.get(holder, 0)

    def apply(self, change: Change) -> bool:
        """Apply a change, unless known. Returns False if earlier ones were missed: read all blocks, apply as reset."""
        seq, names = self._held.get(change.holder, (0, set()))
        if change.seq <= seq:
            return True
        if not change.reset and (not seq or change.seq != seq + 1):
            return False
        bit = 1 << self._settle(change.holder)
        added = set(change.added)
        lost = names - added if change.reset else names.intersection(change.removed) - added
        self._lose(lost, bit)
        for name in added:
            self._bits[name] = self._bits.get(name, 0) | bit
        names.difference_update(lost)
        names.update(added)
        self._held[change.holder] = (change.seq, names)
        return True

    def behind(self, listed: Mapping[Holder, int]) -> list[Holder]:
        """Return the holders to read again, given each one's last change number. Forgets holders not listed."""
        for holder in [holder for holder in self._held if holder not in listed]:
            self._forget(holder)
        return [holder for holder, seq in listed.items() if holder not in self._held or self._held[holder][0] < seq]

    def leading(self, digests: Iterable[bytes]) -> list[tuple[int, int]]:
        """Return how many leading blocks of this chain are cached: pairs of (bit mask of slots, that many blocks).
        Holders without any are in no pair. `digests` is not read past the first block that no holder has.
        """
        found: list[tuple[int, int]] = []
        alive, count = -1, 0
        for digest in digests:
            still = alive & self._bits.get(digest[:NAME_BYTES], 0)
            if still != alive and count:
                found.append((alive & ~still, count))
            alive, count = still, count + 1
            if not still:
                return found
        if count:
            found.append((alive, count))
        return found

    def _settle(self, holder: Holder) -> int:
        if holder not in self._slots:
            self._slots[holder] = self._vacant.pop() if self._vacant else len(self._slots) + 1
            self.generation += 1
        return self._slots[holder]

    def _forget(self, holder: Holder) -> None:
        _, names = self._held.pop(holder)
        slot = self._slots.pop(holder)
        self._lose(names, 1 << slot)
        self._vacant.append(slot)
        self.generation += 1

    def _lose(self, names: Collection[bytes], bit: int) -> None:
        for name in names:
            left = self._bits[name] & ~bit
            if left:
                self._bits[name] = left
            else:
                del self._bits[name]
