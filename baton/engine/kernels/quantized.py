"""Weights in 8 or 4 bits, and their quantisation. Kernels read them packed, or widen them where they have no product.

A weight is factor * scale * (level - zero): one float32 factor for each output, and for each group of inputs a float16
scale and, in checkpoints that have them, a zero level. Without scales, a row is one group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Quantize = Literal["none", "int8", "int4"]


class Scheme(NamedTuple):
    """Bits of a level, and inputs of a group (0: all inputs of an output are one group)."""

    bits: int
    group: int

    def divides(self, k: int, share: int) -> bool:
        """Return whether shares of the k inputs cut no group, or all inputs are one."""
        return not self.group or self.group >= k or share % self.group == 0


SCHEMES = {"int8": Scheme(8, 0), "int4": Scheme(4, 32)}
PIECE = 1 << 20  # elements that are quantised at a time: temporaries that stay in caches


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A matrix [n, k] as `levels` uint8 [n, padded], `factors` float32 [n], and for groups `scales` float16 and `zeros`
    uint8, both [n, padded / group]. Without `zeros`, the zero level is 2^(bits - 1). Inputs from k on have no effect.
    `dtype` is that of the model.
    """

    levels: Tensor
    factors: Tensor
    bits: int
    group: int
    k: int
    dtype: torch.dtype
    scales: Tensor | None = None
    zeros: Tensor | None = None

    @property
    def n(self) -> int:
        return len(self.levels)

    def widened(self) -> Tensor:
        """Return the matrix [n, k], computed in float32 and rounded to the model's dtype."""
        shape = (self.n, -1, self.group)
        zero = 2.0 ** (self.bits - 1) if self.zeros is None else self.zeros[..., None].float()
        wide = self.levels.view(shape).float() - zero
        if self.scales is not None:
            wide *= self.scales[..., None].float()
        return (wide.view(self.n, -1) * self.factors[:, None])[:, : self.k].to(self.dtype).contiguous()

    def rows(self, chosen: Tensor) -> QuantizedWeight:
        """Return the matrix of these outputs, int64 [n]."""
        scales, zeros = (None if part is None else part[chosen] for part in (self.scales, self.zeros))
        return replace(self, levels=self.levels[chosen], factors=self.factors[chosen], scales=scales, zeros=zeros)

    def columns(self, own: range) -> QuantizedWeight:
        """Return the matrix of some inputs with the same values. Raises ValueError if they are no whole groups, unless
        a row is one.
        """
        levels, k = self.levels[:, own.start : own.stop], len(own)
        if self.group >= self.k:
            levels = F.pad(levels, (0, -k % 8))
            return replace(self, levels=levels.contiguous(), group=levels.shape[1], k=k)
        if own.start % self.group or k % self.group:
            raise ValueError(f"inputs {own.start} to {own.stop} are no whole groups of {self.group}")
        held = slice(own.start // self.group, own.stop // self.group)
        scales, zeros = (None if part is None else part[:, held].contiguous() for part in (self.scales, self.zeros))
        return replace(self, levels=levels.contiguous(), k=k, scales=scales, zeros=zeros)


def quantize(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    """Quantise a matrix [n, k] of any float dtype. The largest magnitude of a group decides its scale."""
    rows = max(1, PIECE // weight.shape[1])
    parts = [_quantized(part, scheme) for part in torch.split(weight, rows)]
    if len(parts) == 1:
        return parts[0]
    scales = None if scheme.group == 0 else torch.cat([part.scales for part in parts if part.scales is not None])
    levels, factors = torch.cat([part.levels for part in parts]), torch.cat([part.factors for part in parts])
    return QuantizedWeight(levels, factors, scheme.bits, parts[0].group, parts[0].k, weight.dtype, scales)


def _quantized(weight: Tensor, scheme: Scheme) -> QuantizedWeight:
    k = weight.shape[1]
    group = scheme.group or -(-k // 8) * 8
    wide = F.pad(weight.float(), (0, -k % group)).view(len(weight), -1, group)
    middle, most = 2 ** (scheme.bits - 1), wide.abs().amax(-1, keepdim=True)
    if scheme.group == 0:
        steps = most / (middle - 1)
        factors, scales = steps.view(-1), None
    else:  # the largest magnitude becomes the lowest level, because there is one more below zero
        signed = wide.gather(-1, wide.abs().argmax(-1, keepdim=True))
        ideal = signed / -middle
        factors = power_of_two(ideal.abs().amax(1).view(-1))
        scales = (ideal.squeeze(-1) / factors[:, None]).half()
        steps = scales[..., None].float() * factors[:, None, None]
    levels = torch.where(steps != 0, wide / steps, torch.zeros_like(wide)).round_().add_(middle)
    levels = levels.clamp_(int(scheme.group == 0), 2 * middle - 1).to(torch.uint8)
    return QuantizedWeight(levels.view(len(weight), -1), factors, scheme.bits, group, k, weight.dtype, scales)


def power_of_two(values: Tensor) -> Tensor:
    """Return the least power of two that is not less, or 1 for 0. A division by it is exact."""
    return torch.where(values > 0, torch.exp2(torch.ceil(torch.log2(values))), torch.ones_like(values))
