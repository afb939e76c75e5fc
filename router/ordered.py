"""Two ordered structures for the queue. Every operation takes O(log n) steps, a removal from the middle as well, so
that what left early takes no memory until its turn would have come (as it does in a heap of the standard library).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Heap(Generic[Item]):
    """Items by key, the least one first. An item is in it once."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, Item]] = []  # a binary heap
        self._at: dict[Item, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._at

    @property
    def first(self) -> Item:
        """Raises IndexError when there is none."""
        return self._entries[0][1]

    @property
    def least(self) -> Any:
        """The key of `first`."""
        return self._entries[0][0]

    def put(self, item: Item, key: Any) -> None:
        """Add `item`, or give it another key."""
        at = self._at.setdefault(item, len(self._entries))
        if at == len(self._entries):
            self._entries.append((key, item))
        self._settle(at, (key, item))

    def remove(self, item: Item) -> Any:
        """Returns its key. Raises KeyError."""
        at = self._at.pop(item)
        key, last = self._entries[at][0], self._entries.pop()
        if at < len(self._entries):
            self._settle(at, last)
        return key

    def _settle(self, at: int, entry: tuple[Any, Item]) -> None:
        """`entry` goes where it belongs, seen from the free place `at`."""
        while at and entry[0] < self._entries[(at - 1) // 2][0]:
            at = self._move((at - 1) // 2, at)
        while (child := self._lesser_child(at)) and self._entries[child][0] < entry[0]:
            at = self._move(child, at)
        self._entries[at] = entry
        self._at[entry[1]] = at

    def _move(self, source: int, to: int) -> int:
        entry = self._entries[to] = self._entries[source]
        self._at[entry[1]] = to
        return source

    def _lesser_child(self, at: int) -> int:
        """0: it has none."""
        left = 2 * at + 1
        if left >= len(self._entries):
            return 0
        right = left + 1
        return right if right < len(self._entries) and self._entries[right][0] < self._entries[left][0] else left


class PrefixSums:
    """Amounts at whole keys from 1 on, and what lies below a key: a Fenwick tree that keeps no zeros."""

    def __init__(self) -> None:
        self.total = 0
        self._tree: dict[int, int] = {}  # at i: what lies at the last (i & -i) keys up to i
        self._size = 1  # a power of two, no key is above it

    def add(self, key: int, amount: int) -> None:
        """`amount` more at `key`; negative: less."""
        while self._size < key:
            self._size *= 2
            self._tree[self._size] = self.total
        self.total += amount
        while key <= self._size:
            self._tree[key] = self._tree.get(key, 0) + amount
            if not self._tree[key]:
                del self._tree[key]
            key += key & -key

    def below(self, key: int) -> int:
        """The sum at all keys less than `key`."""
        key, found = min(key - 1, self._size), 0
        while key > 0:
            found += self._tree.get(key, 0)
            key &= key - 1
        return found
