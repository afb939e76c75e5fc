"""The parts that transformers are made of. Weights come in through `Weights`, checked by name and shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from baton.engine.model.loader import Checkpoint

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b, with weight [out, in] and bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root mean square norm over the last dimension: statistics in float32, the weight applied in its dtype."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


@dataclass(frozen=True, slots=True)
class Weights:
    """Takes tensors out of a checkpoint, in the dtype and on the device of the model."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One tensor. Raises CheckpointError if it is missing or has another shape."""
        # A copy even where nothing is converted: a view of the file would follow what happens to the file.
        return self.checkpoint.take(name, shape).to(self.device, self.dtype, copy=True)

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        """An RMSNorm over `size` elements."""
        return RMSNorm(self.tensor(f"{name}.weight", size), eps)

    def linear(self, names: tuple[str, ...], outs: tuple[int, ...], n_in: int, *, bias: bool) -> Linear:
        """Several projections of the same input as one matrix: its output rows lie in the order of `names`."""
        weight = torch.cat([self.tensor(f"{n}.weight", out, n_in) for n, out in zip(names, outs, strict=True)])
        if not bias:
            return Linear(weight)
        return Linear(weight, torch.cat([self.tensor(f"{n}.bias", out) for n, out in zip(names, outs, strict=True)]))
