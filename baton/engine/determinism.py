"""The name of all that the bits of deterministic requests depend on: equal names, equal bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from baton.engine import fixed
from baton.engine.kernels.cpu.build import machine
from baton.hashing import fingerprint

if TYPE_CHECKING:
    from baton.core import KVLayout
    from baton.engine.backend import ModelBackend
    from baton.engine.fixed import FixedShapes


def bits_fingerprint(backend: ModelBackend, shapes: FixedShapes) -> str:
    """24 hex digits, equal on two workers whose fixed forwards of `shapes` give the same bits.

    A hash of the weights and dtype, of the kernels and which of them these shapes take, of torch and its threads, of
    the number of ranks, of the processor or the GPU and its driver, and of the shapes and the grid themselves.
    """
    grid = fixed.SHORT, fixed.SHORT_UNTIL
    # One row: the last of a prompt is the only one whose logits are wanted.
    rows = sorted({1, *grid, shapes.rows * shapes.tokens})
    return fingerprint(
        (
            backend.fingerprint,
            backend.layout.dtype,
            *backend.facts(rows),
            f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.get_float32_matmul_precision()}",
            *device_facts(backend.device, backend.layout),
            f"{shapes.rows} x {shapes.tokens} on {grid}",
        )
    )


def device_facts(device: torch.device, layout: KVLayout) -> tuple[str, ...]:
    """What is computed on: processor and instructions, or GPU, driver, CUDA and what blocks its kernels see."""
    if device.type == "cpu":
        here = machine()
        return (here.model, *sorted(here.flags), torch.backends.cpu.get_cpu_capability())
    found = torch.cuda.get_device_properties(device)
    driver = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]  # not in the stub
    capability = f"{found.major}.{found.minor}"
    return (found.name, capability, f"driver {driver}", f"CUDA {torch.version.cuda}", f"blocks of {layout.block_size}")
