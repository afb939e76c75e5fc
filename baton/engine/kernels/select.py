"""The choice of kernels for a device and dtype."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import structlog
import torch

from baton.engine.kernels.base import Kernels, Splits
from baton.engine.kernels.cpu.compiler import Unavailable, chosen_level, load_library
from baton.engine.kernels.cpu.kernel_choice import UNIFIED, Ideas, load_profile, profile_path
from baton.engine.kernels.cpu.ops import ELEMENTS, CompiledBlockCopy, CpuKernels
from baton.engine.kernels.cpu.sampling import CompiledDraw
from baton.engine.kernels.torch_reference import TorchKernels
from baton.engine.sampling.fused import FusedDraw
from baton.home import baton_home

log = structlog.get_logger()
OLDEST_GPU = (8, 0)  # Ampere: the first with bfloat16


def profile_of(dtype: torch.dtype) -> Path:
    """Return the path of the profile for this machine, its level and torch's threads. Raises as `chosen_level` does."""
    return profile_path(ELEMENTS[dtype], chosen_level(), torch.get_num_threads(), torch.__version__)


def level_in_use(dtype: torch.dtype) -> str:
    """Return the level of the compiled CPU kernels for a dtype, or "none" if torch computes there."""
    try:
        load_library(ELEMENTS[dtype])
    except Unavailable:
        return "none"
    return chosen_level()


def block_copy(kernels: Kernels) -> CompiledBlockCopy | None:
    """Return the compiled copy of KV that belongs to these kernels, or None if torch must do it."""
    return CompiledBlockCopy(kernels.library, kernels.element) if isinstance(kernels, CpuKernels) else None


def choose_kernels(
    device: torch.device, dtype: torch.dtype, splits: Splits = "auto", ideas: Ideas | None = None
) -> Kernels:
    """Return the fastest kernels for a device. `splits` is for CPU kernels: GPUs split by load, torch never splits.

    `ideas` replaces what the profile decides. GPUs have only its unified maximum, and torch has none of it.
    """
    kernels = _fastest(device, dtype, splits, ideas)
    if splits != "auto" and not isinstance(kernels, CpuKernels):
        log.warning("attention_splits_without_effect", asked=splits, kernels=kernels.name)
    return kernels


def fused_draw(device: torch.device) -> FusedDraw | None:
    """Return the kernel that samples on a device, or None if torch must do it."""
    if device.type == "cpu":
        return _compiled_draw()
    if not _has_triton(device):
        return None
    from baton.engine.kernels.gpu.triton_sampling import draw  # triton is not installed for CPUs

    return draw


def _compiled_draw() -> FusedDraw | None:
    for element in ELEMENTS.values():  # each library has the same draw, and one of them is mostly loaded
        with suppress(Unavailable):
            return CompiledDraw(load_library(element), element)
    return None


def _has_triton(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= OLDEST_GPU
        and find_spec("triton") is not None
    )


def _fastest(device: torch.device, dtype: torch.dtype, splits: Splits, ideas: Ideas | None) -> Kernels:
    if _has_triton(device):
        os.environ.setdefault("TRITON_CACHE_DIR", str(baton_home() / "kernels" / "triton"))
        from baton.engine.kernels.gpu.ops import GpuKernels  # triton is not installed for CPUs

        return GpuKernels.on(device, UNIFIED if ideas and ideas.unified_max else None)
    if device.type != "cpu" or dtype not in ELEMENTS:
        return TorchKernels()
    try:
        profile = load_profile(profile_of(dtype))
        return CpuKernels(dtype, ideas.applied(profile) if ideas else profile, splits=splits)
    except Unavailable as why:
        log.info("kernels_torch", reason=str(why))
        return TorchKernels()
