"""Fastest way to multiply few rows with a weight on this CPU, which decides decode speed.

    python benchmarks/linear.py --quick       one shape, in about a minute
    python benchmarks/linear.py               the shapes of the 1.1 B model, and Inductor's templates (minutes)
    python benchmarks/linear.py --level avx2,avx512   the compiled kernels at these levels of instructions
    python benchmarks/linear.py --quick --dtype fp32 --shapes 768x2048,4096x768 --rows 1,2   other weights and rows

Each candidate reads uncached weights, because copies of one weight take turns. Candidates alternate, and medians count.
The last line of stdout is one JSON object: bytes per second at one row as shares of the memory's limit, and the speed
of the compiled kernel relative to F.linear, the least of all rows and shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/linear.py`

import torch
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor
from torch.nn.functional import linear

from baton.engine.kernels.cpu.compiler import LEVEL_VARIABLE, Unavailable
from baton.engine.kernels.cpu.kernel_choice import Choice, Profile
from baton.engine.kernels.cpu.ops import CpuKernels
from baton.engine.memory.huge_pages import Arena
from benchmarks.lib.bandwidth import Reader
from benchmarks.lib.machine import machine
from benchmarks.lib.protocol import CLOCK_VARIABLE, clock
from benchmarks.lib.report import markdown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Product = Callable[[torch.Tensor], object]

SHAPES = ((11264, 2048), (2048, 5632), (2560, 2048), (2048, 2048))  # [width, K]: gate and up, down, qkv, o
ROWS = (1, 4, 8, 16, 32)
COLD_BYTES = 400 << 20
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COMPILED, TALL, PLAIN = "compiled kernel, huge pages", "kernel for prompts, huge pages", "F.linear"
FLAT_CHOICE, TALL_CHOICE = Choice(1 << 30, tall=True), Choice(0, tall=True)


@dataclass(frozen=True)
class Products:
    """The products to measure: weights [width, K] of one dtype, numbers of rows, and levels of instructions."""

    shapes: Sequence[tuple[int, int]]
    rows: Sequence[int]
    dtype: torch.dtype
    levels: Sequence[str]
    templates: bool
    rounds: int


def candidates(width: int, k: int, of: Products) -> dict[str, list[Product]]:
    """Return for each way one product per copy of a weight [width, K]."""
    dtype, levels = of.dtype, of.levels
    count = max(2, COLD_BYTES // (dtype.itemsize * width * k))
    weights = torch.randn(width, k).to(dtype).repeat(count, 1, 1)
    huge = Arena().empty((count, width, k), dtype).copy_(weights)
    found: dict[str, list[Product]] = {
        PLAIN: [partial(_plain, weight) for weight in weights],
        "F.linear, huge pages": [partial(_plain, weight) for weight in huge],
        "packed oneDNN": [partial(_packed, torch.ops.mkldnn._reorder_linear_weight(weight, 1)) for weight in weights],
    }
    if of.templates:
        found["Inductor, max-autotune"] = _inductor(weights)
    for level in levels:
        os.environ[LEVEL_VARIABLE] = level
        try:
            flat, tall = (CpuKernels(dtype, Profile(static=choice)) for choice in (FLAT_CHOICE, TALL_CHOICE))
        except Unavailable as why:
            print(f"no compiled kernel here: {why}")
            continue
        for name, where, kernels in (("compiled kernel", weights, flat), (COMPILED, huge, flat), (TALL, huge, tall)):
            found[name if level == levels[0] else f"{name}, {level}"] = [
                partial(_into, kernels.linear(weight), width) for weight in where
            ]
    return found


def _plain(weight: torch.Tensor, x: torch.Tensor) -> object:
    return linear(x, weight)


def _packed(weight: torch.Tensor, x: torch.Tensor) -> object:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _inductor(weights: torch.Tensor) -> list[Product]:
    """Return frozen graphs, each with its own packed weight."""
    inductor.freezing, inductor.max_autotune = True, True
    inductor.max_autotune_gemm_backends = "CPP,ATEN"
    dynamo.recompile_limit = 1000  # one graph per copy and number of rows
    return [
        torch.compile(_layer(weight), dynamic=False) for weight in weights[: 1 + COLD_BYTES // 4 // weights[0].nbytes]
    ]


def _layer(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer.eval()


def _into(layer: Callable[[torch.Tensor, torch.Tensor], object], width: int, x: torch.Tensor) -> object:
    return layer(x, torch.empty(len(x), width, dtype=x.dtype))


def measure(
    ways: dict[str, list[Product]], reader: Reader, x: torch.Tensor, rounds: int
) -> tuple[dict[str, float], float]:
    """Return median seconds of one product of each way, and median bytes per second of memory in the same rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    limits = list[float]()
    for turn in range(rounds + 1):
        for name, products in ways.items():
            began = clock()
            for product in products:
                product(x)
            if turn:
                seconds[name].append((clock() - began) / len(products))
        limits.append(max(reader.measure(1).values()))
    return {name: statistics.median(taken) for name, taken in seconds.items()}, statistics.median(limits)


