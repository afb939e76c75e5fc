"""The parts that transformers are made of. Weights come in through `Weights`, checked by name and shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from baton.engine.kernels.base import Attention, Kernels, Linear, Rotation
    from baton.engine.kernels.scratch import Scratch
    from baton.engine.model.weights import Weights

# The names of config.json, and those of the kernels.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What all layers share in one forward: the rotation of each row, where its K and V go, what it may see."""

    rotation: Rotation
    slots: Tensor
    attend: dict[int | None, Attention]  # by window
    scratch: Scratch
    over_rows: bool = False  # `attend` takes K and V of this forward's own rows in place of the cache
    fixed: bool = False  # as that of the batch


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Makes the parts of a model: its weights, and the kernels that they are computed with."""

    weights: Weights
    kernels: Kernels

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        """An RMSNorm over `size` elements."""
        return RMSNorm(self.kernels, self.weights.tensor(f"{name}.weight", size), eps)

    def linear(self, names: tuple[str, ...], outs: tuple[int, ...], n_in: int, *, bias: bool) -> Linear:
        """Several projections of the same input as one matrix: its output rows lie in the order of `names`."""
        weight = self.columns(names, outs, n_in)
        if not bias:
            return self.kernels.linear(weight)
        return self.kernels.linear(weight, self.weights.vector(tuple(f"{name}.bias" for name in names), outs))

    def columns(self, names: tuple[str, ...], outs: tuple[int, ...], n_in: int) -> Tensor:
        """The weight of such a layer [sum(outs), n_in]. Under tensor parallelism each rank holds its share of rows."""
        return self.weights.matrix(tuple(f"{name}.weight" for name in names), outs, n_in)

    def whole(self, name: str, out: int, n_in: int, *, bias: bool) -> Linear:
        """A projection that every rank computes whole: its results are needed by all, and it is small."""
        weight = self.weights.tensor(f"{name}.weight", out, n_in)
        return self.kernels.linear(weight, self.weights.tensor(f"{name}.bias", out) if bias else None)

    def summed(self, name: str, out: int, n_in: int, *, bias: bool) -> Linear:
        """A projection back to the residual stream, whose input features were made by `linear` layers.

        Under tensor parallelism each rank holds its share of the input features, and the results are summed.
        """
        return self.linear((name,), (out,), n_in, bias=bias)

    def head(self, embed: Tensor, *, tied: bool) -> Linear:
        """The projection to the vocabulary: by the embedding [vocab, n_in] itself if `tied`, else by `lm_head`."""
        return self.kernels.linear(embed if tied else self.weights.tensor("lm_head.weight", *embed.shape))


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """Root mean square norm over the last dimension."""

    kernels: Kernels
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps, out)

    def after_adding(self, delta: Tensor | None, x: Tensor, out: Tensor) -> Tensor:
        """Add delta to x in place (None: nothing to add), and the norm of the sum."""
        if delta is None:
            return self(x, out)
        return self.kernels.add_rms_norm(x, delta, self.weight, self.eps, out)
