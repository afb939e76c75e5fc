"""Digests of KV on its way: of each frame as it is on the wire, always; of the whole KV, whatever the frames, if asked.

The digest of the whole is a sum over rows (one position of one tensor of one layer), each hashed together with its
place: so it does not depend on the order or the cut of the frames, and a row that is missing, twice, changed or swapped
with another one changes it. It finds accidents; it is no defence against an attacker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from baton.hashing import frame_digest

if TYPE_CHECKING:
    from torch import Tensor

    from baton.core import KVLayout
    from kvtransfer.plan import FrameSpec

    Words = np.ndarray[Any, np.dtype[np.uint64]]

_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, as are all factors here: no bits are lost
_MIX2 = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


def wire_digest(data: Tensor) -> bytes:
    """The digest of a frame in staging, wherever that lies. Waits for the device."""
    return frame_digest(data.cpu().numpy().data)


class KVDigest:
    """Sums up the frames of one handoff; `value` does not depend on how its KV was cut into them."""

    def __init__(self, layout: KVLayout) -> None:
        self._tensors = len(layout.tensors)
        self._row_bytes = layout.kv_heads * layout.head_dim * layout.itemsize
        columns = np.arange(1, -(-self._row_bytes // 8) + 1, dtype=np.uint64)
        self._factors = _mixed(columns) | np.uint64(1)
        self._sum = np.uint64(0)

    def add(self, frame: FrameSpec, data: Tensor) -> None:
        """The bytes of `frame`, in wire order: uint8 [frame.nbytes]."""
        rows = data.cpu().numpy().reshape(-1, self._row_bytes)
        if self._row_bytes % 8:
            rows = np.pad(rows, ((0, 0), (0, -self._row_bytes % 8)))
        hashed = _mixed(rows.view(np.uint64) @ self._factors + np.uint64(1))  # 1: a row of zeros counts too
        with np.errstate(over="ignore"):
            self._sum += (hashed * (_mixed(self._places(frame)) | np.uint64(1))).sum(dtype=np.uint64)

    @property
    def value(self) -> bytes:
        """8 bytes."""
        return int(self._sum).to_bytes(8, "little")

    def _places(self, frame: FrameSpec) -> Words:
        layers, tensors = np.array(frame.layers, dtype=np.uint64), np.arange(self._tensors, dtype=np.uint64)
        positions = np.arange(frame.begin, frame.end, dtype=np.uint64)
        planes = (layers[:, None] * np.uint64(self._tensors) + tensors)[:, :, None]
        places: Words = ((planes << _HALF) + positions + np.uint64(1)).reshape(-1)
        return places


def _mixed(words: Words) -> Words:
    words = (words ^ (words >> _HALF)) * _MIX
    mixed: Words = (words ^ (words >> _HALF)) * _MIX2
    return mixed
