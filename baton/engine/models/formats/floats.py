"""Floats in 8 and 4 bits, with scales by tensor, output, block or group of inputs.

Formats: `fp8` and `fbgemm_fp8` of transformers (DeepSeek: blocks of 128 x 128), FP8 and NVFP4 of ModelOpt, MXFP4 of
gpt-oss, and the formats of compressed-tensors with floats. There is no kernel for them, so layers are widened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.models.formats.base import (
    BYTES,
    FLOAT8,
    FLOATS,
    Source,
    WeightFormat,
    finite,
    nibbles,
    spread,
    wide_names,
)
from baton.engine.models.json_fields import Fields

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENTS = ("U8", "F8_E8M0")  # powers of two
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
OF_ACTIVATIONS = (".input_scale", "_proj_input_scale", ".activation_scale", ".input_global_scale", ".input_zero_point")
Block = tuple[int, int]  # outputs and inputs that share a scale; 0 means all of them


def float8(summary: str, scale: str, block: Block, of_stack: Block | None = None) -> WeightFormat:
    """Return the format of tensors in 8 bits. The name of a scale has `scale` in addition, or `_scale` (vLLM), or
    `_weight_scale` (stacks of ModelOpt). Stacks of experts have the blocks `of_stack`, if they differ.
    """

    def read(source: Source, name: str, shape: Sequence[int]) -> Tensor:
        wide = source.part(name, shape, FLOAT8).float()
        ending = next((each for each in ("_scale", "_weight_scale") if f"{name}{each}" in source), scale)
        own = (of_stack or block) if len(shape) == 3 else block
        return wide.mul_(scales_of(source, f"{name}{ending}", shape, own, (*FLOATS, *EXPONENTS)))

    return WeightFormat(summary, wide_names("", "", FLOAT8), read, unread=OF_ACTIVATIONS, dimensions=(2, 3))


def nvfp4(packed: str, whole: str, *, divides: bool) -> WeightFormat:
    """Return a format in 4 bits with a float8 scale for 16 inputs. `packed` is the end of a tensor's name, and `whole`
    that of a further scale of all values, which divides if `divides`.
    """

    def read(source: Source, name: str, shape: Sequence[int]) -> Tensor:
        layer = name.removesuffix(".weight")
        values = _values(source.part(f"{layer}{packed}", (shape[0], shape[1] // 2), BYTES))
        values *= scales_of(source, f"{layer}.weight_scale", shape, (1, 16), FLOAT8)
        factor = source.part(f"{layer}{whole}", None, ("F32",))
        if factor.numel() != 1:
            raise source.error(f"{layer}{whole}", f"has shape {list(factor.shape)}, expected one number")
        finite(source, f"{layer}{whole}", 1 / factor if divides else factor)
        return values.div_(factor.view(())) if divides else values.mul_(factor.view(()))

    return WeightFormat("nvfp4", wide_names(packed, ".weight", BYTES), read, unread=OF_ACTIVATIONS)


def mxfp4() -> WeightFormat:
    """Return the format of compressed-tensors in 4 bits, with an exponent for 32 inputs."""

    def read(source: Source, name: str, shape: Sequence[int]) -> Tensor:
        values = _values(source.part(f"{name}_packed", (shape[0], shape[1] // 2), BYTES))
        return values.mul_(scales_of(source, f"{name}_scale", shape, (1, 32), EXPONENTS))

    return WeightFormat("mxfp4", wide_names("_packed", "", BYTES), read, unread=OF_ACTIVATIONS)


def mxfp4_experts() -> WeightFormat:
    """Return the format of gpt-oss: stacks [experts, k, n], stored with outputs before inputs."""

    def read(source: Source, name: str, shape: Sequence[int]) -> Tensor:
        experts, k, n = shape
        blocks = source.part(f"{name}_blocks", (experts, n, -(-k // 32), 16), BYTES)
        stored = source.part(f"{name}_scales", blocks.shape[:-1], EXPONENTS)
        scales = finite(source, f"{name}_scales", _powers(stored))
        stack = torch.empty(experts, k, n, dtype=torch.bfloat16)  # which holds these values
        for expert, levels, factors in zip(stack, blocks, scales, strict=True):
            expert.copy_(_values(levels).mul_(factors[..., None]).flatten(1)[:, :k].t())
        return stack

    return WeightFormat("mxfp4", wide_names("_blocks", "", BYTES), read, dimensions=(3,))


def scales_of(source: Source, name: str, shape: Sequence[int], block: Block, dtypes: Sequence[str]) -> Tensor:
    """Return scales in float32 that can be multiplied with a tensor of `shape`."""
    stored, (n, k) = source.part(name, None, dtypes), shape[-2:]
    rows, columns = block[0] or n, block[1] or k
    expected = [*shape[:-2], -(-n // rows), -(-k // columns)]
    if stored.numel() == 1 and block == (0, 0):
        expected = [1] * len(shape)  # also for a whole stack
    flat = stored.ndim < 2 and stored.numel() == math.prod(expected)
    # FbgemmFp8Llama4TextExperts of transformers turns the scales of this stack.
    turned = stored.ndim == 3 and "down_proj" in name and list(stored.transpose(-1, -2).shape) == expected
    if list(stored.shape) != expected and not flat and not turned:
        raise source.error(name, f"has shape {list(stored.shape)}, expected {expected}")
    wide = finite(source, name, (stored.float() if stored.dtype in FLOATING else _powers(stored)).view(expected))
    return spread(spread(wide, rows, n, -2), columns, k, -1)


def block_of(section: Fields, key: str) -> Block:
    """Return outputs and inputs of a block from config.json. Raises CheckpointError if they are not two sizes."""
    sizes = section.integers(key)
    if len(sizes) != 2 or min(sizes) < 1:
        raise section.error(key, f"must be two sizes, got {list(sizes)}")
    return sizes[0], sizes[1]


def _powers(stored: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(stored.shape), stored.view(torch.uint8).int() - 127)


def _values(stored: Tensor) -> Tensor:
    return torch.tensor(E2M1)[nibbles(stored).int()]
