"""The paged KV cache of one worker, and its wire order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from baton.engine.model.memory import Arena

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from baton.core import KVLayout

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class KVCache:
    """The `tensors` of a layout, each `[layers, total_blocks, block_size, kv_heads, head_dim]`, on `device`.

    `k` and `v` are the two of most models. Where there is one alone (latent attention), it is `k`, and `v` has no
    blocks. Block-major, so that a range of blocks of one layer is one contiguous piece. The wire order of a rectangle
    (layers x blocks) is, for each layer: its K blocks, then its V blocks. Not thread-safe by itself: who may touch
    a block is what the block ledger says. `storage`: the tensors, where they are elsewhere already.
    """

    def __init__(
        self,
        layout: KVLayout,
        total_blocks: int,
        device: torch.device | str = "cpu",
        storage: list[Tensor] | None = None,
    ) -> None:
        shape = (layout.layers, total_blocks, layout.block_size, layout.kv_heads, layout.head_dim)
        self.layout = layout
        self.total_blocks = total_blocks
        self.device = torch.device(device)
        # Zeros cost nothing until touched, and a slot that was never written is at least finite.
        dtype = DTYPES[layout.dtype]
        self.tensors = storage or [_zeros(shape, dtype, self.device) for _ in layout.tensors]
        self.k = self.tensors[0]
        self.v = self.tensors[1] if len(self.tensors) > 1 else self.k[:, :0]

    def nbytes(self, layers: range, blocks: Sequence[int]) -> int:
        """Bytes of this rectangle on the wire."""
        return len(layers) * len(blocks) * self.layout.layer_block_bytes

    def gather(self, layers: range, blocks: Sequence[int], out: Tensor) -> None:
        """Copy a rectangle into `out`, uint8 [nbytes], contiguous and aligned to the element size, on any device.

        Raises ValueError on a wrong size or dtype, IndexError on a layer or block out of range.
        """
        pieces, index = self._pieces(layers, blocks, out), self._index(layers, blocks)
        for piece, layer in zip(pieces, layers, strict=True):
            for part, source in zip(piece, self.tensors, strict=True):
                if out.device == self.device:
                    torch.index_select(source[layer], 0, index, out=part)
                else:
                    part.copy_(source[layer].index_select(0, index))

    def scatter(self, layers: range, blocks: Sequence[int], data: Tensor) -> None:
        """Copy `data`, in wire order, into a rectangle. The inverse of `gather`, with the same conditions."""
        pieces, index = self._pieces(layers, blocks, data), self._index(layers, blocks)
        for piece, layer in zip(pieces, layers, strict=True):
            for part, target in zip(piece, self.tensors, strict=True):
                target[layer].index_copy_(0, index, part.to(self.device))

    def _pieces(self, layers: range, blocks: Sequence[int], data: Tensor) -> Tensor:
        """`data` seen as [layers, tensors, blocks, block_size, kv_heads, head_dim]."""
        if data.dtype != torch.uint8 or data.shape != (self.nbytes(layers, blocks),):
            raise ValueError(f"need uint8 [{self.nbytes(layers, blocks)}], got {data.dtype} {list(data.shape)}")
        return data.view(self.k.dtype).view(len(layers), len(self.tensors), len(blocks), *self.k.shape[2:])

    def _index(self, layers: range, blocks: Sequence[int]) -> Tensor:
        for what, wanted, total in (("layer", layers, self.layout.layers), ("block", blocks, self.total_blocks)):
            if wanted and not 0 <= min(wanted) <= max(wanted) < total:
                raise IndexError(f"{what} out of range 0..{total - 1}: {min(wanted)}..{max(wanted)}")
        return torch.tensor(blocks, dtype=torch.int64, device=self.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # On huge pages, since attention reads KV all over the cache; and written, so that no request waits for a page.
    return Arena().empty(shape, dtype).zero_()
