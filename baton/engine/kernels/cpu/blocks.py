"""KV between blocks and wire order by the compiled kernels."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from baton.engine.kernels.cpu.args import BlocksArgs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class CompiledBlockCopy:
    """Implements `baton.engine.kernels.base.BlockCopy`, for planes that are contiguous. Any thread may call it."""

    def __init__(self, library: ctypes.CDLL, element: str) -> None:
        self._copy = library[f"blocks_{element}"]

    def __call__(
        self, planes: Sequence[Tensor], layers: range, blocks: Sequence[int], span: range, wire: Tensor, *, write: bool
    ) -> None:
        _, _, block_size, kv_heads, head_dim = planes[0].shape
        layer_bytes = planes[0].stride(0) * planes[0].itemsize
        held = np.array(blocks[span.start // block_size : -(-span.stop // block_size)], dtype=np.int64)
        bases = (ctypes.c_void_p * len(planes))(*(plane.data_ptr() + layers.start * layer_bytes for plane in planes))
        args = BlocksArgs(
            planes=ctypes.addressof(bases),
            blocks=held.ctypes.data,
            wire=wire.data_ptr(),
            tensors=len(planes),
            layers=len(layers),
            layer_bytes=layer_bytes,
            block_size=block_size,
            token_bytes=kv_heads * head_dim * planes[0].itemsize,
            begin=span.start,
            end=span.stop,
            write=write,
        )
        self._copy(ctypes.byref(args))
