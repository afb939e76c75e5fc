"""Quantised linear layers of a checkpoint in the formats of compressed-tensors: `int-quantized` and `pack-quantized`.

Read from compressed-tensors 0.20: config.json names the scheme, and a layer has `weight` int8 or `weight_packed` int32,
`weight_scale`, and if its levels have zero points `weight_zero_point`. Packed levels are unsigned, and the first one is
in the lowest bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.kernels.quantized import QuantizedWeight, power_of_two
from baton.engine.models.json_fields import Fields

KEY = "quantization_config"
METHOD = "compressed-tensors"
PACKED, PLAIN = "pack-quantized", "int-quantized"
GROUPS = (32, 64, 128, 256)
INTEGERS = {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
SCALE, LEVELS, ZERO = "weight_scale", "weight_packed", "weight_zero_point"


@dataclass(frozen=True, slots=True)
class StoredScheme:
    """How a checkpoint stores its quantised layers. `group` 0 means one scale per output."""

    packed: bool
    bits: int
    group: int
    symmetric: bool


def stored_scheme(fields: Fields) -> StoredScheme | None:
    """Return the scheme that config.json declares, or None for another method. Raises CheckpointError with the key if
    the method is compressed-tensors, but the scheme is not one of those above.
    """
    section = fields.section(KEY)
    if section.text("quant_method", "") != METHOD:
        return None
    form, groups = section.text("format", ""), section.section("config_groups")
    if form not in (PACKED, PLAIN):
        raise section.error("format", f"must be {PACKED} or {PLAIN}, got {form!r}")
    if len(groups.values) != 1:
        raise section.error("config_groups", f"must have one entry, got {len(groups.values)}")
    group = groups.section(next(iter(groups.values)))
    if group.texts("targets") != ("Linear",):
        raise group.error("targets", 'must be ["Linear"]')
    if section.has("kv_cache_scheme"):
        raise section.error("kv_cache_scheme", "is not supported")
    _check_activations(group)
    return _scheme(group.section("weights"), packed=form == PACKED)


def _check_activations(group: Fields) -> None:
    """Accept float activations, and int8 ones with a scale that is computed for each token, which kernels have."""
    if not group.has("input_activations"):
        return
    given = group.section("input_activations")
    wanted = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
    for key, value in wanted.items():
        if given.values.get(key) != value:
            raise given.error(key, f"must be {value!r}, got {given.values.get(key)!r}")


def _scheme(weights: Fields, *, packed: bool) -> StoredScheme:
    bits, strategy = weights.integer("num_bits"), weights.text("strategy")
    if weights.text("type") != "int" or bits not in ((4, 8) if packed else (8,)):
        raise weights.error("num_bits", f"{bits} of type {weights.text('type')} is not supported")
    if strategy not in ("channel", "group"):
        raise weights.error("strategy", f"must be channel or group, got {strategy!r}")
    group = weights.integer("group_size") if strategy == "group" else 0
    if group and group not in GROUPS:
        raise weights.error("group_size", f"must be one of {', '.join(map(str, GROUPS))}, got {group}")
    if weights.values.get("actorder") is not None:
        raise weights.error("actorder", "is not supported")
    return StoredScheme(packed, bits, group, weights.flag("symmetric", True))


class Tensors(Protocol):
    """The methods of `baton.engine.models.checkpoint.Weights` that reading needs."""

    dtype: torch.dtype

    def float32(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in float32."""

    def integers(self, name: str, *shape: int) -> Tensor:
        """Return an integer tensor in its own dtype."""


def read_layer(
    weights: Tensors, names: tuple[str, ...], outs: tuple[int, ...], k: int, scheme: StoredScheme
) -> QuantizedWeight:
    """Return several projections [outs[i], k] of one input as one weight. Raises CheckpointError with the tensor."""
    group = scheme.group or -(-k // 8) * 8
    found = [_read(weights, name, out, k, scheme) for name, out in zip(names, outs, strict=True)]
    levels = torch.cat([each[0] for each in found])
    levels = torch.nn.functional.pad(levels, (0, -k % group))
    scale, zeros = torch.cat([each[1] for each in found]), [each[2] for each in found if each[2] is not None]
    by_zero = torch.cat(zeros) if zeros else None
    if scheme.group == 0 and by_zero is None:
        return QuantizedWeight(levels, scale.view(-1), scheme.bits, group, k, weights.dtype)
    factors = power_of_two(scale.abs().amax(1))
    return QuantizedWeight(
        levels, factors, scheme.bits, group, k, weights.dtype, (scale / factors[:, None]).half(), by_zero
    )


def _read(weights: Tensors, name: str, n: int, k: int, scheme: StoredScheme) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return levels uint8 [n, k], scales float32 and zero levels uint8, or None, both [n, groups]."""
    groups, middle = -(-k // scheme.group) if scheme.group else 1, 2 ** (scheme.bits - 1)
    scale = weights.float32(f"{name}.{SCALE}", n, groups)
    if not scheme.packed:
        levels = (weights.integers(f"{name}.weight", n, k).int() + middle).to(torch.uint8)
        zeros = None if scheme.symmetric else weights.integers(f"{name}.{ZERO}", n, groups)
        return levels, scale, None if zeros is None else (zeros.int() + middle).to(torch.uint8)
    weights.integers(f"{name}.weight_shape", 2)
    per_word = 32 // scheme.bits
    levels = unpacked(weights.integers(f"{name}.{LEVELS}", n, -(-k // per_word)), scheme.bits)[:, :k]
    if scheme.symmetric:
        return levels, scale, None
    words = weights.integers(f"{name}.{ZERO}", -(-n // per_word), groups)
    return levels, scale, unpacked(words.t().contiguous(), scheme.bits)[:, :n].t().contiguous()


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned levels [n, words * 32 / bits] of int32 [n, words]."""
    levels = words.view(torch.uint8)
    if bits == 8:
        return levels
    return torch.stack((levels & 15, levels >> 4), -1).flatten(1)


def packed_words(levels: Tensor, bits: int) -> Tensor:
    """Return unsigned levels [n, k] as int32 words, the inverse of `unpacked`."""
    whole = torch.nn.functional.pad(levels, (0, -levels.shape[1] % (32 // bits)))
    if bits == 4:
        whole = whole[:, ::2] | whole[:, 1::2] << 4
    return whole.contiguous().view(torch.int32)
