"""The kinds of recurrent layers, and the size of their state.

Ranks divide a layer by heads or channels. The spec of a rank has its own numbers, and the number of `ranks`. If there
are fewer key heads or groups than ranks, `copies` ranks share each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor  # supervisors load specs without torch


class Part(NamedTuple):
    """Consecutive rows of a tensor: how many a rank has, and how many ranks share them."""

    rows: int
    copies: int = 1


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A gated short convolution (LFM2): out(c * conv(b * x)), with b, c, x = in(rows)."""

    channels: int
    width: int  # of the convolution, in tokens
    bias: bool = False
    ranks: int = field(default=1, kw_only=True, repr=False)

    @property
    def convolved(self) -> tuple[Part, ...]:
        """Channels of the convolution."""
        return (Part(self.channels),)

    @property
    def matrix(self) -> int:
        """Numbers of the state behind the convolution's."""
        return 0

    @property
    def inner(self) -> int:
        """Inputs of the projection to the residual stream."""
        return self.channels

    def divided(self, size: int) -> ShortConvSpec:
        """Return the spec of each of `size` ranks."""
        return replace(self, channels=self.channels // size, ranks=size)

    def uneven(self, size: int) -> list[str]:
        """Return the keys and values that `size` ranks cannot share evenly."""
        return [f"hidden_size ({self.channels})"] if self.channels % size else []


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """A gated delta net (Qwen3-Next). Each key head serves `value_heads / key_heads` consecutive value heads. The rows
    of its projections are in groups by key head if `grouped`, else each part is a tensor.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int  # of the convolution, in tokens
    eps: float
    grouped: bool
    ranks: int = field(default=1, kw_only=True, repr=False)
    copies: int = field(default=1, kw_only=True, repr=False)

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def per_key(self) -> int:
        return self.value_heads * self.copies // self.key_heads

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values

    @property
    def convolved(self) -> tuple[Part, ...]:
        return (*[Part(self.keys, self.copies)] * 2, Part(self.values))

    @property
    def matrix(self) -> int:
        return self.values * self.key_dim

    @property
    def inner(self) -> int:
        return self.values

    def divided(self, size: int) -> GatedDeltaSpec:
        keys = Part(max(1, self.key_heads // size), max(1, size // self.key_heads))
        return replace(self, key_heads=keys.rows, value_heads=self.value_heads // size, ranks=size, copies=keys.copies)

    def uneven(self, size: int) -> list[str]:
        keys, values = self.key_heads, self.value_heads
        found = [f"linear_num_value_heads ({values})"] if values % size else []
        return found + ([f"linear_num_key_heads ({keys})"] if keys % size and size % keys else [])


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Mamba 2. Each group of heads has its own B, C and norm. Time steps are limited to `limits`."""

    heads: int
    head_dim: int
    groups: int
    states: int
    width: int  # of the convolution, in tokens
    eps: float
    conv_bias: bool = True
    bias: bool = False
    limits: tuple[float, float] = (0.0, math.inf)
    keys: tuple[str, str] = field(default=("mamba_n_heads", "mamba_n_groups"), repr=False)  # in config.json
    ranks: int = field(default=1, kw_only=True, repr=False)
    copies: int = field(default=1, kw_only=True, repr=False)

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.states

    @property
    def convolved(self) -> tuple[Part, ...]:
        return (Part(self.inner), *[Part(self.groups * self.states, self.copies)] * 2)

    @property
    def matrix(self) -> int:
        return self.inner * self.states

    def divided(self, size: int) -> MambaSpec:
        groups = Part(max(1, self.groups // size), max(1, size // self.groups))
        return replace(self, heads=self.heads // size, groups=groups.rows, ranks=size, copies=groups.copies)

    def uneven(self, size: int) -> list[str]:
        heads, groups = self.keys
        found = [f"{heads} ({self.heads})"] if self.heads % size else []
        return found + ([f"{groups} ({self.groups})"] if self.groups % size and size % self.groups else [])


RecurrentSpec = ShortConvSpec | GatedDeltaSpec | MambaSpec


def whole(parts: Iterable[Part], ranks: int) -> int:
    """Return the rows of these parts on all ranks together."""
    return sum(part.rows * ranks // part.copies for part in parts)


def rows_of(parts: Iterable[Part], rank: int, ranks: int) -> Tensor:
    """Return the numbers of a rank's rows in a whole tensor of these parts: int64 [their sum]."""
    import torch

    start, found = 0, []
    for part in parts:
        first = start + rank // part.copies * part.rows
        found.append(torch.arange(first, first + part.rows))
        start += whole([part], ranks)
    return torch.cat(found)


def state_size(spec: RecurrentSpec) -> int:
    """Return the size of a state in numbers: the last inputs of the convolution, then the matrix."""
    return sum(part.rows for part in spec.convolved) * (spec.width - 1) + spec.matrix


def state_of_rank(spec: RecurrentSpec, rank: int) -> Tensor:
    """Return the numbers of a rank's state in that of the whole layer: int64 [state_size]."""
    import torch

    channels, own = whole(spec.convolved, spec.ranks), rows_of(spec.convolved, rank, spec.ranks)
    tails = torch.arange(spec.width - 1)[:, None] * channels + own
    matrix = channels * (spec.width - 1) + rank * spec.matrix + torch.arange(spec.matrix)
    return torch.cat((tails.flatten(), matrix))
