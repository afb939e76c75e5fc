"""KV in int8. A head's row has its levels, and then their scale as the two bytes of a bfloat16.

A value is level * scale. The scale is max|x| / 127, so the error of a value is at most half of it. A row that is not
finite has the scale NaN.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from baton.core import SCALE_BYTES

KVDtype = Literal["auto", "int8"]
TINY = 1e-30  # rows with smaller scales are zero


def head_dim(cache: Tensor) -> int:
    """Return the values of a head in a cache [.., head_width]."""
    return cache.shape[-1] - (SCALE_BYTES if cache.dtype is torch.int8 else 0)


def to_levels(x: Tensor) -> Tensor:
    """Return the rows int8 [.., dim + SCALE_BYTES] of x [.., dim]. Ties are rounded to even."""
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True)
    scale = torch.where(most < torch.inf, (most / 127).to(torch.bfloat16), torch.nan)
    step = scale.float()
    levels = torch.where(step > TINY, wide / step, 0.0).round_().to(torch.int8)
    return torch.cat((levels, scale.view(torch.int8)), -1)


def select(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows [len(slots), kv_heads, dim] of a cache [slots, kv_heads, head_width]. Those in int8 get `dtype`."""
    rows = cache.index_select(0, slots)
    if cache.dtype is not torch.int8:
        return rows
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16)
    return (rows[..., :-SCALE_BYTES].float() * scale.float()).to(dtype)
