"""The probe of a channel when it is opened: a known pattern, and how fast it came through."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvtransfer.plan import FrameSpec

if TYPE_CHECKING:
    from torch import Tensor

    from kvtransfer.transport import Ring

FRAMES = 4
_MOST = 1 << 20  # bytes of a frame: enough to see the bandwidth, few enough not to be felt
_STEP = np.uint64(0x9E3779B97F4A7C15)


def frame(ring: Ring) -> FrameSpec:
    """What is announced for each frame of the probe: a rectangle of nothing."""
    return FrameSpec(0, 0, 0, 0, min(ring.size, _MOST))


def pattern(number: int, nbytes: int) -> Tensor:
    """What frame `number` of a channel holds: uint8 [nbytes], no two words of it alike, no two frames alike."""
    words = np.arange(1, -(-nbytes // 8) + 1, dtype=np.uint64) * _STEP + np.uint64(number << 32)
    return torch.from_numpy(words.view(np.uint8)[:nbytes])