def run(of: Products, threads: int) -> dict[str, float | None]:
    """Print one table and return the ratios."""
    torch.set_num_threads(threads)
    home = Path(os.environ.get("BATON_HOME") or Path.home() / ".baton").expanduser()
    reader = Reader(COLD_BYTES, threads, home / "bench")
    rows, shares, gains = list[list[str]](), list[dict[str, float]](), list[float]()
    for width, k in of.shapes:
        ways, size = candidates(width, k, of), of.dtype.itemsize * width * k
        for n in of.rows:
            seconds, limit = measure(ways, reader, torch.randn(n, k).to(of.dtype), of.rounds)
            for name, s in seconds.items():
                speed = (f"{size / s / 1e9:.1f}", f"{2 * n * width * k / s / 1e9:.0f}")
                rows.append(
                    [f"{width} x {k}", str(n), name, *speed, f"{size / s / limit:.2f}", f"{seconds[PLAIN] / s:.2f}"]
                )
            gains += [seconds[PLAIN] / seconds[COMPILED]] if COMPILED in seconds else []
            shares += [{name: size / s / limit for name, s in seconds.items()}] if n == of.rows[0] else []
    print(f"\n### {threads} threads\n")
    print(markdown(["weight", "rows", "way", "GB/s", "GFLOP/s", "share of limit", "times F.linear"], rows))
    median = {name: statistics.median(share[name] for share in shares) for name in shares[0]}
    return {f"{name}, {of.rows[0]} row, share of limit": round(value, 3) for name, value in median.items()} | {
        "compiled_vs_linear_min": round(min(gains), 3) if gains else None
    }


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    pairs = (each.partition("x") for each in text.split(","))
    return tuple((int(width), int(k)) for width, _, k in pairs)


def main() -> None:
    """Measure with the requested numbers of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one shape, without Inductor")
    parser.add_argument("--threads", default="1,2", help="numbers of threads, such as 1,2")
    parser.add_argument("--level", default="native", help="levels of the compiled kernels, such as avx512-bf16,avx2")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--shapes", type=_shapes, help="other weights, such as 768x2048,4096x768 (width x K)")
    parser.add_argument("--rows", type=_numbers, default=ROWS, help="of x, such as 1,2")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time, for one thread on a busy machine")
    args = parser.parse_args()
    if args.cpu_time:
        os.environ[CLOCK_VARIABLE] = "cpu"
    print(*(f"{name}: {value}" for name, value in machine().items()), sep="\n")
    shapes = args.shapes or (SHAPES[:1] if args.quick else SHAPES)
    rounds, levels = 5 if args.quick else 9, args.level.split(",")
    of = Products(shapes, args.rows, DTYPES[args.dtype], levels, templates=not args.quick, rounds=rounds)
    with torch.inference_mode():
        ratios = {f"{threads} threads": run(of, int(threads)) for threads in args.threads.split(",")}
    print(json.dumps({"benchmark": "linear", "ratios": ratios}))


if __name__ == "__main__":
    main()
