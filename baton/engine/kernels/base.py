"""The protocols of kernels, and `Scratch`, the memory that forwards reuse.

Activations have one row per new token, N in a batch; they are contiguous and of the model's dtype. All results go to
tensors that the caller owns (`out`), so that a forward in steady state allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from baton.engine.batch import Batch
from baton.engine.kernels.quantized import QuantizedWeight

ANY_ROWS = 1 << 30  # more than any forward has
Splits = Literal["auto", "load", "load_bf16"]
"""How decode attention splits contexts. `auto` keeps all threads busy. `load` makes more splits for fewer sequences, as
GPU servers do, and `load_bf16` also rounds their results to bfloat16.
"""


class HeadNorms(NamedTuple):
    """Weights [head_dim] of the RMS norms of query and key heads before rotation (Qwen3)."""

    query: Tensor
    key: Tensor
    eps: float


class Rotation(NamedTuple):
    """Cosines and sines of a forward's positions, each [N, head_dim / 2] in the model's dtype."""

    cos: Tensor
    sin: Tensor


class Linear(Protocol):
    """y = x W^T + b, with W [width, K]."""

    @property
    def width(self) -> int:
        """Number of output features."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Write the product of x [N, K] to out [N, width], of the model's dtype or float32, and return `out`."""


class Groups(NamedTuple):
    """Rows sorted by expert: int32 [experts + 1] each, the first row and the first row tile of each expert, and the
    totals. `most` is the largest possible number of tiles, and `tile_rows` the rows of one.
    """

    starts: Tensor
    tiles: Tensor
    most: int
    tile_rows: int


class Grouped(Protocol):
    """Products of rows sorted by expert with weights [experts, width, K]. The host reads nothing from the device."""

    @property
    def width(self) -> int:
        """Number of output features."""

    def groups(self, sorted_experts: Tensor, *, fixed: bool) -> Groups:
        """Return the groups of P rows with these experts, int64 [P]. Bits of a row do not depend on P if `fixed`."""

    def __call__(self, x: Tensor, groups: Groups, out: Tensor) -> Tensor:
        """Write the products for contiguous x [P, K] to a contiguous out [P, width], and return `out`."""


class Attention(Protocol):
    """Causal attention of one batch over paged KV, made once per forward and window, and used by each layer."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
        """Attend with query [N, heads, head_dim], write and return out [N, heads * value_dim]. `keys` [blocks,
        block_size, kv_heads, head_dim] and `values` [.., value_dim] are one layer's cache, which holds K and V of this
        batch. They may be strided views, contiguous in the last dimension.
        """


class Kernels(Protocol):
    """One set of kernels for one device and dtype, used by one thread."""

    @property
    def name(self) -> str:
        """Name in `baton profile` and logs."""

    def begin(self, batch: Batch) -> None:
        """Begin a forward of this batch. In fixed forwards, layers use products that do not vary with the rows."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return a layer with weight [width, K], which it may use without a copy, and bias [width]."""

    def quantized(self, weight: QuantizedWeight, bias: Tensor | None, keep: Callable[[Tensor], Tensor]) -> Linear:
        """Return a layer with a quantised weight. `keep` returns a tensor's copy in memory for weights. Kernels without
        such a product widen the weight to the model's dtype.
        """

    def rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        """Add `delta`, unless it is None, to x in place. Then write weight * x / sqrt(mean(x^2) + eps) over the last
        dimension to `out`, with statistics in float32.
        """

    def rotate_and_store(
        self, qkv: Tensor, rotation: Rotation, norms: HeadNorms | None, slots: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Rotate queries and keys, write keys and values to the cache, and return the queries [N, heads, head_dim].

        qkv [N, heads + 2 kv_heads, head_dim] holds queries, keys and values; queries are changed in place. `slots`
        int64 [N] is the batch's slot_mapping; `keys` and `values` are one layer's cache, as in `Attention`.
        """

    def gate(self, gate_up: Tensor, activation: str, out: Tensor) -> Tensor:
        """Write activation(gate) * up to out [N, I], for gate_up [N, 2 I] and silu, gelu or gelu_tanh."""

    def gated(self, gate_up: Linear, x: Tensor, activation: str, scratch: Tensor, out: Tensor) -> Tensor:
        """Write `gate` of gate_up(x), for x [N, K] and width 2 I, to out [N, I]. `scratch` is [N, 2 I]."""

    def by_row(self, layer: Linear) -> Linear | None:
        """Return the layer with bits of a row independent of the number of rows, for fixed forwards, or None."""

    def grouped(self, weights: Tensor) -> Grouped | None:
        """Return the products with weights [experts, width, K], or None if experts are computed one by one."""

    def steady_rows(self, heads: Sequence[int]) -> int:
        """Return the most rows for which a row's bits do not depend on their number, for these heads: 0 for none,
        ANY_ROWS if no product depends on it.
        """

    def facts(self, rows: Sequence[int]) -> tuple[str, ...]:
        """Return the facts behind the bits of fixed forwards of `rows`, but torch, threads, device. Call it last."""

    def attention(self, batch: Batch, block_size: int, window: int | None, scale: float) -> Attention:
        """Return attention for this batch. A `window` limits a token to itself and window - 1 positions before it. If
        the batch is `fixed`, the bits of a row depend only on its position and the KV before it.
        """


class Scratch:
    """Named tensors for intermediate results, as views of storage that only grows and that the next forward reuses."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._storage: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}
        self.moves = 0  # how often a tensor moved, because it grew

    def take(self, name: str, rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the contiguous [rows, width] of `name`, in `dtype` or else the model's. Its content is undefined."""
        view = self._views.get(name)
        if view is None or view.shape != (rows, width):
            size = rows * width
            storage = self._storage.get(name)
            if storage is None or len(storage) < size:
                storage = self._storage[name] = torch.empty(size, dtype=dtype or self.dtype, device=self.device)
                self.moves += 1
            view = self._views[name] = storage[:size].view(rows, width)
        return view
