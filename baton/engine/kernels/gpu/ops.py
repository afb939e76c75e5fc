"""The kernels of a model on an NVIDIA GPU: cuBLAS for products, Triton and FlashAttention for the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from baton.engine.batch import Batch
from baton.engine.kernels.base import Attention, HeadNorms, Rotation
from baton.engine.kernels.gpu import triton_attention, triton_rows
from baton.engine.kernels.gpu.flash_attention import Varlen, VarlenAttention, find_varlen, varlen_fits
from baton.engine.kernels.gpu.shapes import decode_tiles, prefill_tiles, split_count, split_programs
from baton.engine.kernels.gpu.triton_experts import GroupedLinear
from baton.engine.kernels.torch_reference import TorchKernels


class GpuAttention:
    """Attention of one batch: single tokens by split KV, chunks by FlashAttention or the Triton kernel. The first call
    chooses, because the choice depends on block size and head size of the cache. A fixed batch has no single tokens, so
    nothing is split. It uses the Triton kernel, because its bits must not depend on the block size, which differs
    between prefill and decode workers.
    """

    def __init__(self, kernels: GpuKernels, batch: Batch, block_size: int, window: int | None, scale: float) -> None:
        self._kernels = kernels
        self._batch, self._block_size, self._window, self._scale = batch, block_size, window, scale
        self._longest_query, self._longest = max(batch.query_lens), max(batch.context_lens)
        self._singles = 1 in batch.query_lens
        self._chosen: Attention | None = None
        self._pieces: triton_attention.Pieces | None = None

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
        if self._chosen is None:
            self._chosen = self._choose(keys, values)
        return self._chosen(query, keys, values, out)

    def _choose(self, keys: Tensor, values: Tensor) -> Attention:
        varlen, fixed = self._kernels.varlen, self._batch.fixed
        if self._longest_query > 1 and varlen is not None and varlen_fits(keys, values) and not fixed:
            return VarlenAttention(varlen, self._batch, self._window, self._scale)
        return self._by_triton

    def _by_triton(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
        batch, scale, window, longest = self._batch, self._scale, self._window, self._longest_query
        where = query, keys, values, batch.block_tables, batch.query_starts, batch.kv_lens, out
        sizes = keys.shape[3], values.shape[3], keys.element_size()
        if longest > 1:
            tiles = prefill_tiles(*sizes, self._kernels.generation)
            triton_attention.prefill_attention(
                *where, tiles, longest_query=longest, scale=scale, window=window, steady=batch.fixed
            )
        if self._singles:
            pieces, unified = self._pieces_for(query.shape[1], keys, values), self._kernels.unified
            tiles = decode_tiles(query.shape[1] // keys.shape[2], *sizes)
            pairs, splits = len(batch.kv_lens) * keys.shape[2], pieces.bases.shape[2]
            programs = split_programs(pairs, splits, self._kernels.processors)
            triton_attention.decode_attention(
                *where, pieces, tiles, programs=programs, scale=scale, window=window, unified=unified
            )
        return out

    def _pieces_for(self, heads: int, keys: Tensor, values: Tensor) -> triton_attention.Pieces:
        """Return memory for the splits, shared by all layers, because they run one after another."""
        if self._pieces is None:
            sequences = len(self._batch.kv_lens)
            seen = self._longest if self._window is None else min(self._longest, self._window)
            shape = sequences, heads, split_count(seen), values.shape[3]
            self._pieces = triton_attention.Pieces.empty(*shape, keys.device)
        return self._pieces


class GpuKernels(TorchKernels):
    """Torch's products and fused kernels for the rest. A row with slot -1 is padding and is not stored. `unified` is
    the constant that replaces the running maximum in decode attention, in units of scaled scores, or None. `varlen` is
    torch's FlashAttention over block tables, or None. `processors` is the device's SM count, `generation` its major
    compute capability.
    """

    name = "triton"

    def __init__(
        self, processors: int, varlen: Varlen | None = None, unified: float | None = None, generation: int = 9
    ) -> None:
        self.processors, self.varlen, self.unified, self.generation = processors, varlen, unified, generation

    @classmethod
    def on(cls, device: torch.device, unified: float | None = None) -> GpuKernels:
        found = torch.cuda.get_device_properties(device)
        return cls(found.multi_processor_count, find_varlen(), unified, found.major)

    def rms_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> Tensor:
        return triton_rows.rms_norm(x, delta, weight, eps, out)

    def rotate_and_store(
        self, qkv: Tensor, rotation: Rotation, norms: HeadNorms | None, slots: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        return triton_rows.rotate_and_store(qkv, rotation, norms, slots, keys, values)

    def gate(self, gate_up: Tensor, activation: str, out: Tensor) -> Tensor:
        return triton_rows.gate(gate_up, activation, out)

    def grouped(self, weights: Tensor) -> GroupedLinear:
        return GroupedLinear(weights)

    def facts(self, rows: Sequence[int]) -> tuple[str, ...]:
        del rows
        return (self.name, triton.__version__)

    def attention(self, batch: Batch, block_size: int, window: int | None, scale: float) -> GpuAttention:
        return GpuAttention(self, batch, block_size, window, scale)
