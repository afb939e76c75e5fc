"""Which rank of a worker holds which heads of its KV, and what moves between workers of different sizes. Pure.

    8 heads, 4 ranks    0 1 | 2 3 | 4 5 | 6 7    shares: each head is with one rank
    2 heads, 4 ranks      0 |   0 |   1 |   1    replicas: each rank has one head, and others have it too

On the wire KV is whole, all heads of a position in their order, so a worker need know of its own ranks alone: the plan
of one side is that between its ranks and a worker of one rank. Read from replicas, the layers of a head are divided
among them; written, a head goes to all that hold it. Latent attention caches one head: all ranks hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Heads:
    """How `size` ranks hold `kv_heads` heads. Raises ConfigError if they cannot: no rank may hold more than another."""

    kv_heads: int
    size: int

    def __post_init__(self) -> None:
        if min(self.kv_heads, self.size) < 1:
            raise ConfigError(f"{self.kv_heads} KV heads on {self.size} ranks: both must be at least 1")
        if self.kv_heads % self.size and self.size % self.kv_heads:
            text = "neither number divides the other, so some ranks would hold more heads than others"
            raise ConfigError(f"{self.kv_heads} KV heads cannot be held by {self.size} ranks: {text}")

    @property
    def per_rank(self) -> int:
        """How many heads each rank holds."""
        return max(1, self.kv_heads // self.size)

    @property
    def replicas(self) -> int:
        """How many ranks hold the same heads."""
        return max(1, self.size // self.kv_heads)

    def held(self, rank: int) -> range:
        """The heads of this rank."""
        first = rank * self.kv_heads // self.size
        return range(first, first + self.per_rank)

    def supplied(self, rank: int, layers: int) -> range:
        """Those of `layers` layers of which this rank, and no other, supplies its heads when they are read."""
        turn = rank % self.replicas
        return range(layers * turn // self.replicas, layers * (turn + 1) // self.replicas)


@dataclass(frozen=True, slots=True)
class Rectangle:
    """(layers x heads) that move from one rank of the sender to one of the receiver."""

    sender_rank: int
    receiver_rank: int
    layers: range
    heads: range


def rectangles(layers: int, kv_heads: int, sender_size: int, receiver_size: int) -> tuple[Rectangle, ...]:
    """All that moves between workers of these sizes, at most one rectangle for a pair of ranks; in the pairs' order.

    Raises ConfigError for a size that cannot hold these heads.
    """
    sender, receiver = Heads(kv_heads, sender_size), Heads(kv_heads, receiver_size)
    pairs = ((s, r) for s in range(sender_size) for r in range(receiver_size))
    found = (Rectangle(s, r, sender.supplied(s, layers), overlap(sender.held(s), receiver.held(r))) for s, r in pairs)
    return tuple(rectangle for rectangle in found if rectangle.layers and rectangle.heads)


def overlap(a: range, b: range) -> range:
    """What two ranges of step 1 have in common."""
    return range(max(a.start, b.start), min(a.stop, b.stop))
