"""What a constraint leaves of the logits of a step: of each row that has one, the tokens that may come next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from baton.engine.penalties import NEVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from baton.engine.sampler import Row


class Masks:
    """The constraints of one set of rows, applied step by step; false: none has one."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        guided = [(place, row.guide) for place, row in enumerate(rows) if row.guide is not None]
        self._guides = [guide for _, guide in guided]
        self._index = torch.tensor([place for place, _ in guided], device=device)
        words = max((guide.words for guide in self._guides), default=0)
        self._bits = np.zeros((len(guided), words), dtype=np.int32)

    def __bool__(self) -> bool:
        return bool(self._guides)

    def apply(self, scores: Tensor) -> Tensor:
        """A copy of `scores` `[rows, vocab]` with NEVER for each token that may not come."""
        for guide, allowed in zip(self._guides, self._bits, strict=True):
            guide.fill(allowed)
        bits = np.unpackbits(self._bits.view(np.uint8), axis=1, bitorder="little", count=scores.shape[-1])
        barred = torch.from_numpy(bits == 0).to(scores.device, non_blocking=True)
        return scores.index_copy(0, self._index, scores.index_select(0, self._index).masked_fill_(barred, NEVER))
