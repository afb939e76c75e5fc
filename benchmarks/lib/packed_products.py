"""Torch's products with packed int8 and int4 weights, as candidates for the machine's limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP = 32  # of torch's int4 product, as of ours


def packed_products(weights: str, x: torch.Tensor, weight: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return torch's products with `weight` [n, k] in int8 or int4. There are none for other weights."""
    if weights == "int8":
        scales = weight.float().abs().amax(1) / 127
        levels = (weight.float() / scales[:, None]).round().to(torch.int8)
        dynamic = _dynamic_int8(weight)
        rows, scale = x.float(), scales.to(x.dtype)
        return {
            "torch dynamic int8": lambda: dynamic(rows),
            "torch int8pack": lambda: torch.ops.aten._weight_int8pack_mm(x, levels, scale),
        }
    if weights == "int4":
        levels = torch.randint(0, 16, weight.shape, dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
        ranges = torch.full((weight.shape[1] // GROUP, weight.shape[0], 2), 0.01, dtype=x.dtype)
        return {"torch int4pack": lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, ranges)}
    return {}


def _dynamic_int8(weight: torch.Tensor) -> Callable[[torch.Tensor], object]:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = torch.nn.Parameter(weight.float(), requires_grad=False)
    whole = torch.nn.Sequential(layer)
    quantise: Callable[..., torch.nn.Module] = torch.ao.quantization.quantize_dynamic
    quantised = quantise(whole, {torch.nn.Linear}, torch.qint8)
    return quantised
