"""Products of a mixture of experts: rows sorted by expert, all experts in one launch, and no choice read by the host.

torch's `_grouped_mm` does the same only for bfloat16 on compute capability 9.0 and 10.0; elsewhere it reads the ends of
the groups on the host (`_grouped_mm_cuda` and `_grouped_mm_fallback` of torch 2.13). A launch has as many row tiles as
the rows can need in the worst case. Each program finds its expert; those beyond the last tile return immediately.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.kernels.base import Groups
from baton.engine.kernels.gpu.shapes import expert_tiles


# fmt: off
@triton.jit
def grouped_kernel(
    x: tl.tensor, weights: tl.tensor, out: tl.tensor, starts: tl.tensor, tiles: tl.tensor, out_row: int, x_row: int,
    experts: int,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    ends = tl.load(tiles + 1 + every, mask=every < experts, other=0x7FFFFFFF)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    if expert >= experts:
        return
    begin, end = tl.load(starts + expert), tl.load(starts + expert + 1)
    rows = begin + (tile - tl.load(tiles + expert)) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    ours, there = (rows < end)[:, None], (columns < out_row)[None, :]
    left = x + rows.to(tl.int64)[:, None] * x_row + depth[None, :]
    right = weights + expert.to(tl.int64) * out_row * x_row + columns[None, :] * x_row + depth[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, x_row, DEPTH):
        rest = depth < x_row - start
        a = tl.load(left, mask=ours & rest[None, :], other=0.0)
        b = tl.load(right, mask=there & rest[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += DEPTH
        right += DEPTH
    target = out + rows.to(tl.int64)[:, None] * out_row + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=ours & there)
# fmt: on


class GroupedLinear:
    """Implements `Grouped` for weights [experts, width, inner]."""

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights.contiguous()
        self.experts, self.width, self._inner = weights.shape

    def groups(self, sorted_experts: Tensor, *, fixed: bool) -> Groups:
        rows = len(sorted_experts)
        tile_rows = expert_tiles(0 if fixed else rows, self.experts)
        numbers = torch.arange(self.experts + 1, device=sorted_experts.device)
        starts = torch.searchsorted(sorted_experts, numbers, out_int32=True)
        tiles = torch.zeros_like(starts)
        torch.cumsum((starts.diff() + (tile_rows - 1)) // tile_rows, 0, dtype=torch.int32, out=tiles[1:])
        return Groups(starts, tiles, rows // tile_rows + min(self.experts, rows), tile_rows)

    def __call__(self, x: Tensor, groups: Groups, out: Tensor) -> Tensor:
        wide = x.element_size() > 2
        columns, depth = (32, 32) if wide else (128, 64)
        if groups.most:
            grouped_kernel[(groups.most, triton.cdiv(self.width, columns))](
                x, self._weights, out, groups.starts, groups.tiles, self.width, self._inner, self.experts,
                EXPERTS=triton.next_power_of_2(self.experts), ROWS=groups.tile_rows, COLUMNS=columns, DEPTH=depth,
                num_warps=8 if groups.tile_rows > 16 else 4, num_stages=1 if wide else 3,
            )  # fmt: skip
        return out
