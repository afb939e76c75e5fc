"""The weights of a model, read from a checkpoint directly into their final memory, without a second copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.models.checkpoint import Checkpoint
from baton.engine.models.huge_pages import Arena

PIECE = 8 * 2**20  # elements per copy; limits the temporary that a copy to another dtype on another device needs


class Weights:
    """Tensors of a checkpoint in the model's dtype, on its device. All methods raise like `Checkpoint.take`."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self._arena = Arena()

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return one tensor of this shape."""
        place = self._place(shape)
        self._fill(place, name)
        return place

    def matrix(self, names: tuple[str, ...], outs: tuple[int, ...], n_in: int) -> Tensor:
        """Return tensors [outs[i], n_in] as one [sum(outs), n_in], so that projections of one input are one product."""
        return self._stacked(names, outs, (n_in,))

    def stack(self, names: Sequence[tuple[str, ...]], outs: tuple[int, ...], n_in: int) -> Tensor:
        """Return a `matrix` for each entry of `names` as one tensor: [len(names), sum(outs), n_in]."""
        place = self._place((len(names), sum(outs), n_in))
        for matrix, parts in zip(place, names, strict=True):
            self._fill_parts(matrix, parts, outs)
        return place

    def float32(self, name: str, *shape: int) -> Tensor:
        """Return one tensor of this shape in float32."""
        place = torch.empty(shape, dtype=torch.float32, device=self.device)
        self._fill(place, name)
        return place

    def vector(self, names: tuple[str, ...], outs: tuple[int, ...]) -> Tensor:
        """Return the biases `names` as one vector [sum(outs)], like `matrix`."""
        return self._stacked(names, outs, ())

    def _stacked(self, names: tuple[str, ...], outs: tuple[int, ...], rest: tuple[int, ...]) -> Tensor:
        place = self._place((sum(outs), *rest))
        self._fill_parts(place, names, outs)
        return place

    def _fill_parts(self, place: Tensor, names: tuple[str, ...], outs: tuple[int, ...]) -> None:
        for name, part in zip(names, torch.split(place, list(outs)), strict=True):
            self._fill(part, name)

    def _place(self, shape: tuple[int, ...]) -> Tensor:
        if self.device.type == "cpu":
            return self._arena.empty(shape, self.dtype)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _fill(self, place: Tensor, name: str) -> None:
        stored = self.checkpoint.take(name, tuple(place.shape))
        self._copy(place.view(-1), stored.view(-1))
        self.checkpoint.release(stored)

    def _copy(self, place: Tensor, source: Tensor) -> None:
        rows = max(1, PIECE * len(place) // max(1, place.numel()))
        for target, piece in zip(torch.split(place, rows), torch.split(source, rows), strict=True):
            target.copy_(piece)
