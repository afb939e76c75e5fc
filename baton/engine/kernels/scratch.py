"""Memory that one forward after another works in."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Tensors for what a forward computes on its way, used again by the next one: views of storage that only grows.

    `take` gives one [rows, width] per name; what it held is gone when the name is taken again.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._storage: dict[str, Tensor] = {}
        self._views: dict[str, Tensor] = {}

    def take(self, name: str, rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """A contiguous [rows, width] of `dtype` (None: the model's)."""
        view = self._views.get(name)
        if view is None or view.shape != (rows, width):
            view = self._views[name] = self._grown(name, rows * width, dtype or self.dtype).view(rows, width)
        return view

    def _grown(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        storage = self._storage.get(name)
        if storage is None or len(storage) < size:
            storage = self._storage[name] = torch.empty(size, dtype=dtype, device=self.device)
        return storage[:size]
