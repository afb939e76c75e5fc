"""Fused row-wise kernels: RMS norm (optionally after adding the residual) and the gate of an MLP.

They round at the same places as the torch reference: sums in float32, results in the activations' dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

GATE_COLUMNS = 1024


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


def rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
    """Run `Kernels.rms_norm`, or `Kernels.add_rms_norm` with `delta`, for x [N, width] with contiguous rows."""
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
