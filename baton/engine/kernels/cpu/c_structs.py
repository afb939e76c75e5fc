"""The argument structures of the C kernels, with the fields of the C sources."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_long, c_void_p
from typing import ClassVar

from torch import Tensor

TASK_INTS = 9  # int32 in a task_t


def _fields(*groups: tuple[type, str]) -> list[tuple[str, type]]:
    return [(name, kind) for kind, names in groups for name in names.split()]


class LinearArgs(ctypes.Structure):
    """`linear_args` of linear.c."""

    _fields_: ClassVar = _fields((c_void_p, "x w bias y"), (c_long, "rows n k stride_x stride_y wide"))


class NormArgs(ctypes.Structure):
    """`norm_args` of elementwise.c."""

    _fields_: ClassVar = _fields((c_void_p, "x out delta weight"), (c_long, "rows width"), (c_float, "eps"))


class RotateArgs(ctypes.Structure):
    """`rotate_args` of elementwise.c."""

    _fields_: ClassVar = _fields(
        (c_void_p, "qkv keys values cos sin q_norm k_norm slots"),
        (c_long, "rows heads kv_heads dim block_size k_block k_token k_head v_block v_token v_head"),
        (c_float, "eps"),
    )


class GateArgs(ctypes.Structure):
    """`gate_args` of elementwise.c."""

    _fields_: ClassVar = _fields((c_void_p, "gate_up out"), (c_long, "rows width activation"))


class AttentionArgs(ctypes.Structure):
    """`attention_args` of attention.c."""

    _fields_: ClassVar = _fields(
        (c_void_p, "query keys values out tables starts lens tasks partials"),
        (c_long, "count heads kv_heads dim value_dim block_size table_stride query_stride out_stride"),
        (c_long, "k_block k_token k_head v_block v_token v_head window unified narrow"),
        (c_float, "scale phi"),
    )


class BlocksArgs(ctypes.Structure):
    """`blocks_args` of blocks.c."""

    _fields_: ClassVar = _fields(
        (c_void_p, "planes blocks wire"),
        (c_long, "tensors layers layer_bytes block_size token_bytes begin end write"),
    )


def strides_of(cache: Tensor) -> tuple[int, int, int]:
    """Return the strides in elements of block, token and head in a cache [blocks, block_size, kv_heads, dim]."""
    block, token, head, _ = cache.stride()
    return block, token, head
