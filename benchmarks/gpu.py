"""Correctness and speed of the GPU path, on a machine with one GPU.

    python benchmarks/gpu.py            every table (some minutes, 24 GB of GPU memory)
    python benchmarks/gpu.py --quick    the 1.1 B model alone
    python -m benchmarks.gpu --first    ten steps of a first run on a GPU, in at most eight minutes (`make gpu-test`)

It runs the kernel tests on the GPU and compares attention, as the engine launches it, with its reference. It compares
decode steps with the memory's speed and prompts with the fastest matrix product, both measured in the same run. The
last line of stdout is one JSON object. Without a GPU, every ratio is null.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/gpu.py`

import torch

from baton.engine.kernels.torch_reference import TorchKernels
from benchmarks.gpu_first.runner import Run
from benchmarks.gpu_first.steps import STEPS, Step
from benchmarks.lib import device as gpu
from benchmarks.lib.shapes import SIZES, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.engine.kernels.gpu.ops import GpuKernels

ROOT = Path(__file__).resolve().parent.parent
MODELS = {"1b": SIZES["L"], "8b": Shape(hidden=4096, ffn=14336, layers=32, heads=32, kv_heads=8, vocab=128_256)}
BATCHES, CONTEXT, PROMPT = (1, 64), 1024, 4096
BLOCKS = {"triton": 16, "flash": 256}
DECODE_GOAL, PREFILL_GOAL = 0.80, 0.65
TOLERANCE = 0.02  # for attention in bfloat16, with values of about 1

Ratios = dict[str, float | None]


def names() -> list[str]:
    """Return the names of the ratios: least possible time over measured time, of decode steps and of prompts."""
    decode = [f"decode_{model}_batch{rows}_of_memory" for model in MODELS for rows in BATCHES]
    return [*decode, *(f"prefill_{model}_of_gemm" for model in MODELS)]


def last_line(ratios: Ratios, note: str) -> str:
    """Return the line for programs. Ratios that were not measured are null."""
    return json.dumps({"benchmark": "gpu", "device": note, "ratios": {name: ratios.get(name) for name in names()}})


def main(argv: list[str]) -> int:
    """Measure and print. The exit code is 1 if a kernel is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the 1.1 B model alone, and no kernel tests")
    parser.add_argument("--first", action="store_true", help="the ten steps of a first run, each in its own process")
    parser.add_argument("--dry", action="store_true", help="with --first: on the CPU, with stand-ins and small sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="with --first: write the results to this file")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="with --first: write each step's output there")
    parser.add_argument("--only", type=steps_of, default=STEPS, metavar="N,N", help="with --first: only these steps")
    parser.add_argument("--budget-s", type=float, default=480.0, help="with --first: seconds of all steps together")
    args = parser.parse_args(argv)
    if args.first:
        return first(args)
    if not torch.cuda.is_available():
        print("no GPU that this torch can use: nothing is measured")
        print(last_line({}, "none"))
        return 0
    device = torch.device("cuda:0")
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    right = kernels_are_right(device, tests=not args.quick)
    ratios = measure(device, ["1b"] if args.quick else list(MODELS))
    print(last_line(ratios, torch.cuda.get_device_name(device)))
    return 0 if right else 1


def steps_of(text: str) -> tuple[Step, ...]:
    """Parse the numbers of steps. Raises ArgumentTypeError for one that does not exist."""
    known = {step.number: step for step in STEPS}
    numbers = [int(part) for part in text.split(",")]
    if unknown := [number for number in numbers if number not in known]:
        raise argparse.ArgumentTypeError(f"there is no step {unknown[0]}; there are {min(known)} to {max(known)}")
    return tuple(known[number] for number in sorted(set(numbers)))


def first(args: argparse.Namespace) -> int:
    """Run the steps of a first run. The exit code is 1 if one failed."""
    run = Run(dry=args.dry, budget_s=args.budget_s, logs=args.logs)
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)
    run.all(args.only)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(run.report(), indent=1) + "\n")
    counts = ", ".join(f"{count} {status}" for status, count in sorted(run.counts().items()))
    print(f"{counts}{f'; results in {args.json}' if args.json else ''}")
    return 1 if run.failed else 0


