"""What a constraint leaves of the logits of a step: of each row that has one, the tokens that may come next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.functional import embedding

from baton.engine.penalties import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from baton.engine.sampler import Row


class Masks:
    """The constraints of one set of rows, applied step by step; false: none has one.

    What a step needs is kept from one to the next: with a large vocabulary, fresh memory would cost more than the rest.
    """

    def __init__(self, rows: Sequence[Row], logits: Tensor) -> None:
        self._guided = [(place, row.guide) for place, row in enumerate(rows) if row.guide is not None]
        if not self._guided:
            return
        words = max(-(-logits.shape[-1] // 32), *(guide.words for _, guide in self._guided))
        self._bits = np.zeros((len(self._guided), words), dtype=np.int32)
        self._addends = _addends().to(logits.device)
        self._scores = torch.empty_like(logits)

    def __bool__(self) -> bool:
        return bool(self._guided)

    def apply(self, scores: Tensor, *, fresh: bool) -> Tensor:
        """`scores` `[rows, vocab]` with NEVER for each token that may not come: in their place if they are `fresh`."""
        for (_, guide), allowed in zip(self._guided, self._bits, strict=True):
            guide.fill(allowed[: guide.words])
        bits = torch.from_numpy(self._bits.view(np.uint8)).to(scores.device).int()
        added = embedding(bits, self._addends).flatten(1)[:, : scores.shape[-1]]
        masked = scores if fresh else self._scores.copy_(scores)
        for number, (place, _) in enumerate(self._guided):
            masked[place] += added[number]  # unlike masked_fill_, as fast whatever the pattern
        return masked


def _addends() -> Tensor:
    """What each byte of a mask adds to its eight logits: float32 `[256, 8]`."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits, 0.0, NEVER).astype(np.float32))
