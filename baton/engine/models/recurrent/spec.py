"""The kinds of recurrent layers, and the size of their state."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A gated short convolution (LFM2): out(c * conv(b * x)), with b, c, x = in(rows)."""

    channels: int
    width: int  # of the convolution, in tokens
    bias: bool = False

    @property
    def state_size(self) -> int:
        return self.channels * (self.width - 1)


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

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values

    @property
    def state_size(self) -> int:
        return self.channels * (self.width - 1) + self.values * self.key_dim


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

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.states

    @property
    def state_size(self) -> int:
        return self.channels * (self.width - 1) + self.inner * self.states


RecurrentSpec = ShortConvSpec | GatedDeltaSpec | MambaSpec
