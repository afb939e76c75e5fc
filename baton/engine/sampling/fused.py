"""Parameters of a fused draw: one launch sequence for all rows of a step, on devices that have a kernel for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from baton.core import Sampling
from baton.engine.sampling.logits import FINITE, Row, upload
from baton.engine.sampling.noise import GOLDEN64, mix64_tensor


class FusedDraw(Protocol):
    """A device's own draw of a whole step."""

    def __call__(self, scores: Tensor, parameters: Tensor, *, drawn: bool, filtered: bool) -> Tensor:
        """Return the token of each row, int64 `[rows]`, on the device; -1 if its best logit is not a finite number.
        `scores` are adjusted logits, float32 `[rows, vocab]`; `parameters` come from `Parameters.at`. `drawn` means
        that a row has a temperature, `filtered` that such a row has a filter. Results are those of `Sampler`, except
        for the rounding of float32 sums and logarithms.
        """


class Parameters:
    """Parameters of a set of rows. Columns, int32: two of the noise key, the bits of the temperature (0: greedy), top-k
    (the vocabulary's size: off), and the bits of top-p (1: off) and of -log(min-p) (infinity: off).
    """

    def __init__(self, rows: Sequence[Row], vocab: int) -> None:
        samplings = [row.sampling for row in rows]
        self.drawn = any(s.temperature > 0 for s in samplings)
        self.filtered = any(s.temperature > 0 and has_filter(s, vocab) for s in samplings)
        self._starts = np.array([row.noise_start for row in rows], dtype=np.uint64)
        self._table = np.zeros((len(rows), 6), dtype=np.int32)
        self._table[:, 2] = _bits([s.temperature and max(s.temperature, FINITE.tiny) for s in samplings])
        self._table[:, 3] = [s.top_k if 0 < s.top_k < vocab else vocab for s in samplings]
        self._table[:, 4] = _bits([s.top_p for s in samplings])
        with np.errstate(divide="ignore"):
            self._table[:, 5] = _bits(np.abs(np.log(np.array([s.min_p for s in samplings], dtype=np.float32))))

    def at(self, positions: Sequence[int], device: torch.device) -> Tensor:
        """Return the parameters for draws at these positions, int32 `[rows, 6]`, without waiting for the device."""
        counters = self._starts + np.array(positions, dtype=np.uint64) * np.uint64(GOLDEN64)
        keys = mix64_tensor(torch.from_numpy(counters.view(np.int64)))
        self._table[:, :2] = keys.view(torch.int32).view(-1, 2).numpy()  # the low half first
        return upload(self._table, device)


def has_filter(sampling: Sampling, vocab: int) -> bool:
    """Return whether min-p, top-k or top-p can exclude a token."""
    return sampling.top_p < 1 or 0 < sampling.top_k < vocab or sampling.min_p > 0


def _bits(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.asarray(values, dtype=np.float32).view(np.int32)
