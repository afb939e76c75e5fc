"""The reference kernels in plain torch, for any device and dtype. All other kernels are tested against them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.engine.batch import Batch
from baton.engine.kernels.base import Attention, Grouped, HeadNorms, Linear, Rotation
from baton.engine.kernels.elementwise import mapped
from baton.engine.kernels.kv_levels import to_levels
from baton.engine.kernels.quantized import QuantizedWeight
from baton.engine.kernels.torch_attention import PagedAttention, SteadyAttention

ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def relu2(x: Tensor) -> Tensor:
    """Return the square of relu."""
    return F.relu(x).square()


PLAIN: dict[str, Callable[[Tensor], Tensor]] = ACTIVATE | {"relu": F.relu, "relu2": relu2}  # of networks without a gate


@dataclass(frozen=True, slots=True, eq=False)
class TorchLinear:
    """`Linear` as a matrix product of torch."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def width(self) -> int:
        return len(self.weight)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        if out.dtype is not x.dtype:  # only F.linear, because `out` of torch.mm must have the dtype of x
            return out.copy_(F.linear(x, self.weight, self.bias))
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)


class TorchKernels:
    """Implements `baton.engine.kernels.base.Kernels`."""

    name = "torch"
    fixed = False  # the forward is

    def begin(self, batch: Batch) -> None:
        self.fixed = batch.fixed

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> TorchLinear:
        return TorchLinear(weight, bias)

    def quantized(self, weight: QuantizedWeight, bias: Tensor | None, keep: Callable[[Tensor], Tensor]) -> TorchLinear:
        return TorchLinear(keep(weight.widened()), bias)

    def rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        if delta is not None:
            x.add_(delta)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return torch.mul(weight, normed.to(x.dtype), out=out)

    def rotate_and_store(
        self, qkv: Tensor, rotation: Rotation, norms: HeadNorms | None, slots: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        kv_heads = keys.shape[-2]
        query, key, value = qkv.tensor_split((qkv.shape[1] - 2 * kv_heads, qkv.shape[1] - kv_heads), dim=1)
        if norms is not None:
            self.rms_norm(query, None, norms.query, norms.eps, query)
            self.rms_norm(key, None, norms.key, norms.eps, key)
        query.copy_(rotate(query, rotation))
        key = rotate(key, rotation)
        if keys.dtype is torch.int8:
            key, value = to_levels(key), to_levels(value)
        keys.view(-1, *keys.shape[2:]).index_put_((slots,), key)
        values.view(-1, *values.shape[2:]).index_put_((slots,), value)
        return query

    def gate(self, gate_up: Tensor, activation: str, out: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.mul(mapped(ACTIVATE[activation], gate, fixed=self.fixed), up, out=out)

    def gated(self, gate_up: Linear, x: Tensor, activation: str, scratch: Tensor, out: Tensor) -> Tensor:
        return self.gate(gate_up(x, scratch), activation, out)

    def by_row(self, layer: Linear) -> None:
        del layer  # torch and cuBLAS choose their products by the number of rows

    def grouped(self, weights: Tensor) -> Grouped | None:
        del weights
        return None

    def steady_rows(self, heads: Sequence[int]) -> int:
        del heads
        return 0

    def facts(self, rows: Sequence[int]) -> tuple[str, ...]:
        del rows
        return (self.name,)

    def attention(self, batch: Batch, block_size: int, window: int | None, scale: float) -> Attention:
        return torch_attention(batch, block_size, window, scale)


def torch_attention(batch: Batch, block_size: int, window: int | None, scale: float) -> Attention:
    """Return attention for any device, dtype and head size."""
    kind = SteadyAttention if batch.fixed else PagedAttention
    return kind(batch, block_size, window, scale)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pairs (i, i + head_dim / 2) of x [N, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = rotation.cos[:, None], rotation.sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
