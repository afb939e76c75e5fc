"""Step 8: a model of 8 B parameters with random weights, against the limits of the same GPU."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu_first.at import At, Outcome, Skipped
from benchmarks.lib import device as gpu
from benchmarks.lib.shapes import TINY, Shape

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.engine.models.loading import TransformerBackend

SHAPE = Shape(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, vocab=128_256)
CONTEXT = 1024
SPARE = 4 << 30  # bytes for activations and graphs


def run(at: At) -> Outcome:
    """Return the least possible time over the measured one of decode steps and prompts, or None if they do not fit."""
    shape, longest = at.size(SHAPE, TINY["S"]), at.size(32_768, 128)
    weights = 2 * (shape.read_params + shape.head_params)
    if not at.dry and _free(at) < weights + SPARE:
        raise Skipped(f"needs {(weights + SPARE) / 1e9:.0f} GB of GPU memory; {_free(at) / 1e9:.0f} GB are free")
    memory = gpu.bandwidth(at.device, at.size(gpu.PROBE_BYTES, 8 << 20))
    gemm = gpu.gemm_rate(at.device, [(at.size(4096, 64), *each) for each in shape.linears], at.size(8192, 64))
    figures: dict[str, float | None] = {}
    model = gpu.model_of(shape, at.device, at.size(16, 8), positions=2 * longest)
    for rows in at.size((1, 64, 256), (1, 4)):
        figures[f"decode_{rows}_of_memory"] = _decode(model, shape, rows, memory, at)
    del model
    if not at.dry:
        torch.cuda.empty_cache()
    model = gpu.model_of(shape, at.device, at.size(256, 16), positions=2 * longest)
    for tokens in at.size((4096, 8192, 32_768), (64, 128)):
        figures[f"prefill_{tokens}_of_gemm"] = _prefill(model, shape, tokens, gemm, at)
    return Outcome(", ".join(f"{name} {value}" for name, value in figures.items()), figures)


def _decode(model: TransformerBackend, shape: Shape, rows: int, memory: float, at: At) -> float | None:
    context = at.size(CONTEXT, 16)
    if not at.dry:
        context = min(context, (_free(at) - SPARE // 2) // shape.kv_bytes(rows, 2) // 256 * 256)
    if context <= 0:
        return None
    return _fitting(
        lambda: (
            shape.decode_bytes(rows, context, "bf16")
            / memory
            / gpu.decode_seconds(model, rows, context, graphs=not at.dry)
        )
    )


def _prefill(model: TransformerBackend, shape: Shape, tokens: int, gemm: float, at: At) -> float | None:
    if not at.dry:
        _free(at)
    return _fitting(lambda: shape.prefill_flops(tokens) / gemm / gpu.prefill_seconds(model, tokens))


def _fitting(measure: Callable[[], float]) -> float | None:
    """Return the measured share, or None if memory runs out."""
    try:
        return round(measure(), 3)
    except torch.OutOfMemoryError:
        return None


def _free(at: At) -> int:
    """Free what earlier measurements left, and return the free bytes of the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(at.device)[0]
