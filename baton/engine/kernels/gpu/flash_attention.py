"""FlashAttention of torch over block tables, if the version of torch, the cache and the model allow it.

Requirements in torch 2.13 (flash_api.cpp): bfloat16 or float16; equal head sizes of keys and values, a multiple of 8 up
to 256; a block size that is a multiple of 256 tokens. Paged calls must set `num_splits=1`, because torch may otherwise
choose more, and then rows after the first sequence are not written (pytorch issue 194167).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from baton.engine.batch import Batch

BLOCK_MULTIPLE = 256
HEAD_MULTIPLE, WIDEST_HEAD = 8, 256
Varlen = Callable[..., Any]
NEEDED = {"scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"}


def find_varlen() -> Varlen | None:
    """Return `varlen_attn_out` of torch, or None if it is missing or does not take block tables."""
    try:
        from torch.nn.attention.varlen import varlen_attn_out
    except ImportError:
        return None
    found: Varlen = varlen_attn_out
    return found if set(inspect.signature(found).parameters) >= NEEDED else None


def varlen_fits(keys: Tensor, values: Tensor) -> bool:
    """Return whether FlashAttention supports this cache [blocks, block_size, kv_heads, head_dim]."""
    head_dim = keys.shape[3]
    return (
        keys.dtype in {torch.bfloat16, torch.float16}
        and keys.shape[1] % BLOCK_MULTIPLE == 0
        and head_dim == values.shape[3]
        and head_dim % HEAD_MULTIPLE == 0
        and head_dim <= WIDEST_HEAD
    )


class VarlenAttention:
    """Attention of one batch by FlashAttention: chunks and single tokens in one launch per layer."""

    def __init__(self, varlen: Varlen, batch: Batch, window: int | None, scale: float) -> None:
        self._varlen = varlen
        self._starts = batch.query_starts.contiguous()
        # Required, although a block table makes only its length relevant.
        self._key_starts = torch.zeros_like(self._starts)
        torch.cumsum(batch.kv_lens, 0, dtype=torch.int32, out=self._key_starts[1:])
        self._longest = max(batch.query_lens), max(batch.context_lens)
        self._options = {
            "scale": scale,
            "window_size": (-1 if window is None else window - 1, 0),
            "enable_gqa": True,
            "seqused_k": batch.kv_lens,
            "block_table": batch.block_tables,
            "num_splits": 1,
        }

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> Tensor:
        shaped = out.view(query.shape)
        self._varlen(shaped, query, keys, values, self._starts, self._key_starts, *self._longest, **self._options)
        return out
