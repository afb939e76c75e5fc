"""Speed of int8 and int4 weights against bfloat16, in one process and in turns.

    python benchmarks/quantized.py --quick           the 125 M model, in about a minute
    python benchmarks/quantized.py                   the 1.1 B model (minutes)
    BATON_CPU_LEVEL=avx2 python benchmarks/quantized.py    another level of instructions
    python benchmarks/quantized.py --quality         equal answers and KL divergence of models/demo instead

The last line of stdout is one JSON object: tokens/s of each point by weights, and ratios to bfloat16.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/quantized.py`

import torch

from baton.engine.kernels.cpu.compiler import level_here
from baton.engine.kernels.quantized import Quantize
from benchmarks.lib import quality
from benchmarks.lib.models import make_model
from benchmarks.lib.points import Point
from benchmarks.lib.protocol import Setup
from benchmarks.lib.report import finish
from benchmarks.lib.subject import Subject
from benchmarks.lib.turns import number_of_turns, turns_parser

WEIGHTS: tuple[Quantize, ...] = ("none", "int8", "int4")
POINTS = tuple(map(Point.parse, ("P512", "B1@128", "B4@128", "B16@128")))
STEPS = 8  # of a decode measurement

Times = dict[tuple[str, Quantize], list[float]]


def measured(subject: Subject, point: Point) -> list[float]:
    """Return the seconds of one prompt, or of some decode steps."""
    found = subject.decode(point.batch, point.tokens, STEPS) if point.batch else subject.prefill(point.tokens, 1)
    seconds: list[float] = found["seconds"]
    return seconds


def rates(times: Times) -> dict[str, float]:
    """Return median tokens/s by point and weights."""
    named = {str(point): point for point in POINTS}
    return {
        f"{label} {'bf16' if weights == 'none' else weights}": named[label].produced / median(seconds)
        for (label, weights), seconds in times.items()
    }


def table(times: Times) -> str:
    """Return tokens/s, their spread, and the ratio to bfloat16, by point and weights."""
    lines = ["| point | bf16 | int8 | int4 | int8 / bf16 | int4 / bf16 |", "|---|---|---|---|---|---|"]
    for point in POINTS:
        cells = [times[str(point), weights] for weights in WEIGHTS]
        speeds = [point.produced / median(seconds) for seconds in cells]
        spreads = [(max(seconds) - min(seconds)) / median(seconds) for seconds in cells]
        shown = [f"{speed:.1f} ({spread:.0%})" for speed, spread in zip(speeds, spreads, strict=True)]
        lines.append(f"| {' | '.join([str(point), *shown, *(f'{each / speeds[0]:.2f}' for each in speeds[1:])])} |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Measure and print."""
    parser = turns_parser(__doc__, "quantized")
    parser.add_argument("--quality", action="store_true", help="equal answers and KL divergence instead of speed")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks of --quality")
    options = parser.parse_args(argv)
    load = os.getloadavg()[0]
    torch.set_num_threads(options.threads)
    if options.quality:
        dtypes = ("float32",) if options.quick or options.tiny else ("float32", "bfloat16")
        text, figures = quality.table(dtypes, options.ranks)
        shown = f"level {level_here()}, {options.ranks} ranks, {len(quality.prompts())} prompts\n\n{text}"
        section = "quantized-quality"
        return finish("quantized", argv, load, shown, {}, figures, write_docs=options.write_docs, section=section)
    model = make_model(
        options.cache.absolute(), "M" if options.quick or options.tiny else "L", "bf16", tiny=options.tiny
    )
    setup = Setup(str(model), "bf16", options.threads, kv_tokens=8192, cache="")
    subjects = {weights: Subject(setup, quantize=weights) for weights in WEIGHTS}
    times: Times = {}
    for _ in range(number_of_turns(options)):
        for point in POINTS:
            for weights, subject in subjects.items():
                times.setdefault((str(point), weights), []).extend(measured(subject, point))
    found = rates(times)
    ratios = {
        f"{weights}_vs_bf16_{point}": found[f"{point} {weights}"] / found[f"{point} bf16"]
        for weights in WEIGHTS[1:]
        for point in POINTS
    }
    shown = f"level {level_here()}, {options.threads} threads, model {model.name}\n\n{table(times)}"
    finish("quantized", argv, load, shown, ratios, found, write_docs=options.write_docs)


if __name__ == "__main__":
    main(sys.argv[1:])