def kernels_are_right(device: torch.device, *, tests: bool) -> bool:
    """Run the kernel tests on this GPU, then check attention with the engine's tiles and splits."""
    from baton.engine.kernels.gpu.ops import GpuKernels

    right = True
    if tests:
        variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", "pytest", "-q", "--sample", "tests/unit/gpu/kernels"]
        right = subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode == 0
    chosen = GpuKernels.on(device)
    variants = {"as chosen": chosen, "triton": GpuKernels(chosen.processors)}
    variants["unified"] = GpuKernels(chosen.processors, unified=0.0)
    for label, kernels in variants.items():
        errors = [gpu.attention_error(case, kernels, device, torch.bfloat16) for case in gpu.CASES]
        print(f"attention, {label}: largest error {max(errors):.4f} over {len(errors)} batches (at most {TOLERANCE})")
        right = right and max(errors) <= TOLERANCE
    return right


def measure(device: torch.device, models: list[str]) -> Ratios:
    """Print all tables and return the ratios."""
    shapes = [(PROMPT, *linear) for model in models for linear in MODELS[model].linears]
    memory, gemm = gpu.bandwidth(device), gpu.gemm_rate(device, shapes)
    print(f"memory {memory / 1e9:.0f} GB/s, bfloat16 products {gemm / 1e12:.0f} TFLOP/s")
    ratios: Ratios = {}
    for model in models:
        ratios |= dict(of_model(model, device, memory, gemm))
    small_products(MODELS[models[-1]], device)
    compiled(device)
    return ratios


def of_model(name: str, device: torch.device, memory: float, gemm: float) -> Iterator[tuple[str, float]]:
    """Yield the decode and prefill ratios of one model, with and without graphs, for both block sizes."""
    shape = MODELS[name]
    prompts = []
    for label, block_size in BLOCKS.items():
        model = gpu.model_of(shape, device, block_size)
        share = shape.prefill_flops(PROMPT) / gemm / gpu.prefill_seconds(model, PROMPT)
        print(f"{name}: {PROMPT} tokens, {label} (blocks of {block_size}): {share:.2f} of gemm, goal {PREFILL_GOAL}")
        prompts.append(share)
        for rows in BATCHES if label == "triton" else ():
            least = shape.decode_bytes(rows, CONTEXT, "bf16") / memory
            eager, graph = (least / gpu.decode_seconds(model, rows, CONTEXT, graphs=on) for on in (False, True))
            print(f"{name}: batch {rows}: {eager:.2f} of the memory, by graphs {graph:.2f} (goal {DECODE_GOAL})")
            yield f"decode_{name}_batch{rows}_of_memory", round(graph, 3)
        del model
        torch.cuda.empty_cache()
    yield f"prefill_{name}_of_gemm", round(max(prompts), 3)


def small_products(shape: Shape, device: torch.device) -> None:
    """Print whether products of few rows are faster when padded to 8. The engine does not pad."""
    for inputs, outputs in shape.linears:
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device)
        for rows in (1, 3, 5, 7):
            times = []
            for m in (rows, 8):
                x, out = (torch.zeros(m, n, dtype=torch.bfloat16, device=device) for n in (inputs, outputs))
                times.append(gpu.seconds(partial(torch.mm, x, weight.t(), out=out)))
            print(f"product {inputs} x {outputs}, {rows} rows: {times[0] * 1e6:.1f} us, padded {times[1] * 1e6:.1f} us")


def compiled(device: torch.device, rows: int = 64, width: int = 4096) -> None:
    """Print the time of the row kernels' references under torch.compile against Triton, and the compile time."""
    from baton.engine.kernels.gpu.ops import GpuKernels

    ours: GpuKernels = GpuKernels.on(device)
    x, out = (torch.randn(rows, width, dtype=torch.bfloat16, device=device) for _ in range(2))
    weight = torch.ones(width, dtype=torch.bfloat16, device=device)
    began = time.monotonic()
    norm = torch.compile(TorchKernels().rms_norm)
    norm(x, None, weight, 1e-5, out)
    torch.cuda.synchronize()
    start = time.monotonic() - began
    by_compile = gpu.seconds(lambda: norm(x, None, weight, 1e-5, out))
    by_triton = gpu.seconds(lambda: ours.rms_norm(x, None, weight, 1e-5, out))
    print(f"RMS norm: {by_triton * 1e6:.1f} us, torch.compile {by_compile * 1e6:.1f} us and {start:.1f} s at start")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
