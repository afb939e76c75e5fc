"""Types and numbers that all weight formats share.

A format stores one matrix in several tensors. A layer of integer levels can stay packed if kernels have its bits and
groups. Any other layer is widened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.engine.kernels.quantized import QuantizedWeight, Scheme, power_of_two
from baton.errors import CheckpointError

FLOATS = ("F32", "BF16", "F16", "F64")
FLOAT8 = ("F8_E4M3", "F8_E5M2")
INTEGERS = ("I8", "I32", "I64")
BYTES = ("U8",)
GROUPS = (0, 32, 64, 128, 256)  # of kernels; 0 is a whole row


class Source(Protocol):
    """The stored tensors that a format reads (`baton.engine.models.checkpoint.Checkpoint`)."""

    def __contains__(self, name: str) -> bool:
        """Return whether a tensor is stored or can be widened."""

    def part(self, name: str, shape: Sequence[int] | None, dtypes: Sequence[str]) -> Tensor:
        """Return a copy of a stored tensor. Raises CheckpointError if its shape (unless None) or dtype differs."""

    def shape(self, name: str) -> list[int]:
        """Return the shape of a stored tensor."""

    def stored(self, name: str) -> str:
        """Return the name of the main part of a matrix."""

    def dtype(self, name: str) -> str:
        """Return the dtype of a stored tensor as the file spells it."""

    def metadata(self, name: str) -> str:
        """Return the entry `name` in the metadata of the safetensors files, or ""."""

    def error(self, name: str, problem: str) -> CheckpointError:
        """Return an error that begins with the file and the name of a stored tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """A matrix scale * (level - zero): levels uint8 [n, k], `scales` [n, groups], `zeros` uint8 [n, groups], or None
    for 2^(bits - 1). Groups have `group` inputs in order; 0 means all. `order` int32 [k] is the group of each input.
    """

    levels: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group: int
    order: Tensor | None = None

    def widened(self) -> Tensor:
        """Return the matrix [n, k] in float32."""
        k = self.levels.shape[1]
        order = torch.arange(k) // (self.group or k) if self.order is None else self.order
        wide = self.levels.float()
        wide -= 2.0 ** (self.bits - 1) if self.zeros is None else self.zeros.float()[:, order]
        return wide.mul_(self.scales.float()[:, order])

    def packed(self, bits: int) -> Levels:
        """Return the same matrix with levels of `bits`, which are not fewer, so that kernels can hold it."""
        shift = 2 ** (bits - 1) - 2 ** (self.bits - 1)
        zeros = None if self.zeros is None else self.zeros + shift
        return Levels(self.levels + shift, self.scales.float(), zeros, bits, self.group)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a checkpoint stores its quantised layers. `summary` is for logs and status.

    `wide_name` takes name and dtype of a stored tensor. It returns the name of the matrix of which it is the main part,
    or None. `read` returns a matrix as levels or widened, and raises CheckpointError with the tensor. `scheme`, or
    `scheme_of` by layer, is how kernels can hold it packed. Names of tensors that are not needed end as in `unread`.
    """

    summary: str
    wide_name: Callable[[str, str], str | None]
    read: Callable[[Source, str, Sequence[int]], Levels | Tensor]
    scheme: Scheme | None = None
    scheme_of: Callable[[Source, str], Scheme | None] | None = None
    unread: tuple[str, ...] = ()
    dimensions: tuple[int, ...] = (2,)  # of matrices, or stacks of them, that can be read

    @property
    def packs(self) -> bool:
        return self.scheme is not None or self.scheme_of is not None


def wide_names(end: str, wide: str, dtypes: Sequence[str]) -> Callable[[str, str], str | None]:
    """Return a `wide_name` for main parts of some dtypes with names that end with `end`, which `wide` replaces."""
    return lambda name, dtype: name.removesuffix(end) + wide if name.endswith(end) and dtype in dtypes else None


def packed_scheme(bits: int, group: int) -> Scheme | None:
    """Return how kernels can hold levels of some bits in groups. Fewer bits become 4 or 8 with the same values."""
    return Scheme(4 if bits <= 4 else 8, group) if group in GROUPS else None


def joined(found: Sequence[Levels], scheme: Scheme, k: int, dtype: torch.dtype) -> QuantizedWeight:
    """Return several projections of one input as one weight for kernels."""
    group = scheme.group or -(-k // 8) * 8
    parts = [each.packed(scheme.bits) for each in found]
    levels = F.pad(torch.cat([each.levels for each in parts]), (0, -k % group))
    scale, zeros = torch.cat([each.scales for each in parts]), [_zeros(each) for each in parts]
    by_zero = None if all(each.zeros is None for each in parts) else torch.cat(zeros)
    if scheme.group == 0 and by_zero is None:
        return QuantizedWeight(levels, scale.view(-1), scheme.bits, group, k, dtype)
    factors = power_of_two(scale.abs().amax(1))
    scales = (scale / factors[:, None]).half()
    return QuantizedWeight(levels, factors, scheme.bits, group, k, dtype, scales, by_zero)


def _zeros(part: Levels) -> Tensor:
    middle = torch.full(part.scales.shape, 2 ** (part.bits - 1), dtype=torch.uint8)
    return middle if part.zeros is None else part.zeros


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned levels [n, words * 32 / bits] of int32 [n, words]. The first level is in the lowest bits, and
    a level may continue in the next word.
    """
    if bits == 8:
        return words.contiguous().view(torch.uint8)
    if bits == 4:
        return nibbles(words.contiguous().view(torch.uint8))
    count = words.shape[1] * 32 // bits
    first = torch.arange(count) * bits
    wide = F.pad(words.long() & 0xFFFFFFFF, (0, 1))
    pairs = wide[:, first // 32] | (wide[:, first // 32 + 1] << 32)
    levels: Tensor = (pairs >> (first % 32)) & (2**bits - 1)
    return levels.to(torch.uint8)


def nibbles(stored: Tensor) -> Tensor:
    """Return the halves of each byte as unsigned levels, the low half first: [.., n] becomes [.., 2 n]."""
    return torch.stack((stored & 15, stored >> 4), -1).flatten(-2)


def packed_words(levels: Tensor, bits: int) -> Tensor:
    """Return unsigned levels [n, k] of 4 or 8 bits as int32 words, the inverse of `unpacked`."""
    whole = F.pad(levels, (0, -levels.shape[1] % (32 // bits)))
    if bits == 4:
        whole = torch.bitwise_or(whole[:, ::2], whole[:, 1::2] << 4)
    return whole.contiguous().view(torch.int32)


def finite(source: Source, name: str, scales: Tensor) -> Tensor:
    """Return the scales of a stored tensor. Raises CheckpointError if one is not a finite number."""
    if scales.numel() and not all(map(torch.isfinite, scales.aminmax())):  # NaN is both; it needs no other memory
        raise source.error(name, "has a scale that is not a finite number")
    return scales


def spread(values: Tensor, group: int, count: int, dim: int) -> Tensor:
    """Return `count` values, of which each `group` in a row are equal. A group may be larger than `count`."""
    return values.index_select(dim, torch.arange(count) // group)


def order_of(source: Source, name: str, k: int, groups: int) -> Tensor:
    """Return the stored group of each input. Raises CheckpointError if one does not exist."""
    order = source.part(name, (k,), INTEGERS).long()
    if not (order.min() >= 0 and order.max() < groups):
        raise source.error(name, f"has a group outside 0 to {groups - 1}")
    return order


def unsigned(source: Source, name: str, shape: Sequence[int], bits: int) -> Tensor:
    """Return stored integers as unsigned levels. Raises CheckpointError if one is outside the range of `bits`."""
    middle = 2 ** (bits - 1)
    stored = source.part(name, shape, INTEGERS).int().add_(middle)
    if stored.numel() and not (stored.min() >= 0 and stored.max() < 2 * middle):
        raise source.error(name, f"has a level outside int{bits}")
    return stored.to(torch.uint8)
