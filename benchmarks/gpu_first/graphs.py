"""Step 4: decode graphs own the memory that they use. Everything else on the GPU is overwritten before a replay."""

from __future__ import annotations

import gc
import inspect
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from baton.engine.kernels.gpu.cuda_graphs import Captured, CudaCapture, DecodeGraphs
from baton.engine.model_runner import Inputs
from benchmarks.gpu_first.at import At, Outcome, require
from benchmarks.gpu_first.doubles import NoAttention
from benchmarks.lib.device import batch_of, moved
from benchmarks.lib.random_weights import random_model, settings_of
from benchmarks.lib.shapes import SIZES, TINY

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

CONTEXT, BLOCK = 100, 16
LARGEST, SMALLEST = 1 << 30, 16 << 20  # bytes of one overwritten piece
TOLERANCE = 0.05  # of logits in bfloat16


def run(at: At) -> Outcome:
    """Capture graphs of several sizes, spoil the free memory, and compare each replay with a normal forward."""
    sizes = [1, 8, at.size(64, 12)]
    shape = at.size(SIZES["M"], TINY["S"])
    dtype, kernels = at.size("bfloat16", "float32"), NoAttention() if at.dry else at.kernels()
    model = random_model(settings_of(shape, 1024), device=at.device, dtype=dtype, block_size=BLOCK, kernels=kernels)
    inputs = Inputs(model, sizes[-1], sizes[-1], 1024 // BLOCK)
    kv = model.make_cache(1 + sizes[-1] * -(-CONTEXT // BLOCK))
    for part in kv.tensors:
        part.normal_()
    graphs = DecodeGraphs(model, kv, inputs.widest())
    graphs.sizes = sizes
    checked = _capture(graphs, at)
    gc.collect()
    spoiled, differences = 0, []
    for rows in sizes:
        batch = moved(batch_of([1] * rows, [CONTEXT] * rows, BLOCK, at.device), inputs.widest())
        expected = model.forward(batch, kv).clone()
        found = torch.empty_like(expected)  # before the memory is full
        held = spoil(at)
        found.copy_(graphs.run(batch, rows))
        spoiled = max(spoiled, sum(each.nbytes for each in held))
        del held
        differences.append(float((found - expected).abs().max()))
    right = all(each <= TOLERANCE for each in differences)  # also not NaN
    require(right, f"replays differ from normal forwards by {differences} for {sizes} rows")
    figures = {
        "largest_difference": max(differences),
        "spoiled_gb": round(spoiled / 1e9, 1),
        "liveness_checked": checked,
    }
    text = f"{len(sizes)} graphs, liveness {'checked' if checked else 'not checked by this torch'}"
    return Outcome(f"{text}, {spoiled / 1e9:.1f} GB overwritten, largest difference {max(differences):.4f}", figures)


def spoil(at: At) -> list[Tensor]:
    """Return tensors that fill the free memory of the GPU with 0xFF, which are NaN as floats."""
    held: list[Tensor] = []
    if at.dry:
        return held
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    size = LARGEST
    while size >= SMALLEST:
        try:
            held.append(torch.full((size,), 0xFF, dtype=torch.uint8, device=at.device))
        except torch.OutOfMemoryError:
            size //= 2
    torch.cuda.synchronize()
    return held


def _capture(graphs: DecodeGraphs, at: At) -> bool:
    """Capture all sizes with the product's `CudaCapture`. Returns whether the memory of the inputs is watched."""
    if at.dry:
        return _recorded(graphs)
    watched = "check_input_liveness" in inspect.signature(torch.cuda.graph.__init__).parameters  # torch 2.13
    watching: AbstractContextManager[object] = nullcontext()
    if watched:
        watching = patch("torch.cuda.graph", partial(torch.cuda.graph, check_input_liveness=True))
    with watching, torch.inference_mode():
        graphs.capture(CudaCapture(at.device))
    return watched


def _recorded(graphs: DecodeGraphs) -> bool:
    """Replace graphs by normal forwards, and check the memory that they used as torch's liveness check does."""
    from tests.support.graphs import ExternalMemory

    memory: list[ExternalMemory] = []

    def capture(forward: Callable[[], Tensor]) -> Captured:
        forward()
        with ExternalMemory() as seen:
            logits = forward()
        memory.append(seen)
        return Captured(lambda: _copied(logits, forward), logits)

    graphs.capture(capture)
    gc.collect()
    dead = [at for seen in memory for at, storage in seen.external.items() if storage.expired()]  # type: ignore[no-untyped-call]
    require(not dead, f"{len(dead)} tensors that the graphs read are freed")
    return True


def _copied(logits: Tensor, forward: Callable[[], Tensor]) -> None:
    with torch.inference_mode():
        logits.copy_(forward())
