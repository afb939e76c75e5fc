"""The kernels that model files are written against.

One row per new token throughout. All results go to tensors that the caller owns (`out`), so that a forward in steady
state allocates nothing. `N` is the rows of the batch; activations are contiguous and of the model's dtype.

Memory that one forward after another works in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engine.batch import Batch


ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
Splits = Literal["auto", "load", "load_bf16"]
"""Into how many pieces the context of a decode row is cut: auto: what is fastest; load: more, the fewer rows there are,
as servers on GPUs do it; load_bf16: so, and what the pieces leave is rounded to bfloat16.
"""


class HeadNorms(NamedTuple):
    """The RMS norms of each query and key head before rotation (Qwen3): weights [head_dim]."""

    query: Tensor
    key: Tensor
    eps: float


class Rotation(NamedTuple):
    """Cosines and sines of a forward's positions, each [N, head_dim / 2] in the model's dtype."""

    cos: Tensor
    sin: Tensor


class BlockCopy(Protocol):
    """Copies KV between the blocks of a cache and its wire order."""

    def __call__(
        self, planes: Sequence[Tensor], layers: range, blocks: Sequence[int], span: range, wire: Tensor, *, write: bool
    ) -> None:
        """Positions `span` of a sequence that lies in `blocks`, of `layers` of all `planes`, each
        [layers, total_blocks, block_size, kv_heads, head_dim]; to `wire`, uint8 [bytes of that], or `write`: from it.
        Nothing is checked.
        """


class Linear(Protocol):
    """y = x W^T + b, with W [width, K]."""

    @property
    def width(self) -> int:
        """How many features come out."""

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """Write the product of x [N, K] to out [N, width], of the model's dtype or float32, and return it."""


class Attention(Protocol):
    """Causal attention of one batch over paged KV, made once per forward and window, used by each layer."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
        """Attend with query [N, heads, head_dim], whose own K and V are in the cache already.

        `keys` [blocks, block_size, kv_heads, head_dim] and `values` [.., value_dim] are one layer's cache; they may be
        views with strides, but the last dimension is contiguous. Writes out [N, heads * value_dim] and returns it.
        """


class Kernels(Protocol):
    """One implementation for one device and dtype. Used by one thread."""

    @property
    def name(self) -> str:
        """What `baton profile` and the logs call it."""

    def begin(self, batch: Batch) -> None:
        """A forward of this batch begins. In fixed ones layers take products that do not change with the rows."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A layer with weight [width, K], which it may use as it lies, and bias [width]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        """Writes weight * x / sqrt(mean(x^2) + eps), over the last dimension, to out; statistics in float32."""

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        """Add delta to x in place, then `rms_norm` of x to out."""

    def rotate_and_store(
        self,
        qkv: Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """Rotate queries and keys, and write keys and values to the cache.

        qkv [N, heads + 2 kv_heads, head_dim] holds queries, keys and values; its query part is changed in place, and
        returned, [N, heads, head_dim]. `slots` int64 [N] are the batch's slot_mapping; `keys` and `values` one
        layer's cache, as in `Attention`.
        """

    def gate(self, gate_up: Tensor, activation: str, out: Tensor) -> Tensor:
        """Writes activation(gate) * up to out [N, I], for gate_up [N, 2 I]; one of ACTIVATIONS."""

    def gated(self, gate_up: Linear, x: Tensor, activation: str, room: Tensor, out: Tensor) -> Tensor:
        """`gate` of the product of x [N, K] with a layer of width 2 I: out [N, I]. `room` [N, 2 I] may be written."""

    def by_row(self, layer: Linear) -> Linear | None:
        """A layer of `linear` with a product whose rows have the same bits however many there are; None: it has none.

        Fixed forwards take it where the number of rows is not fixed.
        """

    def steady_rows(self, heads: Sequence[int]) -> int:
        """Up to so many rows the layers made so far, and fixed attention over heads of these sizes, give a row the same
        bits however many there are. 0: they may not.
        """

    def facts(self, rows: Sequence[int]) -> tuple[str, ...]:
        """What the bits of fixed forwards depend on here, if layers multiply so many rows.

        Beside torch, the number of threads and the device. Asked when all layers are made.
        """

    def attention(self, batch: Batch, block_size: int, window: int | None, scale: float) -> Attention:
        """Attention for this batch. With a `window`, a token sees itself and the window - 1 positions before it.

        Where the batch is `fixed`, the bits of a row depend on its position and on the KV before it alone.
        """


class Scratch:
    """Tensors for what a forward computes on its way, used again by the next one: views of storage that only grows.

    `take` gives one [rows, width] per name; what it held is gone when the name is taken again.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._storage: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """A contiguous [rows, width] of `dtype` (None: the model's)."""
        view = self._views.get(name)
        if view is None or view.shape != (rows, width):
            view = self._views[name] = self._grown(name, rows * width, dtype or self.dtype).view(rows, width)
        return view

    def _grown(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        storage = self._storage.get(name)
        if storage is None or len(storage) < size:
            storage = self._storage[name] = torch.empty(size, dtype=dtype, device=self.device)
        return storage[:size]
