"""The weights of a model, read out of a checkpoint straight into their final place: there is no second copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from baton.engine.model.memory import Arena

if TYPE_CHECKING:
    from torch import Tensor

    from baton.engine.model.loader import Checkpoint

PIECE = 8 * 2**20  # elements: a copy that needs a temporary one (another dtype on another device) needs it so large


class Weights:
    """Takes tensors out of a checkpoint, in the dtype and on the device of the model.

    All methods raise CheckpointError for a tensor that is missing or has another shape.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self._arena = Arena()

    def tensor(self, name: str, *shape: int) -> Tensor:
        """One tensor of this shape."""
        return self._stacked((name,), shape[:1], shape[1:])

    def matrix(self, names: tuple[str, ...], outs: tuple[int, ...], n_in: int) -> Tensor:
        """The tensors `names`, [outs[i], n_in] each, stacked in this order: [sum(outs), n_in].

        So several projections of one input are one; each is read straight into its rows.
        """
        return self._stacked(names, outs, (n_in,))

    def vector(self, names: tuple[str, ...], outs: tuple[int, ...]) -> Tensor:
        """The same for biases: [sum(outs)]."""
        return self._stacked(names, outs, ())

    def _stacked(self, names: tuple[str, ...], outs: tuple[int, ...], rest: tuple[int, ...]) -> Tensor:
        place = self._place((sum(outs), *rest))
        for name, part in zip(names, torch.split(place, list(outs)), strict=True):
            self._fill(part, name)
        return place

    def _place(self, shape: tuple[int, ...]) -> Tensor:
        if self.device.type == "cpu":
            return self._arena.empty(shape, self.dtype)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _fill(self, place: Tensor, name: str) -> None:
        stored = self.checkpoint.take(name, tuple(place.shape))
        flat, source = place.view(-1), stored.view(-1)
        for start in range(0, len(flat), PIECE):
            flat[start : start + PIECE].copy_(source[start : start + PIECE])
        self.checkpoint.release(stored)
