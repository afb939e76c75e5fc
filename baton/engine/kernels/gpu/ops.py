"""The kernels of a model on an NVIDIA GPU: cuBLAS for products, Triton and FlashAttention for the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from baton.engine.batch import Batch
from baton.engine.kernels.base import Attention, HeadNorms, Linear, Rotation
from baton.engine.kernels.gpu import triton_decode, triton_prefill, triton_rotary, triton_rows
from baton.engine.kernels.gpu.flash_attention import Varlen, VarlenAttention, find_varlen, varlen_fits
from baton.engine.kernels.gpu.shapes import WIDEST_HEAD, decode_tiles, prefill_tiles, split_count
from baton.engine.kernels.torch_reference import TorchLinear, torch_attention


class GpuAttention:
    """Attention of one batch: single tokens by split KV, chunks by FlashAttention or the Triton kernel.

    The first call chooses, because the choice depends on block size and head size of the cache. A fixed batch has no
    single tokens, so nothing is split. If it has a window it uses the Triton kernel, with key tiles at fixed places.
    """

    def __init__(self, kernels: GpuKernels, batch: Batch, block_size: int, window: int | None, scale: float) -> None:
        self._kernels = kernels
        self._batch, self._block_size, self._window, self._scale = batch, block_size, window, scale
        self._longest_query, self._longest = max(batch.query_lens), max(batch.context_lens)
        self._singles = 1 in batch.query_lens
        self._whole: Attention | None = None
        self._pieces: triton_decode.Pieces | None = None

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
        if self._whole is None:
            self._whole = self._choose(keys, values)
        return self._whole(query, keys, values, out)

    def _choose(self, keys: Tensor, values: Tensor) -> Attention:
        varlen = self._kernels.varlen
        if max(keys.shape[3], values.shape[3]) > WIDEST_HEAD:
            return torch_attention(self._batch, self._block_size, self._window, self._scale)
        moving = self._batch.fixed and self._window is not None
        if self._longest_query > 1 and varlen is not None and varlen_fits(keys, values) and not moving:
            return VarlenAttention(varlen, self._batch, self._window, self._scale)
        return self._by_triton

    def _by_triton(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
        batch = self._batch
        where = query, keys, values, batch.block_tables, batch.query_starts, batch.kv_lens, out
        sizes = keys.shape[3], values.shape[3], keys.element_size()
        if self._longest_query > 1:
            triton_prefill.prefill_attention(
                *where,
                prefill_tiles(*sizes),
                longest_query=self._longest_query,
                scale=self._scale,
                window=self._window,
                steady=batch.fixed,
            )
        if self._singles:
            triton_decode.decode_attention(
                *where,
                self._pieces_for(query.shape[1], keys, values),
                decode_tiles(query.shape[1] // keys.shape[2], *sizes),
                scale=self._scale,
                window=self._window,
                unified=self._kernels.unified,
            )
        return out

    def _pieces_for(self, heads: int, keys: Tensor, values: Tensor) -> triton_decode.Pieces:
        """Return memory for the splits, shared by all layers, because they run one after another."""
        if self._pieces is None:
            sequences = len(self._batch.kv_lens)
            seen = self._longest if self._window is None else min(self._longest, self._window)
            splits = split_count(sequences * keys.shape[2], seen, self._kernels.processors)
            self._pieces = triton_decode.Pieces.empty(sequences, heads, splits, values.shape[3], keys.device)
        return self._pieces


class GpuKernels:
    """Implementation of `baton.engine.kernels.base.Kernels`. A row with slot -1 is padding and is not stored.

    `unified` is the constant that replaces the running maximum in decode attention, in units of scaled scores, or
    None. `varlen` is torch's FlashAttention over block tables, or None. `processors` is the device's SM count.
    """

    name = "triton"

    def __init__(self, processors: int, varlen: Varlen | None = None, unified: float | None = None) -> None:
        self.processors, self.varlen, self.unified = processors, varlen, unified

    @classmethod
    def on(cls, device: torch.device) -> GpuKernels:
        """Return the kernels for this device and version of torch."""
        return cls(torch.cuda.get_device_properties(device).multi_processor_count, find_varlen())

    def begin(self, batch: Batch) -> None:
        """Do nothing, because cuBLAS chooses the products."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> TorchLinear:
        return TorchLinear(weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        return triton_rows.rms_norm(x, None, weight, eps, out)

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        return triton_rows.rms_norm(x, delta, weight, eps, out)

    def rotate_and_store(
        self, qkv: Tensor, rotation: Rotation, norms: HeadNorms | None, slots: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        return triton_rotary.rotate_and_store(qkv, rotation, norms, slots, keys, values)

    def gate(self, gate_up: Tensor, activation: str, out: Tensor) -> Tensor:
        return triton_rows.gate(gate_up, activation, out)

    def gated(self, gate_up: Linear, x: Tensor, activation: str, scratch: Tensor, out: Tensor) -> Tensor:
        return self.gate(gate_up(x, scratch), activation, out)

    def by_row(self, layer: Linear) -> None:
        del layer  # cuBLAS chooses its product by the number of rows

    def steady_rows(self, heads: Sequence[int]) -> int:
        del heads
        return 0

    def facts(self, rows: Sequence[int]) -> tuple[str, ...]:
        del rows
        return (self.name, triton.__version__, f"varlen {self.varlen is not None}")

    def attention(self, batch: Batch, block_size: int, window: int | None, scale: float) -> GpuAttention:
        return GpuAttention(self, batch, block_size, window, scale)
