"""Time of the draw of a step on this CPU: the compiled one against torch's.

    python benchmarks/sampling.py --quick                  small vocabulary, seconds
    python benchmarks/sampling.py --level avx2,avx512      at these levels of instructions, a minute

Both draw from the same logits in turns, on one thread. The last line of stdout is one JSON object: torch's time over
the compiled draw's for each case.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/sampling.py`

import torch

from baton.core import Sampling
from baton.engine.kernels.cpu.compiler import LEVEL_VARIABLE
from baton.engine.kernels.select import fused_draw
from baton.engine.sampling.logits import Row
from baton.engine.sampling.sampler import Sampler
from benchmarks.lib.machine import machine
from benchmarks.lib.report import markdown

KINDS = {
    "temperature": Sampling(temperature=0.8, seed=1),
    "top-p": Sampling(temperature=0.8, top_p=0.95, seed=1),
    "top-k": Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=1),
    "min-p": Sampling(temperature=0.8, min_p=0.05, seed=1),
}
VOCABULARIES, ROWS = (32_000, 151_936), (1, 16)


def times(samplers: list[Sampler], logits: torch.Tensor, sampling: Sampling, rounds: int) -> list[list[float]]:
    """Return the seconds of each sampler for a step of these logits, by round."""
    rows = [Row(range(1, i + 2), sampling, (), logits.shape[1], None) for i in range(len(logits))]
    found = list[list[float]]()
    for _ in range(rounds + 2):
        found.append([])
        for sampler in samplers:
            begin = time.perf_counter()
            sampler.sample(logits, rows)
            found[-1].append(time.perf_counter() - begin)
    return found[2:]  # the first rounds fill caches


def compare(level: str, vocabularies: tuple[int, ...], rounds: int) -> tuple[list[list[str]], dict[str, float]]:
    """Return the rows of the table and the ratios of one level, or nothing where its kernels cannot run."""
    os.environ[LEVEL_VARIABLE] = level
    own, generator = fused_draw(torch.device("cpu")), torch.Generator().manual_seed(0)
    if own is None:
        print(f"{level}: no compiled draw here")
        return [], {}
    table, ratios = list[list[str]](), dict[str, float]()
    for vocab, count, (kind, sampling) in product(vocabularies, ROWS, KINDS.items()):
        logits = torch.randn(count, vocab, generator=generator) * 3
        found = times([Sampler(), Sampler(own)], logits, sampling, rounds)
        torchs, owns = (statistics.median(column) * 1e3 for column in zip(*found, strict=True))
        each = sorted(a / b for a, b in found)
        ratio = statistics.median(each)
        ratios[f"{level}, {count} rows of {vocab}, {kind}"] = round(ratio, 2)
        shown = (f"{torchs:.3f}", f"{owns:.3f}", f"{ratio:.1f}", f"{(each[-1] - each[0]) / ratio:.0%}")
        table.append([level, str(vocab), str(count), kind, *shown])
    return table, ratios


def main() -> None:
    """Measure at the requested levels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the small vocabulary")
    parser.add_argument("--level", default="native", help="levels of instructions, as in BATON_CPU_LEVEL")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    vocabularies = VOCABULARIES[:1] if args.quick else VOCABULARIES
    parts = [compare(level, vocabularies, args.rounds) for level in args.level.split(",")]
    print(*(f"- {name}: {value}" for name, value in machine().items()), sep="\n")
    header = ["level", "vocabulary", "rows", "draw", "torch, ms", "compiled, ms", "ratio", "spread"]
    print(markdown(header, [row for table, _ in parts for row in table]))
    print(json.dumps({"benchmark": "sampling", "ratios": {k: v for _, ratios in parts for k, v in ratios.items()}}))


if __name__ == "__main__":
    main()
