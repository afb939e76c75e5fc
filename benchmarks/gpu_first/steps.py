"""The ten steps of a first run on a GPU: names, modules, time limits, and the parts that a dry run cannot show."""

from __future__ import annotations

from dataclasses import dataclass

PACKAGE = "benchmarks.gpu_first"


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `module` has a function `run(at)`, which is killed after `limit_s` seconds."""

    number: int
    name: str
    module: str
    limit_s: float
    unshown: str  # by a dry run


STEPS = (
    Step(1, "environment and limits", f"{PACKAGE}.environment", 60, "the speed of the GPU's memory and products"),
    Step(2, "kernels against float32", f"{PACKAGE}.kernels", 240, "compiled kernels and FlashAttention"),
    Step(3, "NCCL group of one rank", f"{PACKAGE}.nccl", 60, "NCCL itself: a double of torch's group answers"),
    Step(4, "decode graphs", f"{PACKAGE}.graphs", 90, "CUDA's capture and the memory behind a replay"),
    Step(5, "pair of processes", f"{PACKAGE}.pair", 90, "cuda_ipc: the pair uses shm"),
    Step(6, "engine against the CPU", f"{PACKAGE}.engines", 150, "compiled kernels, tensor cores and overlap"),
    Step(7, "launches of a decode step", f"{PACKAGE}.launches", 150, "launches and idle time of a GPU"),
    Step(8, "model of 8 B parameters", f"{PACKAGE}.model_8b", 180, "the size: the model is a toy"),
    Step(9, "prefill and decode processes", f"{PACKAGE}.serving", 180, "workers on a GPU: both are on the CPU"),
    Step(10, "killed and trapped workers", f"{PACKAGE}.failures", 180, "a trap on a GPU: the error is raised by hand"),
)
