"""In which order those who wait are served: fair between tenants, by ticket within a tenant. No clock, no I/O.

Between tenants, virtual time decides (WF2Q+). Serving `t` tokens takes a tenant's `start` on by `t / weight`, and the
queue's own time by `t / (weights of all who wait)`; who has the least start is next. A tenant that comes anew starts
now, or where it stood if it had more than its share: having been silent earns no credit, and leaving pays no debt.

Nobody starves: the start of a tenant that waits stands still, time goes on with each token that is served to others,
and whoever comes later starts no earlier than that; within a tenant, a ticket is overtaken by a bounded number of
later arrivals. A request that was served before and is back (`returning`) has paid: its tenant goes before all others
until it is served.

Two ordered structures for the queue. Every operation takes O(log n) steps, a removal from the middle as well, so
that what left early takes no memory until its turn would have come (as it does in a heap of the standard library).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from baton.limits import MAX_PRIORITY

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


Ticket = tuple[int, int]  # who has less is served first

OVERTAKES = 256
_AT_ONCE = -1.0  # before every start


def ticket_for(arrival: int, priority: int) -> Ticket:
    """The ticket of the request that came as number `arrival`: it overtakes `OVERTAKES` earlier ones per level."""
    return arrival - priority * OVERTAKES, arrival


@dataclass(eq=False, slots=True)
class Entry:
    """One who waits, for `tokens` known tokens."""

    ticket: Ticket
    tokens: int
    tenant: str = ""
    returning: bool = False

    @property
    def key(self) -> int:
        """The ticket without the tie, as a key of `PrefixSums`."""
        return max(self.ticket[0] + MAX_PRIORITY * OVERTAKES, 0) + 1


class _Tenant:
    """Those of one tenant that wait; it is there as long as there are any."""

    def __init__(self, name: str, weight: float, start: float) -> None:
        self.name, self.weight, self.start = name, weight, start
        self.line: Heap[Entry] = Heap()
        self.owing = PrefixSums()  # tokens that are to be charged, by ticket
        self.tokens = 0
        self.returning = 0

    @property
    def rank(self) -> tuple[float, Ticket]:
        return _AT_ONCE if self.returning else self.start, self.line.least

    def count(self, entry: Entry, sign: int) -> None:
        self.tokens += sign * entry.tokens
        self.returning += sign * entry.returning
        if not entry.returning:
            self.owing.add(entry.key, sign * entry.tokens)


Waiter = TypeVar("Waiter", bound=Entry)


class FairQueue(Generic[Waiter]):
    """`weights`: of tenants by name; all others have 1. O(log n) steps for each operation."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.tokens = 0
        self._weights = weights
        self._waiting = 0
        self._returning_tokens = 0
        self._tenants: dict[str, _Tenant] = {}
        self._order: Heap[_Tenant] = Heap()
        self._idle: Heap[str] = Heap()  # tenants of whom nobody waits, and who had more than their share: their starts
        self._now = 0.0  # virtual
        self._active = 0.0  # weight of those who wait

    def __len__(self) -> int:
        return self._waiting

    def __contains__(self, entry: Waiter) -> bool:
        return entry.tenant in self._tenants and entry in self._tenants[entry.tenant].line

    @property
    def first(self) -> Waiter | None:
        """Who is next."""
        return self._order.first.line.first if self._waiting else None  # type: ignore[return-value]

    def push(self, entry: Waiter) -> None:
        """It waits from now on."""
        tenant = self._tenants.get(entry.tenant) or self._come(entry.tenant)
        tenant.line.put(entry, entry.ticket)
        self._count(tenant, entry, 1)
        self._order.put(tenant, tenant.rank)

    def serve(self) -> None:
        """The first one is served: it leaves, and its tenant pays."""
        tenant = self._order.first
        entry = tenant.line.first
        if not entry.returning:
            tenant.start += entry.tokens / tenant.weight
            self._now += entry.tokens / self._active
        self._take(tenant, entry)

    def remove(self, entry: Waiter) -> None:
        """It leaves unserved. Raises KeyError when it does not wait."""
        self._take(self._tenants[entry.tenant], entry)

    def ahead(self, entry: Waiter) -> float:
        """About how many tokens will be served before `entry`, which waits, if nobody comes or leaves.

        Those before it in its tenant, and what the others get meanwhile if all of them have enough: at most all.
        """
        tenant = self._tenants[entry.tenant]
        until = max(tenant.start - self._now, 0.0) + tenant.owing.below(entry.key) / tenant.weight
        others = self.tokens - self._returning_tokens - entry.tokens
        return self._returning_tokens + min(until * self._active, max(others, 0))

    def held_by(self, tenant: str) -> tuple[int, int]:
        """Its requests that wait, and their tokens."""
        found = self._tenants.get(tenant)
        return (len(found.line), found.tokens) if found else (0, 0)

    def share_of(self, tenant: str) -> float:
        """Of the whole queue, if one more tenant of weight 1 came."""
        weight = self._weight(tenant)
        return weight / (self._active + 1.0 + (0.0 if tenant in self._tenants else weight))

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _come(self, name: str) -> _Tenant:
        start = max(self._idle.remove(name), self._now) if name in self._idle else self._now
        tenant = self._tenants[name] = _Tenant(name, self._weight(name), start)
        self._active += tenant.weight
        return tenant

    def _take(self, tenant: _Tenant, entry: Entry) -> None:
        tenant.line.remove(entry)
        self._count(tenant, entry, -1)
        if tenant.line:
            self._order.put(tenant, tenant.rank)
        else:
            self._go(tenant)
        self._catch_up()

    def _count(self, tenant: _Tenant, entry: Entry, sign: int) -> None:
        tenant.count(entry, sign)
        self._waiting += sign
        self.tokens += sign * entry.tokens
        self._returning_tokens += sign * entry.tokens * entry.returning

    def _go(self, tenant: _Tenant) -> None:
        del self._tenants[tenant.name]
        self._order.remove(tenant)
        self._active -= tenant.weight
        if tenant.start > self._now:
            self._idle.put(tenant.name, tenant.start)

    def _catch_up(self) -> None:
        """Time is never behind all who wait; when nobody waits, all are even again."""
        if not self._waiting:
            self._now = self._active = 0.0
            self._idle = Heap()
        elif not self._order.first.returning:
            self._now = max(self._now, self._order.first.start)
        while self._idle and self._idle.least <= self._now:
            self._idle.remove(self._idle.first)
