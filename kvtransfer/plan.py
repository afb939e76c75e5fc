"""Which rectangles of (layers x blocks) a handoff's KV is cut into. Pure: both sides compute it and compare.

        blocks ->
layers  +--------------------+        everything fits one frame: one rectangle
  |     |  whole layers while |       else: as many whole layers per frame as fit
  v     |  they fit           |       else (one layer is too long): pieces of one layer
        +--------------------+
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.core import KVLayout


@dataclass(frozen=True, slots=True)
class FrameSpec:
    """Layers [layer_begin, layer_end) of the handoff's blocks [block_begin, block_end), and their bytes on the wire.

    Blocks are counted within the handoff: block 0 holds its first positions, on either side.
    """

    layer_begin: int
    layer_end: int
    block_begin: int
    block_end: int
    nbytes: int

    @property
    def layers(self) -> range:
        return range(self.layer_begin, self.layer_end)

    @property
    def blocks(self) -> slice:
        """The part of the handoff's block list that this frame carries."""
        return slice(self.block_begin, self.block_end)


def plan_frames(layout: KVLayout, n_blocks: int, frame_size: int) -> tuple[FrameSpec, ...]:
    """Rectangles that tile all layers of `n_blocks` blocks exactly, in wire order, each at most `frame_size` bytes.

    Where one block of one layer is larger than that, each is a frame of its own. Raises ValueError for sizes below 1.
    """
    if n_blocks < 1 or frame_size < 1:
        raise ValueError(f"need at least 1 block and 1 byte per frame, got {n_blocks} and {frame_size}")
    cells = max(1, frame_size // layout.layer_block_bytes)  # layer-blocks that fit one frame
    layer_step, block_step = max(1, cells // n_blocks), min(cells, n_blocks)
    rectangles = (
        (layer, min(layer + layer_step, layout.layers), block, min(block + block_step, n_blocks))
        for layer in range(0, layout.layers, layer_step)
        for block in range(0, n_blocks, block_step)
    )
    return tuple(FrameSpec(*r, (r[1] - r[0]) * (r[3] - r[2]) * layout.layer_block_bytes) for r in rectangles)


def staging_bytes(layout: KVLayout, frame_size: int) -> int:
    """Bytes of the largest frame that `plan_frames` can make."""
    return max(frame_size, layout.layer_block_bytes)
