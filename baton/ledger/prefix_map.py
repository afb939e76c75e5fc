"""Which worker holds which prefix blocks, in memory: what a router looks at when it chooses. Pure bookkeeping.

A block is named by the first 16 bytes of its digest (`baton/engine/prefix.py`): half of the memory, here and in Redis,
and still 128 bits of a keyed hash. Should two blocks share a name all the same, a request is routed less well; which KV
a worker uses is decided by the worker, by whole digests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.core import Incarnation

NAME_BYTES = 16


class Holder(NamedTuple):
    """One life of a worker."""

    worker_id: str
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Change:
    """Change number `seq`, from 1, of what `holder` has, by names. `reset`: all that it had before is gone."""

    holder: Holder
    seq: int
    reset: bool = False
    added: Collection[bytes] = ()
    removed: Collection[bytes] = ()


class PrefixMap:
    """The sets of all holders, each as it was after one of its changes. Used by one thread."""

    def __init__(self) -> None:
        self._held: dict[Holder, tuple[int, set[bytes]]] = {}

    def apply(self, change: Change) -> bool:
        """Take in a change; one that is known already does nothing. False: changes before it were missed.

        Then all that the holder has must be read, and applied as a reset.
        """
        seq, names = self._held.get(change.holder, (0, set()))
        if change.seq <= seq:
            return True
        if change.reset:
            names = set()
        elif not seq or change.seq != seq + 1:
            return False
        names.difference_update(change.removed)
        names.update(change.added)
        self._held[change.holder] = (change.seq, names)
        return True

    def behind(self, listed: Mapping[Holder, int]) -> list[Holder]:
        """Given the number of each holder's last change: whose set must be read. Who is not listed is forgotten."""
        self._held = {holder: held for holder, held in self._held.items() if holder in listed}
        return [holder for holder, seq in listed.items() if holder not in self._held or self._held[holder][0] < seq]

    def holders(self, digests: Sequence[bytes]) -> dict[Holder, int]:
        """How many leading blocks of this chain each worker has; those with none are left out."""
        chain = [digest[:NAME_BYTES] for digest in digests]
        first = chain[0] if chain else b""  # most workers do not even have that one
        return {holder: _leading(names, chain) for holder, (_, names) in self._held.items() if first in names}


def _leading(names: set[bytes], chain: Sequence[bytes]) -> int:
    return next((count for count, name in enumerate(chain) if name not in names), len(chain))
