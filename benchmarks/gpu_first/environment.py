"""Step 1: the GPU, and the limits that later steps are compared with."""

from __future__ import annotations

import torch

from baton.engine.kernels.select import choose_kernels
from benchmarks.gpu_first.at import At, Outcome, require
from benchmarks.lib import device as gpu

OLDEST = (8, 0)


def run(at: At) -> Outcome:
    """Measure copies and matrix products, and check that the engine would use its GPU kernels here."""
    if not at.dry:
        chosen = choose_kernels(at.device, torch.bfloat16).name
        require(torch.cuda.get_device_capability(at.device) >= OLDEST, "the compute capability is below 8.0")
        require(chosen == "triton", f"the engine would use the kernels {chosen!r}")
    memory = gpu.bandwidth(at.device, at.size(gpu.PROBE_BYTES, 8 << 20)) / 1e9
    gemm = gpu.gemm_rate(at.device, [], at.size(gpu.GEMM_SIZE, 128)) / 1e12
    free = torch.cuda.mem_get_info(at.device)[0] / 1e9 if not at.dry else 0.0
    figures = {"memory_gb_per_s": round(memory, 1), "gemm_tflop_per_s": round(gemm, 3), "free_gb": round(free, 1)}
    return Outcome(f"memory {memory:.0f} GB/s, bfloat16 products {gemm:.1f} TFLOP/s, {free:.0f} GB free", figures)
