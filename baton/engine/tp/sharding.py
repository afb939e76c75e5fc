"""The division of a model and its KV among ranks (docs/design/tensor-parallelism.md).

    8 KV heads, 4 ranks        0 1 | 2 3 | 4 5 | 6 7    shares: one rank holds each head
    2 KV heads, 4 ranks          0 |   0 |   1 |   1    replicas: each has some layers of a read

Sums are taken in rank order, element by element, in float32, so they do not depend on a row's place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.engine.kernels.base import Linear
from baton.engine.models.checkpoint import Checkpoint, Weights
from baton.engine.models.config import ModelConfig
from baton.engine.models.llama import Parts
from baton.engine.tp.group import Exchange
from baton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Heads:
    """Distribution of `kv_heads` heads over `size` ranks. Raises ConfigError if ranks would hold unequal numbers."""

    kv_heads: int
    size: int

    def __post_init__(self) -> None:
        if min(self.kv_heads, self.size) < 1:
            raise ConfigError(f"{self.kv_heads} KV heads on {self.size} ranks: both must be at least 1")
        if self.kv_heads % self.size and self.size % self.kv_heads:
            text = "neither number divides the other, so some ranks would hold more heads than others"
            raise ConfigError(f"{self.kv_heads} KV heads cannot be divided among {self.size} ranks: {text}")

    @property
    def per_rank(self) -> int:
        return max(1, self.kv_heads // self.size)

    @property
    def replicas(self) -> int:
        return max(1, self.size // self.kv_heads)

    def held(self, rank: int) -> range:
        first = rank * self.kv_heads // self.size
        return range(first, first + self.per_rank)

    def supplied(self, rank: int, layers: int) -> range:
        """Return the range, within `layers` layers, that this rank supplies for its heads when they are read."""
        part = rank % self.replicas
        return range(layers * part // self.replicas, layers * (part + 1) // self.replicas)


FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def divided(config: ModelConfig, size: int, key: str) -> ModelConfig:
    """Return the config of each of `size` ranks. Raises ConfigError with `key` and sizes that it does not divide."""
    if config.family not in FAMILIES:
        raise ConfigError(f"{key}: {size} is not supported for a model of the family {config.family}; set {key} to 1")
    parts = {
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.intermediate_size,
    }
    uneven = [f"{name} ({value})" for name, value in parts.items() if value % size]
    if uneven:
        common = math.gcd(*parts.values())
        fits = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise ConfigError(f"{key}: {size} does not divide the model's {' and '.join(uneven)}; allowed are {fits}")
    heads, kv_heads, inner = (value // size for value in parts.values())
    return replace(config, heads=heads, kv_heads=kv_heads, intermediate_size=inner)


class ShardedWeights(Weights):
    """`Weights` of one rank: `joined` and `stack` return its rows, and `outs` are its sizes."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, rank: int, size: int) -> None:
        super().__init__(checkpoint, dtype, device)
        self.rank, self.size = rank, size

    def columns(self, name: str, out: int, n_in: int) -> Tensor:
        """Return the rank's `n_in` columns of a matrix with `size` times as many: [out, n_in]."""
        place = self._place((out, n_in))
        self._fill_from(place, name, (out, n_in * self.size), 1, self.rank * n_in)
        return place

    def rows(self, name: str, shape: tuple[int, int], rows: range) -> Tensor:
        place = self._place((len(rows), shape[1]))
        self._fill_from(place, name, shape, 0, rows.start)
        return place

    def _fill_from(self, place: Tensor, name: str, whole: tuple[int, ...], dim: int, start: int) -> None:
        """Read only the slice from `start` in dimension `dim` of a tensor of shape `whole`."""
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
    """A `Linear` with input features divided among ranks. Every rank sums the products."""

    part: Linear
    exchange: Exchange

    @property
    def width(self) -> int:
        return self.part.width

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        for rows in _pieces(len(x), self.exchange.capacity // self.width):
            self.part(x[rows], self.exchange.place(rows.stop - rows.start, self.width))
            total, *between, last = self.exchange.swap()
            for part in between:
                total = total + part
            torch.add(total, last, out=out[rows])  # rounded once
        return out


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A `Linear` with output features `ends[r]` to `ends[r + 1]` on rank r. Only rank 0 writes the result to `out`."""

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


def _pieces(rows: int, most: int) -> Iterator[slice]:
    for start in range(0, rows, most):
        yield slice(start, min(start + most, rows))
