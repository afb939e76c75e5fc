"""Integers of forwards: written on the host, and copied to the device in one piece.

On a CPU, the arrays of the host are the memory of the tensors. Elsewhere there are two stages (pinned for CUDA), used
alternately. Copies are asynchronous, and a stage is rewritten only when its last copy is done.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.engine.block_pool import Allocation

Array = np.ndarray[Any, np.dtype[Any]]
STAGES = 2
ALIGNMENT = 16  # bytes, as of torch's own allocations: Triton compiles a kernel again for other addresses
CHANGES = 2048  # entries of block tables that are copied one by one


class Staged:
    """For each name in `shapes`, `arrays` has the array on the host and `tensors` the tensor on the device."""

    def __init__(self, device: torch.device, *, staged: bool, **shapes: tuple[torch.dtype, tuple[int, ...]]) -> None:
        sizes = [prod(shape) * dtype.itemsize for dtype, shape in shapes.values()]
        begins = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        total, cuda = begins[-1], device.type == "cuda"
        self._device = torch.zeros(total, dtype=torch.uint8, device=device)
        self._host = torch.zeros(total, dtype=torch.uint8) if staged else self._device
        stages = STAGES if staged else 0
        self._stages = [torch.zeros(total, dtype=torch.uint8, pin_memory=cuda) for _ in range(stages)]
        self._copied = [torch.cuda.Event() for _ in range(STAGES if cuda else 0)]  # type: ignore[no-untyped-call]
        self._stage = 0
        self.arrays: dict[str, Array] = {}
        self.tensors: dict[str, Tensor] = {}
        for (name, (dtype, shape)), begin, size in zip(shapes.items(), begins, sizes, strict=False):
            host, there = (each[begin : begin + size].view(dtype).view(shape) for each in (self._host, self._device))
            self.arrays[name], self.tensors[name] = host.numpy(), there

    def push(self, nbytes: int | None = None) -> None:
        """Copy all arrays, or the first `nbytes`, to the device. Later work of the current stream reads the copy."""
        if not self._stages:
            return
        self._stage = (self._stage + 1) % STAGES
        if self._copied:
            self._copied[self._stage].synchronize()  # waits only if the host is far ahead of the device
        stage = self._stages[self._stage][:nbytes]
        stage.numpy()[...] = self._host.numpy()[:nbytes]
        self._device[:nbytes].copy_(stage, non_blocking=True)
        if self._copied:
            self._copied[self._stage].record()


class BlockTables:
    """Block tables of sequences, int32 [rows, blocks]: `array` on the host, `tensor` on the device. A push copies only
    changed entries, in one copy and one kernel. Many changes, as when sequences move up, are one rectangle.
    """

    def __init__(self, rows: int, blocks: int, device: torch.device, *, staged: bool) -> None:
        self.tensor = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self.array: Array = np.zeros((rows, blocks), np.int32) if staged else self.tensor.numpy()
        self._allocations: list[Allocation | None] = [None] * rows
        self._lengths = [0] * rows  # entries of each row
        self._staged, self._changed = staged, list[Array]()  # places in the flattened table
        few, many = (CHANGES,), (rows * blocks if staged else 0,)
        self._few = Staged(device, staged=staged, places=(torch.int64, few), blocks=(torch.int32, few))
        self._many = Staged(device, staged=staged, blocks=(torch.int32, many))

    def write(self, row: int, allocation: Allocation) -> None:
        """Write the blocks of a sequence to a row, unless they are there."""
        held, known = self._lengths[row], allocation is self._allocations[row]
        if known and len(allocation.blocks) == held:
            return
        table, width = self.array[row], self.array.shape[1]
        blocks = allocation.blocks[:width]
        begin = min(held, len(blocks)) if known else 0
        table[begin : len(blocks)] = blocks[begin:]
        table[len(blocks) : held] = 0
        self._changed.append(np.arange(row * width + begin, row * width + min(width, max(held, len(blocks)))))
        self._allocations[row], self._lengths[row] = allocation, len(allocation.blocks)

    def push(self) -> None:
        """Copy what changed since the last push."""
        changed, self._changed = self._changed, []
        if self._staged and changed:
            self._copy(np.concatenate(changed))

    def _copy(self, places: Array) -> None:
        if len(places) <= CHANGES:
            index, blocks = (self._few.tensors[name][: len(places)] for name in ("places", "blocks"))
            self._few.arrays["places"][: len(places)] = places
            self._few.arrays["blocks"][: len(places)] = self.array.reshape(-1)[places]
            self._few.push()
            self.tensor.view(-1).index_copy_(0, index, blocks)
            return
        rows, columns = np.divmod(places, self.array.shape[1])
        area = slice(int(rows.min()), int(rows.max()) + 1), slice(0, int(columns.max()) + 1)
        changed = self.array[area]
        self._many.arrays["blocks"][: changed.size] = changed.reshape(-1)
        self._many.push(changed.nbytes)
        self.tensor[area].copy_(self._many.tensors["blocks"][: changed.size].view(changed.shape))
