"""Fused kernels between the products: RMS norm with the residual, the gate, and rotation with the KV write.

They round at the same places as the torch reference: sums in float32, results in the activations' dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.base import HeadNorms, Rotation

GATE_COLUMNS = 1024
HEADS_AT_ONCE = 8


# fmt: off
@triton.jit
def rms_norm_kernel(
    x: tl.tensor, delta: tl.tensor, weight: tl.tensor, out: tl.tensor, x_row: int, delta_row: int, out_row: int,
    width: int, eps: float,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    there = columns < width
    values = tl.load(x + row * x_row + columns, mask=there, other=0.0)
    if ADD:
        more = tl.load(delta + row * delta_row + columns, mask=there, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
        tl.store(x + row * x_row + columns, values, mask=there)
    wide = values.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide) / width + eps)
    normed = (wide * scale).to(values.dtype).to(tl.float32)
    factors = tl.load(weight + columns, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * out_row + columns, (normed * factors).to(values.dtype), mask=there)


@triton.jit
def gate_kernel(gate_up: tl.tensor, out: tl.tensor, width: int, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < width
    start = gate_up + row * 2 * width
    stored = tl.load(start + columns, mask=there, other=0.0)
    gate = stored.to(tl.float32)
    up = tl.load(start + width + columns, mask=there, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # tanh(y) = 2 / (1 + exp(-2 y)) - 1, which is accurate at both ends of float32
        bent = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(-2.0 * bent))
    result = active.to(stored.dtype).to(tl.float32) * up
    tl.store(out + row * width + columns, result.to(stored.dtype), mask=there)


@triton.jit
def rotate_and_store_kernel(
    qkv: tl.tensor, cos: tl.tensor, sin: tl.tensor, query_norm: tl.tensor, key_norm: tl.tensor, slots: tl.tensor,
    keys: tl.tensor, values: tl.tensor, heads: int, kv_heads: int, block_size: int, key_block: int, key_slot: int,
    key_head: int, value_block: int, value_slot: int, value_head: int, eps: float,
    HALF: tl.constexpr, NORMS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:
    """Process HEADS heads of one row, ordered as queries, keys and values. A row of slot -1 is padding."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    there = (head < heads + 2 * kv_heads) & (column < HALF)
    is_query = there & (head < heads)
    is_key = there & (head >= heads) & (head < heads + kv_heads)
    source = qkv + (row * (heads + 2 * kv_heads) + head) * (2 * HALF) + column
    first = tl.load(source, mask=there, other=0.0)
    second = tl.load(source + HALF, mask=there, other=0.0)
    dtype = first.dtype

    a, b = first.to(tl.float32), second.to(tl.float32)
    if NORMS:
        scale = 1.0 / tl.sqrt_rn((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)[:, None]
        weight_a = tl.load(query_norm + column, mask=is_query, other=0.0).to(tl.float32)
        weight_b = tl.load(query_norm + HALF + column, mask=is_query, other=0.0).to(tl.float32)
        weight_a += tl.load(key_norm + column, mask=is_key, other=0.0).to(tl.float32)
        weight_b += tl.load(key_norm + HALF + column, mask=is_key, other=0.0).to(tl.float32)
        a = ((a * scale).to(dtype).to(tl.float32) * weight_a).to(dtype).to(tl.float32)
        b = ((b * scale).to(dtype).to(tl.float32) * weight_b).to(dtype).to(tl.float32)
    c = tl.load(cos + row * HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + row * HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
    rotated_a, rotated_b = (a * c - b * s).to(dtype), (b * c + a * s).to(dtype)
    tl.store(source, rotated_a, mask=is_query)
    tl.store(source + HALF, rotated_b, mask=is_query)

    slot = tl.load(slots + row)
    stored = slot >= 0
    block, offset = slot // block_size, slot % block_size
    key_place = keys + block * key_block + offset * key_slot + (head - heads) * key_head + column
    tl.store(key_place, rotated_a, mask=is_key & stored)
    tl.store(key_place + HALF, rotated_b, mask=is_key & stored)
    is_value = there & (head >= heads + kv_heads) & stored
    value_place = values + block * value_block + offset * value_slot + (head - heads - kv_heads) * value_head + column
    tl.store(value_place, first, mask=is_value)
    tl.store(value_place + HALF, second, mask=is_value)


def rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """Run `Kernels.rms_norm` for x [N, width] with contiguous rows."""
    rows, width = x.shape
    if rows:
        block = triton.next_power_of_2(width)
        rms_norm_kernel[(rows,)](
            x, x if delta is None else delta, weight, out,
            x.stride(0), x.stride(0) if delta is None else delta.stride(0), out.stride(0), width, eps,
            ADD=delta is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
        )
    return out


def gate(gate_up: Tensor, activation: str, out: Tensor) -> Tensor:
    """Run `Kernels.gate` for contiguous gate_up [N, 2 I] and out [N, I]."""
    rows, width = out.shape
    if rows:
        grid = (rows, triton.cdiv(width, GATE_COLUMNS))
        gate_kernel[grid](gate_up, out, width, ACTIVATION=activation, BLOCK=GATE_COLUMNS, num_warps=4)
    return out


def rotate_and_store(
    qkv: Tensor, rotation: Rotation, norms: HeadNorms | None, slots: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Run `Kernels.rotate_and_store` for a contiguous qkv. A row with slot -1 is not stored."""
    rows, all_heads, head_dim = qkv.shape
    kv_heads = keys.shape[2]
    heads = all_heads - 2 * kv_heads
    if rows:
        rotate_and_store_kernel[(rows, triton.cdiv(all_heads, HEADS_AT_ONCE))](
            qkv, rotation.cos, rotation.sin, qkv if norms is None else norms.query, qkv if norms is None else norms.key,
            slots, keys, values, heads, kv_heads, keys.shape[1], *keys.stride()[:3], *values.stride()[:3],
            0.0 if norms is None else norms.eps,
            HALF=head_dim // 2, NORMS=norms is not None, HEADS=HEADS_AT_ONCE,
            BLOCK=triton.next_power_of_2(head_dim // 2), num_warps=4,
        )
    return qkv[:, :heads]
