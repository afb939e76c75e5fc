"""What deterministic requests cost: throughput by their share, relative to none, beside other ways to be deterministic.

    python benchmarks/determinism.py --quick         some minutes on one core
    python benchmarks/determinism.py                 more rounds, and a sweep of the shape of verify passes
    python benchmarks/determinism.py --write-docs    the section in docs/performance.md from it

One engine in this process, on one thread, in bfloat16 and with attention splits that follow load (so that candidates
do differ from what is verified). All requests are there from the beginning, 16 run at once. In each round every variant
takes its turn, in another order; ratios are of one round, and the table has their median and spread. *fixed shape*:
every decode step has all its rows, so that bits do not depend on load; *one at a time*: nothing is batched.
The last line of stdout is one JSON object with the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/determinism.py`

import torch

from baton.engine.fixed import FixedShapes
from baton.engine.model.build import load_model
from baton.tokenizer import load_tokenizer
from benchmarks.lib.determinism_run import Load, Took, engine_of, run
from benchmarks.lib.machine import machine
from benchmarks.lib.models import make_model
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import fill, markdown

NAME = "determinism"
SHARES = (0.0, 0.02, 0.1, 0.5, 1.0)
SWEEP = ((1, 32), (1, 64), (2, 16), (2, 32), (4, 8), (4, 16), (4, 32), (8, 8), (8, 16))
RUNNING = 16


class Variant(NamedTuple):
    """What takes its turn in each round."""

    name: str
    share: float
    shapes: FixedShapes
    running: int = RUNNING
    fixed_decode: bool = False


def variants(rows: int, tokens: int, *, sweep: bool) -> list[Variant]:
    """By the order of the table; the first is what all are compared with."""
    shapes = FixedShapes(rows, tokens)
    found = [Variant(f"{share:.0%} deterministic", share, shapes) for share in SHARES]
    found.append(Variant("100%, all wait for verify passes", 1.0, FixedShapes(rows, tokens, stalls=True)))
    found.append(Variant("50%, all wait for verify passes", 0.5, FixedShapes(rows, tokens, stalls=True)))
    found.append(Variant("fixed shape", 0.0, shapes, fixed_decode=True))
    found.append(Variant("one at a time", 0.0, shapes, running=1))
    return found + [Variant(f"100%, {g} x {w}", 1.0, FixedShapes(g, w)) for g, w in SWEEP if sweep]


def measure(args: argparse.Namespace) -> dict[Variant, list[Took]]:
    """Every variant in each round, and once before to warm up."""
    folder = make_model(args.cache, args.size, "bf16", tiny=args.tiny)
    backend = load_model(folder, dtype="bfloat16", attention_splits="load_bf16")
    tokenizer, order, rng = load_tokenizer(folder), variants(args.rows, args.window, sweep=args.sweep), random.Random(0)
    taken: dict[Variant, list[Took]] = {variant: [] for variant in order}
    for number in range(-1, args.rounds):
        for variant in rng.sample(order, len(order)):
            # One at a time takes as long for a few as all do together.
            count = args.requests if variant.running > 1 else max(1, args.requests // 8)
            lengths = ((args.prompt, args.answer if number >= 0 else 4),) * count
            load = Load(lengths, variant.running, variant.share, seed=number)
            engine = engine_of(backend, tokenizer, load, variant.shapes, fixed_decode=variant.fixed_decode)
            took = run(engine, load)
            if number >= 0:
                taken[variant].append(took)
            print(f"{number}: {variant.name}: {took.tokens_per_s:.0f} tokens/s", file=sys.stderr, flush=True)
    return taken


def rows_of(taken: dict[Variant, list[Took]]) -> list[list[str]]:
    """The table."""
    base = next(iter(taken.values()))
    found = []
    for variant, runs in taken.items():
        ratios = [one.tokens_per_s / other.tokens_per_s for one, other in zip(runs, base, strict=True)]
        best = median(one.tokens_per_s for one in runs)
        again = median(one.counters.recomputed_tokens / one.tokens for one in runs)
        passes = median(one.counters.verify_passes for one in runs)
        times = [_times([s for one in runs for s in values(one)]) for values in (_ttft, _itl, _e2e)]
        spread = f"{median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        found.append([variant.name, f"{best:,.0f}", spread, f"{passes:.0f}", f"{again:.1%}", *times])
    return found


def _ttft(took: Took) -> list[float]:
    return took.ttft_s


def _itl(took: Took) -> list[float]:
    return took.itl_s


def _e2e(took: Took) -> list[float]:
    return took.e2e_s


def _times(seconds: list[float]) -> str:
    cuts = quantiles(seconds, n=100)
    return f"{cuts[49] * 1e3:,.0f} / {cuts[98] * 1e3:,.0f}"


def figures(taken: dict[Variant, list[Took]]) -> dict[str, float]:
    """Ratios by variant."""
    base = next(iter(taken.values()))
    return {
        variant.name: round(median(a.tokens_per_s / b.tokens_per_s for a, b in zip(runs, base, strict=True)), 4)
        for variant, runs in taken.items()
    }


def main(argv: list[str]) -> None:
    """Measure, print, and fill the section of the page if that is wanted."""
    home = Path(os.environ.get("BATON_HOME") or Path.home() / ".baton").expanduser()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests and rounds, no sweep")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--answer", type=int, default=128, help="tokens")
    parser.add_argument("--rows", type=int, default=FixedShapes().rows, help="of a verify pass")
    parser.add_argument("--window", type=int, default=FixedShapes().tokens, help="tokens of each row")
    parser.add_argument("--size", choices=("S", "M", "L"), default="M")
    parser.add_argument("--tiny", action="store_true", help="a toy model: to try the program, not to measure")
    parser.add_argument("--cache", type=Path, default=home / "bench", help="folder for models")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/performance.md")
    args = parser.parse_args(argv)
    args.rounds, args.sweep = args.rounds or (2 if args.quick else 5), not args.quick
    args.requests = args.requests or (32 if args.quick else 64)
    torch.set_num_threads(1)
    load, taken = os.getloadavg()[0], measure(args)
    header = [
        "",
        "tokens/s",
        "of 0 % (spread)",
        "verify passes",
        "recomputed",
        *(f"{n}, ms" for n in ("TTFT", "ITL", "E2E")),
    ]
    shown = markdown(header, rows_of(taken)) + "\n\nTimes are p50 / p99."
    print(shown)
    if args.write_docs:
        page = ROOT / "docs" / "performance.md"
        facts = [f"- command: python benchmarks/determinism.py {shlex.join(argv)}", f"- load at the start: {load:.1f}"]
        facts += [f"- {name}: {value}" for name, value in machine().items()]
        page.write_text(fill(page.read_text(), "\n".join([*facts, "", shown]), NAME))
    print(json.dumps({"benchmark": NAME, "figures": figures(taken)}))


if __name__ == "__main__":
    main(sys.argv[1:])
