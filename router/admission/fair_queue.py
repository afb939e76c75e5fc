"""The order of the queue: fair between tenants, by ticket within a tenant. No clock, no I/O.

Virtual time decides between tenants (WF2Q+). Serving `t` tokens advances a tenant's `start` by `t / weight`, and the
queue's own time by `t / (weights of all waiting tenants)`. The tenant with the smallest start is next. A new tenant
starts at the current time, or at its old start if that is later: idling earns no credit, and leaving clears no debt.

No tenant starves: the start of a waiting tenant is fixed, the time advances with every token served to others, and
later tenants start no earlier. Within a tenant, a ticket is overtaken by a bounded number of later arrivals. A request
that was served before and is back (`returning`) has paid, so its tenant precedes all others until it is served.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Generic, TypeVar

from baton.limits import MAX_PRIORITY

Item = TypeVar("Item", bound=Hashable)


class Heap(Generic[Item]):
    """Unique items by key, from which any item can be removed. The entry of a removed item stays in the `heapq` until
    it comes up, or until such entries are more than half of all. O(log n) per operation on average.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, Item]] = []
        self._live: dict[Item, tuple[Any, int, Item]] = {}
        self._numbers = count()  # break ties, because items have no order

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: Item) -> bool:
        return item in self._live

    @property
    def first(self) -> Item:
        return self._least_entry()[2]

    @property
    def least(self) -> Any:
        return self._least_entry()[0]

    def put(self, item: Item, key: Any) -> None:
        """Add `item`, or change its key."""
        entry = self._live[item] = key, next(self._numbers), item
        heappush(self._entries, entry)
        self._clean()

    def remove(self, item: Item) -> Any:
        """Remove `item` and return its key. Raises KeyError."""
        key, _, _ = self._live.pop(item)
        self._clean()
        return key

    def _least_entry(self) -> tuple[Any, int, Item]:
        """Return the entry of the item with the smallest key. Raises IndexError if the heap is empty."""
        while self._live.get(self._entries[0][2]) is not self._entries[0]:
            heappop(self._entries)
        return self._entries[0]

    def _clean(self) -> None:
        if 2 * len(self._live) < len(self._entries):
            self._entries = list(self._live.values())
            heapify(self._entries)


class PrefixSums:
    """Amounts at integer keys from 1 on, and the sum below a key. A sparse Fenwick tree."""

    def __init__(self) -> None:
        self.total = 0
        self._tree: dict[int, int] = {}  # at i: the sum of the last (i & -i) keys up to i
        self._size = 1  # a power of two, not below any key

    def add(self, key: int, amount: int) -> None:
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
        key, found = min(key - 1, self._size), 0
        while key > 0:
            found += self._tree.get(key, 0)
            key &= key - 1
        return found


Ticket = tuple[int, int]  # the smallest is served first

OVERTAKES = 256
_AT_ONCE = -1.0  # smaller than every start


def ticket_for(arrival: int, priority: int) -> Ticket:
    """Return the ticket of request number `arrival`. Each level of priority overtakes `OVERTAKES` earlier ones."""
    return arrival - priority * OVERTAKES, arrival


@dataclass(eq=False, slots=True)
class Entry:
    """A waiting request with `tokens` known tokens."""

    ticket: Ticket
    tokens: int
    tenant: str = ""
    returning: bool = False

    @property
    def key(self) -> int:
        """The ticket without its tie-breaker, as a key of `PrefixSums`."""
        return max(self.ticket[0] + MAX_PRIORITY * OVERTAKES, 0) + 1


class _Tenant:
    """The waiting requests of one tenant. It exists while there are any."""

    def __init__(self, name: str, weight: float, start: float) -> None:
        self.name, self.weight, self.start = name, weight, start
        self.queue: Heap[Entry] = Heap()
        self.charges = PrefixSums()  # tokens to charge, by ticket
        self.tokens = 0
        self.returning = 0

    @property
    def rank(self) -> tuple[float, Ticket]:
        return _AT_ONCE if self.returning else self.start, self.queue.least

    def count(self, entry: Entry, sign: int) -> None:
        self.tokens += sign * entry.tokens
        self.returning += sign * entry.returning
        if not entry.returning:
            self.charges.add(entry.key, sign * entry.tokens)


