"""Formats of compressed-tensors: config.json names one scheme, and a layer has `weight` or `weight_packed`,
`weight_scale`, and if its levels have zero points `weight_zero_point`.

Read from compressed-tensors 0.20. Packed levels are unsigned, and the first one is in the lowest bits. Scales of
activations are not read: kernels for integers round activations to int8 by row, and widened layers round none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.models.formats.base import (
    FLOATS,
    INTEGERS,
    Levels,
    Source,
    WeightFormat,
    finite,
    order_of,
    packed_scheme,
    unpacked,
    unsigned,
    wide_names,
)
from baton.engine.models.formats.floats import OF_ACTIVATIONS, block_of, float8, mxfp4, nvfp4
from baton.engine.models.json_fields import Fields

PACKED, PLAIN = "pack-quantized", ("int-quantized", "naive-quantized")
FLOATS_OF = ("float-quantized", "naive-quantized", "mxfp8-quantized")
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
ORDERS = (None, False, "weight", "static")  # "group" and "dynamic" store `weight_g_idx`


def parse(section: Fields) -> WeightFormat:
    """Return the format of `quantization_config`. Raises CheckpointError with the key if it is not one of those."""
    groups = section.section("config_groups")
    if len(groups.values) != 1:
        raise section.error("config_groups", f"must have one entry, got {len(groups.values)}")
    for key in ("kv_cache_scheme", "transform_config"):
        if section.values.get(key):
            raise section.error(key, "is not supported")
    sparsity = section.section("sparsity_config")
    if sparsity.values and (stored := sparsity.text("format")) != "dense":  # dense tensors have all their zeros
        raise sparsity.error("format", f"{stored!r} is not supported (supported: dense)")
    group = groups.section(next(iter(groups.values)))
    form = group.text("format", section.text("format", ""))
    if group.has("output_activations"):
        raise group.error("output_activations", "is not supported")
    weights = group.section("weights")
    if weights.text("type") == "float":
        return _floats(section, weights, form)
    if form not in (PACKED, *PLAIN):
        raise section.error("format", f"{form!r} of integers is not supported")
    _check_activations(group)
    return _integers(weights, packed=form == PACKED)


def _floats(section: Fields, weights: Fields, form: str) -> WeightFormat:
    bits, strategy = weights.integer("num_bits"), weights.text("strategy")
    if not weights.flag("symmetric", True):
        raise weights.error("symmetric", "must be true for floats")
    if form == NVFP4 and bits == 4:
        return nvfp4(".weight_packed", ".weight_global_scale", divides=True)
    if form == MXFP4 and bits == 4:
        return mxfp4()
    if form not in FLOATS_OF or bits != 8:
        raise section.error("format", f"{form!r} with {bits} bits is not supported")
    if strategy == "block":
        block = block_of(weights, "block_structure")
        strategy = f"block {block[0]} x {block[1]}"
    else:
        block = {"tensor": (0, 0), "channel": (1, 0)}.get(strategy) or (1, _group_size(weights, strategy))
    return float8(f"compressed-tensors fp8 {strategy}", "_scale", block)


def _group_size(weights: Fields, strategy: str) -> int:
    if strategy != "group":
        raise weights.error("strategy", f"{strategy!r} is not supported")
    return weights.integer("group_size")


def _check_activations(group: Fields) -> None:
    """Accept float activations, and int8 ones with a scale that is computed for each token, which kernels have."""
    if not group.has("input_activations"):
        return
    given = group.section("input_activations")
    wanted = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    for key, value in wanted.items():
        if given.values.get(key) != value:
            raise given.error(key, f"must be {value!r}, got {given.values.get(key)!r}")


def _integers(weights: Fields, *, packed: bool) -> WeightFormat:
    bits, strategy = weights.integer("num_bits", low=2, high=8), weights.text("strategy")
    symmetric, by_tensor = weights.flag("symmetric", True), strategy == "tensor"
    if by_tensor and not symmetric:
        raise weights.error("strategy", "'tensor' with zero points is not supported")
    size = 0 if by_tensor or strategy == "channel" else _group_size(weights, strategy)
    order = weights.values.get("actorder")
    if order not in (*ORDERS, "group", "dynamic"):
        raise weights.error("actorder", f"{order!r} is not supported")
    return Integers(bits, size, packed, symmetric, by_tensor, ordered=order not in ORDERS).format()


@dataclass(frozen=True, slots=True)
class Integers:
    """Layers of integers in `bits`. `size` 0 means one scale per output, `ordered` that inputs have group numbers."""

    bits: int
    size: int = 0
    packed: bool = True
    symmetric: bool = True
    by_tensor: bool = False
    ordered: bool = False

    def format(self) -> WeightFormat:
        summary = f"compressed-tensors int{self.bits}" + (f" group {self.size}" if self.size else "")
        scheme = None if self.ordered else packed_scheme(self.bits, self.size)
        main = ("_packed", "", ("I32",)) if self.packed else (".weight", ".weight", ("I8",))
        return WeightFormat(summary, wide_names(*main), self.read, scheme, unread=OF_ACTIVATIONS)

    def read(self, source: Source, name: str, shape: Sequence[int]) -> Levels:
        """Return levels [n, k], scales and zero levels [n, groups]."""
        (n, k), layer = shape, name.removesuffix("weight")
        groups = -(-k // self.size) if self.size else 1
        scale = source.part(f"{layer}weight_scale", None if self.by_tensor else (n, groups), FLOATS)
        if self.by_tensor and scale.numel() != 1:
            raise source.error(f"{layer}weight_scale", f"has shape {list(scale.shape)}, expected one number")
        scale = finite(source, f"{layer}weight_scale", scale.float())
        scale = scale.view(-1, groups if not self.by_tensor else 1).expand(n, groups).contiguous()
        order = order_of(source, f"{layer}weight_g_idx", k, groups) if self.ordered else None
        levels, zeros = self._packed(source, layer, shape) if self.packed else self._plain(source, layer, shape)
        return Levels(levels, scale, zeros, self.bits, self.size, order)

    def _plain(self, source: Source, layer: str, shape: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        levels = unsigned(source, f"{layer}weight", shape, self.bits)
        zeros = (shape[0], self._groups(shape[1]))
        return levels, None if self.symmetric else unsigned(source, f"{layer}weight_zero_point", zeros, self.bits)

    def _packed(self, source: Source, layer: str, shape: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        (n, k), bits = shape, self.bits
        source.part(f"{layer}weight_shape", (2,), INTEGERS)
        words = source.part(f"{layer}weight_packed", (n, -(-k * bits // 32)), ("I32",))
        levels = unpacked(_whole(words, bits), bits)[:, :k]
        if self.symmetric:
            return levels, None
        words = source.part(f"{layer}weight_zero_point", (-(-n * bits // 32), self._groups(k)), ("I32",))
        return levels, unpacked(_whole(words.t(), bits), bits)[:, :n].t().contiguous()

    def _groups(self, k: int) -> int:
        return -(-k // self.size) if self.size else 1


def _whole(words: Tensor, bits: int) -> Tensor:
    """Return words with zeros up to a multiple of 32 levels."""
    return torch.nn.functional.pad(words, (0, -words.shape[1] % bits)) if 32 % bits else words
