"""Which kernels a model runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.engine.kernels.plain import TorchKernels

if TYPE_CHECKING:
    import torch

    from baton.engine.kernels.base import Kernels


def choose_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest set that runs on this device."""
    del device, dtype
    return TorchKernels()
