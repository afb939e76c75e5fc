"""Rotary position embeddings. Formulas are those of `transformers` (modeling_rope_utils), which tests compare."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.engine.kernels.base import Rotation, Scratch
from baton.engine.kernels.elementwise import mapped
from baton.engine.models.rope import RopeConfig

PIECE = 1024  # positions that a table gets together


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Return radians per position of each pair of dimensions, float32 [head_dim / 2], on the CPU."""
    exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim
    if rope.kind == "none":
        return torch.zeros_like(exponents)
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32) * rope.theta**exponents)
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "proportional":
        inv_freq[int(rope.share * rope.head_dim // 2) :] = 0
    if rope.kind in ("linear", "proportional"):
        return inv_freq / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq)
    if rope.kind == "yarn":
        return _yarn(rope, rope.theta**exponents)
    return inv_freq


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and interpolate between."""
    wavelength = 2 * math.pi / inv_freq
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.original / wavelength - low) / (high - low) if high > low else torch.zeros_like(wavelength)
    between = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    scaled = torch.where(wavelength > rope.original / low, inv_freq / rope.factor, between)
    return torch.where(wavelength < rope.original / high, inv_freq, scaled)


def _yarn(rope: RopeConfig, pos_freqs: Tensor) -> Tensor:
    """Interpolate slow dimensions, extrapolate fast ones, with a ramp over the dimensions between."""
    low, high = _correction_dim(rope, rope.beta_fast), _correction_dim(rope, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(rope.head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    extrapolate = 1 - ramp
    return 1.0 / (rope.factor * pos_freqs) * (1 - extrapolate) + 1.0 / pos_freqs * extrapolate


def _correction_dim(rope: RopeConfig, rotations: float) -> float:
    """Return the dimension that completes `rotations` rotations within the original length."""
    return (rope.head_dim * math.log(rope.original / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))


class Rotary:
    """Cosines and sines of a forward's positions, computed in float32 and rounded to `dtype`. Heads of `head_dim` have
    pairs that do not rotate, after those that do, if it is more than that of `rope`.
    """

    def __init__(self, rope: RopeConfig, dtype: torch.dtype, device: torch.device, head_dim: int = 0) -> None:
        inv_freq, scale = inverse_frequencies(rope), rope.attention_factor
        still = max(0, head_dim // 2 - len(inv_freq))
        self._inv_freq = torch.cat((inv_freq, torch.zeros(still))).to(device)
        scales = torch.cat((torch.full_like(inv_freq, scale), torch.ones(still))).to(device)
        self._scale: Tensor | float = scale if scale == 1.0 or not still else scales
        self._dtype = dtype
        self._table = Rotation(*torch.empty(2, 0, len(self._inv_freq), dtype=dtype))

    def __call__(self, positions: Tensor, *, fixed: bool = False) -> Rotation:
        angles = positions[:, None].float() * self._inv_freq
        cos, sin = (mapped(function, angles, fixed=fixed) * self._scale for function in (torch.cos, torch.sin))
        return Rotation(cos.to(self._dtype), sin.to(self._dtype))

    def looked_up(self, positions: Tensor, scratch: Scratch, number: int) -> Rotation:
        """Return the rotations of `positions`, int64 [N], on a CPU, in tensors of `scratch` with this number. They come
        from a table that grows. Its bits are those of a fixed forward.
        """
        if (last := int(positions.numpy().max())) >= self._table.cos.shape[0]:
            self._table = self._longer(last + 1)
        size = positions.shape[0], self._table.cos.shape[1], self._dtype
        found = Rotation(*(scratch.take(name, *size) for name in (f"cos{number}", f"sin{number}")))
        torch.index_select(self._table.cos, 0, positions, out=found.cos)
        torch.index_select(self._table.sin, 0, positions, out=found.sin)
        return found

    def _longer(self, length: int) -> Rotation:
        """Return the table with at least `length` positions, and half as many again. Only new ones are computed."""
        begin, end = self._table.cos.shape[0], length + length // 2
        new = [self(torch.arange(at, at + PIECE), fixed=True) for at in range(begin, end, PIECE)]
        return Rotation(*(torch.cat(parts) for parts in zip(self._table, *new, strict=True)))


def row_order(head_dim: int, rotated: int, *, interleaved: bool) -> Tensor | None:
    """Return the order of a head's rows in which pair i is (i, i + head_dim / 2) and rotated pairs are first, or None
    if they are in this order.
    """
    every = torch.arange(head_dim)
    turned, still = every[:rotated], every[rotated:]
    first, second = (turned[0::2], turned[1::2]) if interleaved else turned.chunk(2)
    half = len(still) // 2
    order = torch.cat((first, still[:half], second, still[half:]))
    return None if torch.equal(order, every) else order
