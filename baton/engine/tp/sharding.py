"""What one rank of a model holds: its heads, its share of the feed-forward network, its part of the vocabulary.

    x W^T, rows divided        q, k, v, gate, up: each rank computes its own features
    x W^T, columns divided     o, down: each rank has the features that it computed; the products are summed
    head                       each rank has a range of the vocabulary; rank 0 puts the logits together
    norms, embedding           whole on each rank: they cost little time, and dividing them would cost an exchange

A sum is taken in the order of the ranks, element by element, in float32: it does not depend on where a row stands.

Which rank of a worker holds which heads of its KV, and what moves between workers of different sizes. Pure.

    8 heads, 4 ranks    0 1 | 2 3 | 4 5 | 6 7    shares: each head is with one rank
    2 heads, 4 ranks      0 |   0 |   1 |   1    replicas: each rank has one head, and others have it too

On the wire KV is whole, all heads of a position in their order, so a worker need know of its own ranks alone: the plan
of one side is that between its ranks and a worker of one rank. Read from replicas, the layers of a head are divided
among them; written, a head goes to all that hold it. Latent attention caches one head: all ranks hold it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from baton.engine.models.llama import Parts
from baton.engine.models.weights import Weights
from baton.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from baton.engine.kernels.base import Linear
    from baton.engine.models.checkpoint import Checkpoint
    from baton.engine.models.config import ModelConfig
    from baton.engine.tp.all_reduce import Exchange


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


FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def divided(config: ModelConfig, size: int, key: str) -> ModelConfig:
    """The config that each of `size` ranks builds its model from.

    Raises ConfigError naming `key`, its value and what it does not divide.
    """
    if config.family not in FAMILIES:
        raise ConfigError(f"{key}: {size}: a model of the family {config.family} is not divided; {key}=1 serves it")
    parts = {
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.intermediate_size,
    }
    uneven = [f"{name} ({value})" for name, value in parts.items() if value % size]
    if uneven:
        common = math.gcd(*parts.values())
        fits = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise ConfigError(f"{key}: {size} does not divide the model's {' and '.join(uneven)}; these would do: {fits}")
    heads, kv_heads, inner = (value // size for value in parts.values())
    return replace(config, heads=heads, kv_heads=kv_heads, intermediate_size=inner)


class ShardedWeights(Weights):
    """`Weights` of which `matrix`, `vector` and `stack` are a rank's rows: `outs` are those of one rank."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, rank: int, size: int) -> None:
        super().__init__(checkpoint, dtype, device)
        self.rank, self.size = rank, size

    def columns(self, name: str, out: int, n_in: int) -> Tensor:
        """The rank's `n_in` columns of a matrix with `size` times as many: [out, n_in]."""
        place = self._place((out, n_in))
        self._fill_from(place, name, (out, n_in * self.size), 1, self.rank * n_in)
        return place

    def rows(self, name: str, shape: tuple[int, int], rows: range) -> Tensor:
        """These rows of a matrix of this shape."""
        place = self._place((len(rows), shape[1]))
        self._fill_from(place, name, shape, 0, rows.start)
        return place

    def _fill_from(self, place: Tensor, name: str, whole: tuple[int, ...], dim: int, start: int) -> None:
        """What begins at `start` of dimension `dim` of a tensor of shape `whole`: nothing else is read or copied."""
        stored = self.checkpoint.take(name, whole)
        self._copy(place, stored.narrow(dim, start, place.shape[dim]))
        self.checkpoint.release(stored)

    def _fill_parts(self, place: Tensor, names: tuple[str, ...], outs: tuple[int, ...]) -> None:
        for name, part in zip(names, torch.split(place, list(outs)), strict=True):
            whole = (len(part) * self.size, *part.shape[1:])
            self._fill_from(part, name, whole, 0, self.rank * len(part))


@dataclass(frozen=True, slots=True, eq=False)
class ShardedParts(Parts):
    """`Parts` of one rank."""

    weights: ShardedWeights
    exchange: Exchange

    def summed(self, name: str, out: int, n_in: int, *, bias: bool) -> Linear:
        weight = self.weights.columns(f"{name}.weight", out, n_in)
        added = self.weights.tensor(f"{name}.bias", out) if bias else None
        return Summed(self.kernels.linear(weight, added if self.exchange.rank == 0 else None), self.exchange)

    def head(self, embed: Tensor, *, tied: bool) -> Linear:
        vocab, n_in = embed.shape
        ends = [vocab * rank // self.exchange.size for rank in range(self.exchange.size + 1)]
        own = range(*ends[self.exchange.rank :][:2])
        weight = embed[own.start : own.stop] if tied else self.weights.rows("lm_head.weight", (vocab, n_in), own)
        return Gathered(self.kernels.linear(weight), ends, self.exchange)


@dataclass(frozen=True, slots=True, eq=False)
class Summed:
    """A `Linear` whose input features are divided among the ranks: their products are summed, on every rank."""

    part: Linear
    exchange: Exchange

    @property
    def width(self) -> int:
        return self.part.width

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        for rows in _pieces(len(x), self.exchange.capacity // self.width):
            self.part(x[rows], self.exchange.place(rows.stop - rows.start, self.width))
            first, *others = self.exchange.swap()
            _sum(first, others, out[rows])
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A `Linear` whose output features are divided: rank r has those from `ends[r]` to `ends[r + 1]`.

    Only rank 0 gets the result: on the others `out` stays as it is.
    """

    part: Linear
    ends: list[int]
    exchange: Exchange

    @property
    def width(self) -> int:
        return self.ends[-1]

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        widest = -(-self.width // self.exchange.size)
        for rows in _pieces(len(x), self.exchange.capacity // widest):
            place = self.exchange.place(rows.stop - rows.start, widest)
            self.part(x[rows], place[:, : self.part.width])
            parts = self.exchange.swap()
            if self.exchange.rank == 0:
                for part, start, stop in zip(parts, self.ends, self.ends[1:], strict=False):
                    out[rows, start:stop] = part[:, : stop - start]
        return out


def _sum(first: Tensor, others: list[Tensor], out: Tensor) -> None:
    """The sum in this order; all but the last addition in float32, rounded once."""
    *between, last = others
    for part in between:
        first = first + part
    torch.add(first, last, out=out)


def _pieces(rows: int, most: int) -> Iterator[slice]:
    for start in range(0, rows, most):
        yield slice(start, min(start + most, rows))