Waiter = TypeVar("Waiter", bound=Entry)


class FairQueue(Generic[Waiter]):
    """The queue. `weights` are the tenants' weights by name, 1 by default. O(log n) per operation."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.tokens = 0
        self._weights = weights
        self._waiting = 0
        self._returning_tokens = 0
        self._tenants: dict[str, _Tenant] = {}
        self._order: Heap[_Tenant] = Heap()
        self._idle: Heap[str] = Heap()  # starts of tenants that left after using more than their share
        self._now = 0.0
        self._active = 0.0  # weight of the waiting tenants

    def __len__(self) -> int:
        return self._waiting

    def __contains__(self, entry: Waiter) -> bool:
        return entry.tenant in self._tenants and entry in self._tenants[entry.tenant].queue

    @property
    def first(self) -> Waiter | None:
        return self._order.first.queue.first if self._waiting else None  # type: ignore[return-value]

    def push(self, entry: Waiter) -> None:
        tenant = self._tenants.get(entry.tenant) or self._join(entry.tenant)
        tenant.queue.put(entry, entry.ticket)
        self._count(tenant, entry, 1)
        self._order.put(tenant, tenant.rank)

    def serve(self) -> None:
        """Remove the head and charge its tenant."""
        tenant = self._order.first
        entry = tenant.queue.first
        if not entry.returning:
            tenant.start += entry.tokens / tenant.weight
            self._now += entry.tokens / self._active
        self._drop(tenant, entry)

    def remove(self, entry: Waiter) -> None:
        """Remove a request that is not served. Raises KeyError if it does not wait."""
        self._drop(self._tenants[entry.tenant], entry)

    def ahead(self, entry: Waiter) -> float:
        """Return roughly how many tokens will be served before `entry`, if no request comes or leaves. They are earlier
        ones of its tenant, and those that all other tenants get in that time, at most all they have.
        """
        tenant = self._tenants[entry.tenant]
        until = max(tenant.start - self._now, 0.0) + tenant.charges.below(entry.key) / tenant.weight
        others = self.tokens - self._returning_tokens - entry.tokens
        return self._returning_tokens + min(until * self._active, max(others, 0))

    def held_by(self, tenant: str) -> tuple[int, int]:
        """Return the number of waiting requests of a tenant, and their tokens."""
        found = self._tenants.get(tenant)
        return (len(found.queue), found.tokens) if found else (0, 0)

    def share_of(self, tenant: str) -> float:
        """Return the tenant's share of the queue if one more tenant of weight 1 joined."""
        weight = self._weight(tenant)
        return weight / (self._active + 1.0 + (0.0 if tenant in self._tenants else weight))

    @property
    def tenants(self) -> Collection[str]:
        """The tenants with waiting requests."""
        return self._tenants.keys()

    def share_among(self, tenant: str, others: Iterable[str]) -> float:
        """Return the tenant's share by weight among it and `others`."""
        return self._weight(tenant) / sum(map(self._weight, {tenant, *others}))

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _join(self, name: str) -> _Tenant:
        start = max(self._idle.remove(name), self._now) if name in self._idle else self._now
        tenant = self._tenants[name] = _Tenant(name, self._weight(name), start)
        self._active += tenant.weight
        return tenant

    def _drop(self, tenant: _Tenant, entry: Entry) -> None:
        tenant.queue.remove(entry)
        self._count(tenant, entry, -1)
        if tenant.queue:
            self._order.put(tenant, tenant.rank)
        else:
            del self._tenants[tenant.name]
            self._order.remove(tenant)
            self._active -= tenant.weight
            if tenant.start > self._now:
                self._idle.put(tenant.name, tenant.start)
        self._catch_up()

    def _count(self, tenant: _Tenant, entry: Entry, sign: int) -> None:
        tenant.count(entry, sign)
        self._waiting += sign
        self.tokens += sign * entry.tokens
        self._returning_tokens += sign * entry.tokens * entry.returning

    def _catch_up(self) -> None:
        """Advance the time to the smallest start. An empty queue resets all tenants."""
        if not self._waiting:
            self._now = self._active = 0.0
            self._idle = Heap()
        elif not self._order.first.returning:
            self._now = max(self._now, self._order.first.start)
        while self._idle and self._idle.least <= self._now:
            self._idle.remove(self._idle.first)
