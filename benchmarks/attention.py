"""Time of a layer's decode attention on this CPU, and its share of the memory's speed.

    python benchmarks/attention.py --quick                          two shapes, at the processor's level
    python benchmarks/attention.py --level avx2,avx512-bf16 --dtype bf16,fp32
    python benchmarks/attention.py --before HEAD^ --level avx2      another git revision, in turns with this tree

One thread. Caches of several layers take turns, so that KV comes from memory. Each measurement is a new process, and
medians of the rounds count. *Equal* compares the bits of all outputs. Other work on the machine matters less with
--cpu-time. The last line of stdout is one JSON object: the time before over the time now, for each case.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and not sys.flags.safe_path:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/attention.py`

import torch

from baton.engine.batch import Batch
from baton.engine.kernels.cpu.attention import CompiledAttention
from baton.engine.kernels.cpu.compiler import LEVEL_VARIABLE, load_library

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
ELEMENTS = {"bf16": torch.bfloat16, "fp32": torch.float32}
SHAPES = (  # heads, KV heads, dim, sequences, context
    (12, 12, 64, 1, 128), (12, 12, 64, 16, 640), (12, 4, 64, 16, 640), (32, 8, 128, 4, 1024), (32, 4, 64, 8, 640),
)  # fmt: skip
QUICK_SHAPES = SHAPES[1:3]
BLOCK_SIZE, COLD_BYTES, TURNS = 16, 96 << 20, 9


def batch_of(sequences: int, context: int) -> Batch:
    """Return a decode step of sequences with `context` tokens each, whose blocks lie anywhere."""
    blocks, none = -(-context // BLOCK_SIZE), torch.empty(0, dtype=torch.int64)
    tables = torch.randperm(sequences * blocks).to(torch.int32).view(sequences, blocks)
    starts = torch.arange(sequences + 1, dtype=torch.int32)
    lens = torch.full((sequences,), context, dtype=torch.int32)
    return Batch(none, none, none, [1] * sequences, [context] * sequences, starts, lens, tables, none)


def measure(dtype: str, shapes: Sequence[tuple[int, ...]], *, cpu_time: bool) -> list[tuple[float, str]]:
    """Return the seconds of one layer's attention and a digest of its output, for each shape."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock, found = time.thread_time if cpu_time else time.perf_counter, list[tuple[float, str]]()
    element, library = ELEMENTS[dtype], load_library({"bf16": "bf16", "fp32": "f32"}[dtype])
    for heads, kv_heads, dim, sequences, context in shapes:
        batch = batch_of(sequences, context)
        cache = torch.empty(2, batch.block_tables.numel(), BLOCK_SIZE, kv_heads, dim, dtype=element)
        caches = [torch.randn_like(cache) for _ in range(max(1, min(24, COLD_BYTES // cache.nbytes)))]
        query, out = torch.randn(sequences, heads, dim).to(element), torch.empty(sequences, heads * dim, dtype=element)
        attend = CompiledAttention(library, "bf16" if dtype == "bf16" else "f32", None, None)
        digest, taken = hashlib.sha256(), list[float]()
        for _ in range(TURNS):
            attend.bind(batch, BLOCK_SIZE, dim**-0.5)
            began = clock()
            for keys, values in caches:
                attend(query, keys, values, out)
            taken.append((clock() - began) / len(caches))
        digest.update(out.view(torch.uint8).numpy().tobytes())
        found.append((statistics.median(taken), digest.hexdigest()))
    return found


def in_process(tree: Path, level: str, dtype: str, options: argparse.Namespace) -> list[tuple[float, str]]:
    """Return `measure` of a tree's kernels, in a new process. Ends the program if that fails."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--child", "--dtype", dtype]
    command += [flag for flag in ("--quick", "--cpu-time") if vars(options)[flag[2:].replace("-", "_")]]
    environment = os.environ | {LEVEL_VARIABLE: level, "PYTHONPATH": str(tree)}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        sys.exit(f"{tree.name} at {level} failed with exit code {run.returncode}")
    return [(seconds, digest) for seconds, digest in json.loads(run.stdout)]


def table(options: argparse.Namespace, trees: dict[str, Path]) -> dict[str, float]:
    """Print the table and return the ratios of all cases."""
    from benchmarks.lib.bandwidth import Reader
    from benchmarks.lib.report import markdown

    shapes, rows, ratios = QUICK_SHAPES if options.quick else SHAPES, list[list[str]](), dict[str, float]()
    home = Path(os.environ.get("BATON_HOME") or Path.home() / ".baton").expanduser()
    reader, limits = Reader(COLD_BYTES, 1, home / "bench"), list[float]()
    for level, dtype in product(options.level, options.dtype):
        found: dict[str, Any] = defaultdict(list)
        for _ in range(options.rounds):
            for name, tree in trees.items():
                found[name].append(in_process(tree, level, dtype, options))
            limits.append(max(reader.measure(1).values()))
        for index, shape in enumerate(shapes):
            seconds = {name: statistics.median(each[index][0] for each in found[name]) for name in trees}
            before, now = seconds.get("before", 0.0), seconds["now"]
            equal = len({each[index][1] for rounds in found.values() for each in rounds}) == 1
            heads, kv_heads, dim, sequences, context = shape
            size = 2 * sequences * context * kv_heads * dim * ELEMENTS[dtype].itemsize
            case = f"{heads}, {kv_heads}, {dim}; {sequences} x {context}"
            ratios |= {f"{level} {dtype} {case}": round(before / now, 3)} if before else {}
            old = [f"{before * 1e6:.0f}", f"{before / now:.2f}", "yes" if equal else "no"] if before else ["-"] * 3
            share = f"{size / now / statistics.median(limits):.2f}"
            rows.append([level, dtype, case, f"{now * 1e6:.0f}", f"{size / now / 1e9:.1f}", share, *old])
    columns = ["level", "dtype", "heads, KV heads, dim; sequences x tokens", "us", "GB/s", "share of memory's speed"]
    print(markdown([*columns, "us before", "ratio", "equal"], rows))
    return ratios


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the options. An invalid one ends the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two shapes, two rounds")
    parser.add_argument("--level", type=_list, default=["native"], help="levels, such as avx2,avx512-bf16")
    parser.add_argument("--dtype", type=_list, default=["bf16"], help="of bf16 and fp32")
    parser.add_argument("--before", help="git revision whose kernels are measured, too")
    parser.add_argument("--rounds", type=int, help="processes of each kind (5; with --quick 2)")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time in place of time, for a busy machine")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.rounds = options.rounds or (2 if options.quick else 5)
    for unknown in set(options.dtype) - set(ELEMENTS):
        parser.error(f"--dtype: unknown {unknown}; one of {', '.join(ELEMENTS)}")
    return options


def _list(text: str) -> list[str]:
    return text.split(",")


def main(argv: list[str]) -> None:
    """Measure this tree, and another revision if one is given."""
    options = parse(argv)
    if options.child:
        shapes = QUICK_SHAPES if options.quick else SHAPES
        print(json.dumps(measure(options.dtype[0], shapes, cpu_time=options.cpu_time)))
        return
    from benchmarks.lib.machine import machine
    from benchmarks.lib.protocol import CLOCK_VARIABLE
    from benchmarks.revisions import unpacked

    if options.cpu_time:
        os.environ[CLOCK_VARIABLE] = "cpu"  # of the memory's speed

    print(*(f"{name}: {value}" for name, value in machine().items()), sep="\n")
    trees = {"now": ROOT}
    with ExitStack() as stack:
        if options.before:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "before"
            print(f"before: {unpacked(options.before, folder)}")
            trees = {"before": folder, **trees}
        print(json.dumps({"benchmark": "attention", "ratios": table(options, trees)}))


if __name__ == "__main__":
    main(sys.argv[1:])
