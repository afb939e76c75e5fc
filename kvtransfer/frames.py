"""Frames of a handoff: which rectangles of (layers x positions) travel together, and their digests.

        positions ->
layers  | sent    | ready    .       Chunks of a prompt make KV ready from left to right, and in each chunk layer by
  |     | sent    | ready    .       layer from the top. Ready KV is cut into rectangles of at most one frame:
  v     | sent  .                    as many whole layers as fit, else a part of one layer's positions.

The sender keeps a `Progress` and the receiver a `Coverage`: the position that each layer has reached. The receiver
needs no plan, because a frame must continue exactly where the previous frame of its layers ended.

Every frame has a digest of its wire bytes. On request, `KVDigest` also covers the whole KV: it sums hashes of rows (one
position of one tensor of one layer) and their places. Order and size of frames do not change the sum; a row that is
missing, repeated, changed or swapped does. It detects accidents, not attacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from baton.core import KVLayout
from baton.engine.kv_cache import KVCache
from baton.hashing import frame_digest

Words = np.ndarray[Any, np.dtype[np.uint64]]

_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, like all factors here, so that no bits are lost
_MIX2 = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


def wire_digest(data: Tensor) -> bytes:
    """Return the digest of a frame in staging on any device. Waits for the device."""
    return frame_digest(data.cpu().numpy().data)


class KVDigest:
    """The digest of a handoff's whole KV, independent of how it was cut into frames."""

    def __init__(self, layout: KVLayout) -> None:
        self._tensors = len(layout.tensors)
        self._row_bytes = layout.row_bytes
        columns = np.arange(1, -(-self._row_bytes // 8) + 1, dtype=np.uint64)
        self._factors = _mixed(columns) | np.uint64(1)
        self._sum = np.uint64(0)

    def add(self, frame: FrameSpec, data: Tensor) -> None:
        """Add the bytes of `frame`, in wire order: uint8 [frame.nbytes]."""
        rows = data.cpu().numpy().reshape(-1, self._row_bytes)
        if self._row_bytes % 8:
            rows = np.pad(rows, ((0, 0), (0, -self._row_bytes % 8)))
        hashed = _mixed(rows.view(np.uint64) @ self._factors + np.uint64(1))  # + 1 because a row of zeros must count
        with np.errstate(over="ignore"):
            self._sum += (hashed * (_mixed(self._places(frame)) | np.uint64(1))).sum(dtype=np.uint64)

    def add_all(
        self, kv: KVCache, lent: Callable[[], AbstractContextManager[Sequence[int]]], begin: int, end: int
    ) -> None:
        """Add positions [begin, end) of all layers of a sequence. Its blocks are `lent` for a copy of one layer at a
        time, so that a fence never waits for a hash. Nothing may write to them in between.
        """
        for frame in whole_layers(kv.layout, begin, end):
            with lent() as blocks:
                data = kv.copied(frame.layers, blocks, begin, end).cpu()  # waits for the device
            self.add(frame, data)

    @property
    def value(self) -> bytes:
        """The digest: 8 bytes, little-endian."""
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


@dataclass(frozen=True, slots=True)
class FrameSpec:
    """Layers [layer_begin, layer_end) of the handoff's positions [begin, end), and their bytes on the wire."""

    layer_begin: int
    layer_end: int
    begin: int
    end: int
    nbytes: int

    @property
    def layers(self) -> range:
        return range(self.layer_begin, self.layer_end)


def whole_layers(layout: KVLayout, begin: int, end: int) -> Iterator[FrameSpec]:
    """Yield positions [begin, end) of each layer as one frame, however large."""
    for layer in range(layout.layers):
        yield FrameSpec(layer, layer + 1, begin, end, (end - begin) * layout.layer_token_bytes)


class Progress:
    """The sender's record of a handoff of positions [skip, tokens). Its owner's lock guards it."""

    __slots__ = ("_ready", "_sent", "_token_bytes", "_tokens")

    def __init__(self, layout: KVLayout, skip: int, tokens: int) -> None:
        self._token_bytes = layout.layer_token_bytes
        self._tokens = tokens
        self._ready = [skip] * layout.layers
        self._sent = [skip] * layout.layers

    def computed(self, layers: int, end: int) -> None:
        """Mark KV of the first `layers` layers as final up to position `end`."""
        for layer in range(layers):
            self._ready[layer] = max(self._ready[layer], min(end, self._tokens))

    def withdrawn(self, unread: Iterable[FrameSpec] = ()) -> None:
        """Unmark KV that was not sent, because it will be computed again. So will frames that were announced, but
        `unread`, if the receiver reads them itself.
        """
        for frame in unread:
            for layer in frame.layers:
                self._sent[layer] = min(self._sent[layer], frame.begin)
        self._ready = list(self._sent)

    @property
    def lowest(self) -> int:
        """The first position that is still to be sent in some layer."""
        return min(self._sent)

    def next(self, frame_size: int, at_least: int = 1) -> FrameSpec | None:
        """Return the next frame of `at_least` to `frame_size` bytes, or None if too little is ready. A smaller frame
        counts as full if one more layer would not fit; one position of a layer always fits. A layer with too little
        ready KV does not delay the others.
        """
        for first in self._waiting():
            frame = self._from(first, frame_size)
            more = frame.nbytes + self._token_bytes * (frame.end - frame.begin)
            if frame.nbytes >= at_least or more > frame_size:
                return frame
        return None

    def offers(self, frame: FrameSpec) -> bool:
        """Whether `frame` can still be sent, because none of it was withdrawn."""
        return all(self._sent[layer] == frame.begin and self._ready[layer] >= frame.end for layer in frame.layers)

    def took(self, frame: FrameSpec) -> None:
        self._sent[frame.layer_begin : frame.layer_end] = [frame.end] * len(frame.layers)

    @property
    def complete(self) -> bool:
        return min(self._sent) == self._tokens

    def _waiting(self) -> list[int]:
        """Return the first layer of each run of equally far layers with ready KV, the runs that are behind first."""
        sent = self._sent
        firsts = [n for n in range(len(sent)) if sent[n] < self._ready[n] and (n == 0 or sent[n - 1] != sent[n])]
        return sorted(firsts, key=sent.__getitem__)

    def _from(self, first: int, frame_size: int) -> FrameSpec:
        """Return the largest frame from this layer on: positions of the first layer before further layers."""
        begin, width = self._sent[first], frame_size // self._token_bytes
        end = min(self._ready[first], begin + max(1, width))
        last, most = first + 1, max(1, width // (end - begin))
        while last < len(self._sent) and last - first < most and self._sent[last] == begin and self._ready[last] >= end:
            last += 1
        return FrameSpec(first, last, begin, end, (last - first) * (end - begin) * self._token_bytes)


class Coverage:
    """The receiver's record of the announced part of positions [skip, tokens), or of the part that it has read."""

    __slots__ = ("_reached", "_skip", "_token_bytes", "_tokens", "nbytes")

    def __init__(self, layout: KVLayout, skip: int, tokens: int) -> None:
        self._token_bytes = layout.layer_token_bytes
        self._skip, self._tokens = skip, tokens
        self._reached = [skip] * layout.layers
        self.nbytes = 0

    def accepts(self, frame: FrameSpec) -> bool:
        """Record `frame` if it is within the handoff and continues where its layers ended; return whether it does."""
        layers = self._reached[frame.layer_begin : frame.layer_end]
        if not self.fits(frame) or any(reached != frame.begin for reached in layers):
            return False
        self.read(frame)
        return True

    def fits(self, frame: FrameSpec) -> bool:
        """Whether `frame` is within the handoff and has the right size."""
        inside = 0 <= frame.layer_begin < frame.layer_end <= len(self._reached) and frame.end <= self._tokens
        size = len(frame.layers) * (frame.end - frame.begin) * self._token_bytes
        return inside and self._skip <= frame.begin < frame.end and frame.nbytes == size

    def read(self, frame: FrameSpec) -> None:
        """Record the positions of `frame` that extend its layers. A frame after a gap adds nothing."""
        for layer in frame.layers:
            reached = self._reached[layer]
            if frame.begin <= reached < frame.end:
                self._reached[layer] = frame.end
                self.nbytes += (frame.end - reached) * self._token_bytes

    def spoiled(self, frame: FrameSpec) -> None:
        """Record that a copy of `frame` failed, and that it may have overwritten positions that were recorded."""
        for layer in frame.layers:
            lost = max(0, self._reached[layer] - frame.begin)
            self._reached[layer] -= lost
            self.nbytes -= lost * self._token_bytes

    @property
    def complete(self) -> bool:
        return min(self._reached) == self._tokens
