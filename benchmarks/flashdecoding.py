"""The three ideas of FlashDecoding++ (arXiv 2311.01282) in Baton's kernels, each on and off.

    python benchmarks/flashdecoding.py --quick                    8 pairs of level and dtype, under 10 minutes
    python benchmarks/flashdecoding.py --write-docs               all points, about an hour, and docs/measurements
    python benchmarks/flashdecoding.py --quick --levels avx2 --dtypes bf16 --models 125M

- Unified maximum: attention subtracts a constant. Off: a running maximum, which is the default of the engine.
- Flat GEMM: a kernel for 2 rows and more, which reads a weight once. Off: the tall kernel, which serves prompts. It
  pads rows to the lanes of a vector. Two more ways are padding to 64 rows, and one row at a time.
- Dispatch: the rows of a product decide on its kernel, by a measured profile. Off: one kernel for all rows.

Levels of instructions are forced one after the other, each in a process of its own. Candidates alternate within rounds.
A ratio is the time without an idea over the time with it: above 1 it helps. Profiles are made from every second round
and judged by the others. Without a GPU, its section has the reason. The last line of stdout is one JSON object with
the median ratio of each idea.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/flashdecoding.py`

import torch

from benchmarks.lib import flash_gpu
from benchmarks.lib.flash_measure import MODELS, Plan
from benchmarks.lib.flash_table import Record, Results, Where, gpu_tables
from benchmarks.lib.protocol import CLOCK_VARIABLE, ROOT
from benchmarks.lib.report import finish

LEVELS = {  # with the same limit for oneDNN, whose product a profile may choose
    "avx2": "AVX2",
    "avx512": "AVX512_CORE",
    "avx512-vnni": "AVX512_CORE_VNNI",
    "avx512-bf16": "AVX512_CORE_BF16",
}
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
HEADS = (32, 4, 64)  # of the 1.1 B model
FULL = Plan(
    dtype="",
    contexts=tuple(1024 << i for i in range(6)),
    rows=(1, 4, 16, 64),
    heads=HEADS,
    models=("125M", "1.1B", "8B"),
    product_rows=(1, 2, 4, 8, 16, 32, 64),
    prompts=(128, 512),
    step="125M",
    points=("B1@1024", "B4@1024", "B16@1024", "B64@1024", "P512"),
    rounds=6,
)
QUICK = replace(
    FULL,
    contexts=(1024, 4096, 16384),
    rows=(1, 16, 64),
    models=("125M",),
    product_rows=(1, 4, 16, 64),
    prompts=(256,),
    points=("B1@512", "B16@512", "P256"),
    rounds=4,
)
TINY = replace(
    QUICK, contexts=(128, 256), rows=(1, 4), models=("tiny",), product_rows=(1, 4), step="tiny", points=("B4@64", "P64")
)
GPU_MODELS = ("1.1B", "8B")


def plan_of(options: argparse.Namespace, dtype: str) -> Plan:
    """Return the points of a process."""
    plan = TINY if options.tiny else QUICK if options.quick else FULL
    given: dict[str, Any] = {
        name: tuple(found) for name in ("contexts", "rows", "models") if (found := vars(options)[name])
    }
    return replace(plan, dtype=DTYPES[dtype], rounds=max(2, options.rounds or plan.rounds), **given)


def measured(options: argparse.Namespace, level: str, dtype: str) -> list[Record]:
    """Run the process of one level and dtype. A level that the machine lacks is a record with the reason."""
    asked = json.dumps(asdict(plan_of(options, dtype)) | {"threads": options.threads})
    variables = os.environ | {"BATON_CPU_LEVEL": level, "ONEDNN_MAX_CPU_ISA": LEVELS[level]}
    variables |= {"OMP_NUM_THREADS": str(options.threads), CLOCK_VARIABLE: "cpu" if options.cpu_time else ""}
    command = [sys.executable, "-m", "benchmarks.lib.flash_measure", asked]
    done = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    found: list[Record] = json.loads(done.stdout.splitlines()[-1])
    return found


def gpu(options: argparse.Namespace) -> tuple[str, dict[str, float | None]]:
    """Return the section of a GPU and its ratios, or the reason why there is none."""
    if reason := flash_gpu.missing():
        return f"not measured: {reason}", {"gpu_unified_max": None}
    device, plan = torch.device("cuda"), plan_of(options, "bf16")
    records = list(flash_gpu.attention(device, plan.heads, plan.contexts, plan.rows, plan.rounds))
    for name in GPU_MODELS:
        records += flash_gpu.products(device, name, MODELS[name], plan.product_rows, plan.rounds)
    text, ratios = gpu_tables(records)
    return f"{torch.cuda.get_device_name(device)}, bfloat16\n\n{text}", ratios


def arguments(argv: list[str]) -> argparse.Namespace:
    """Return the parsed options."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def names(known: Any) -> Any:
        def parse(text: str) -> list[str]:
            if unknown := set(text.split(",")) - set(known):
                raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: must be of {', '.join(known)}")
            return text.split(",")

        return parse

    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--quick", action="store_true", help="fewer points, and the layer of the 125 M model alone")
    found.add_argument("--tiny", action="store_true", help="toy sizes: to try the program, not to measure")
    found.add_argument("--levels", type=names(LEVELS), default=list(LEVELS), help="such as avx2,avx512-bf16")
    found.add_argument("--dtypes", type=names(DTYPES), default=list(DTYPES), help="bf16, fp32 or both")
    found.add_argument("--models", type=names(MODELS), help="layers for flat GEMM and dispatch, such as 125M,8B")
    found.add_argument("--contexts", type=numbers, help="of attention, such as 1024,32768")
    found.add_argument("--rows", type=numbers, help="of attention, such as 1,64")
    found.add_argument("--rounds", type=int, help="turns of all candidates of a point")
    found.add_argument("--threads", type=int, default=1)
    found.add_argument("--cpu-time", action="store_true", help="count CPU time, on a busy machine, with one thread")
    found.add_argument("--out", type=Path, help="folder for the records, flashdecoding.json")
    found.add_argument(
        "--write-docs", action="store_true", help="put the tables into docs/measurements/flashdecoding.md"
    )
    return found.parse_args(argv)


def main(argv: list[str]) -> None:
    """Measure all levels and dtypes, and print."""
    options, load = arguments(argv), os.getloadavg()[0]
    records: dict[Where, list[Record]] = {}
    for level in options.levels:
        for dtype in options.dtypes:
            print(f"{level}, {dtype}", file=sys.stderr)
            records[level, dtype] = measured(options, level, dtype)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        kept = {" ".join(where): found for where, found in records.items()}
        (options.out / "flashdecoding.json").write_text(json.dumps(kept))
    results = Results(records)
    section, ratios = gpu(options)
    clock = "CPU time" if options.cpu_time else "time"
    head = f"{options.threads} threads, {clock}; attention with heads {HEADS}"
    head += "; toy sizes: the figures mean nothing" if options.tiny else ""
    shown = f"{head}\n\n{results.shown()}\n\n#### GPU\n{section}"
    finish(
        "flashdecoding", argv, load, shown, results.ratios() | ratios, results.counts(), write_docs=options.write_docs
    )


if __name__ == "__main__":
    main(sys.argv[1:])
