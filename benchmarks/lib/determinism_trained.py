"""Verify passes with trained models: prompts of text that was not trained on, variants, and the paper's table."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from baton.engine.determinism.shapes import FixedShapes
from baton.tokenizer import load_tokenizer
from benchmarks.lib.determinism_levels import backends
from benchmarks.lib.determinism_run import Load, engine_of, run
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import markdown

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from baton.tokenizer import Tokenizer
    from benchmarks.lib.determinism_run import Took

    Runs = Mapping[str, Sequence[Took]]

RUNNING = 16
DEMO, PROMPTS = ROOT / "models/demo", ROOT / "models/heldout.jsonl"
SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
# G x W of 64, 128 and 256 tokens
SWEEP = ((2, 32), (4, 16), (8, 8), (2, 64), (4, 32), (8, 16), (16, 8), (4, 64), (8, 32), (16, 16))
KEYS = ("verify_throughput_10", "verify_throughput_50", "verify_throughput_100", "verify_recomputed_share_100")
# LLM-42 (arXiv 2601.17768v2): Llama-3.1-8B-Instruct, 4 H100 PCIe, W = 64, G = 8; throughput without determinism is 1.
PAPER = {
    "paper, ArXiv": (1.00, 0.99, 0.99, 0.98, 0.92, 0.84),
    "paper, ShareGPT": (0.96, 0.90, 0.85, 0.78, 0.69, 0.58),
    "paper, 512 + 256": (0.99, 0.97, 0.95, 0.92, 0.83, 0.72),
    "paper, 1,024 + 256": (0.99, 0.98, 0.97, 0.95, 0.89, 0.81),
    "paper, 1,024 + 512": (0.99, 0.98, 0.97, 0.94, 0.86, 0.76),
    "paper, 2,048 + 256": (1.0, 0.99, 0.98, 0.97, 0.92, 0.84),
}


class Verified(NamedTuple):
    """One variant: a share of deterministic requests, and the shape of verify passes without exact steps."""

    share: float
    shapes: FixedShapes

    @property
    def name(self) -> str:
        return (
            f"{self.share:.0%}, {self.shapes.rows} x {self.shapes.tokens}{'' if self.shapes.ragged else ', one length'}"
        )


def prompts_of(folder: Path, tokenizer: Tokenizer, length: int, count: int = 64) -> tuple[tuple[int, ...], ...]:
    """Return prompts of at least `length` tokens: those of `heldout.json` in the folder, else joined sentences."""
    if (stored := folder / "heldout.json").exists():
        return tuple(map(tuple, json.loads(stored.read_text())[:count]))
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    rng, found = random.Random(0), list[tuple[int, ...]]()
    for _ in range(count):
        tokens = list[int]()
        while len(tokens) < length:
            row = rng.choice(rows)
            tokens += tokenizer.encode(f"{row['prompt']}{row['completion']} ")
        found.append(tuple(tokens))
    return tuple(found)


def measure_verified(
    folder: Path, levels: Sequence[str], args: Namespace, part: str
) -> Iterator[tuple[str, dict[str, list[Took]]]]:
    """Yield the runs of one model at each level: every variant of `part` ("shares" or "sweep") in each round."""
    tokenizer, lengths = load_tokenizer(folder), ((args.prompt, args.answer),) * args.requests
    prompts, order = prompts_of(folder, tokenizer, args.prompt), random.Random(0)
    shapes = FixedShapes(args.rows, args.window)
    for level, *_, backend, checked in backends(folder, levels, [("bfloat16", "none")], args.splits, shapes):
        variants = {each.name: each for each in (verified if part == "shares" else swept)(checked, args.requests)}
        found: dict[str, list[Took]] = {name: [] for name in variants}
        for share, shape in variants.values():  # a warm-up
            short = Load(((args.prompt, 4),) * 4, RUNNING, share, prompts=prompts)
            run(engine_of(backend, tokenizer, short, shape), short)
        turns = [order.sample([*variants], len(variants)) for _ in range(args.rounds)]
        for number, name in ((number, name) for number, turn in enumerate(turns) for name in turn):
            share, shape = variants[name]
            load = Load(lengths, RUNNING, share, number, prompts[number:] + prompts[:number])
            found[name].append(run(engine_of(backend, tokenizer, load, shape), load))
            speed = f"{found[name][-1].tokens_per_s:.0f} tokens/s"
            print(f"{level}, round {number}: {name}: {speed}", file=sys.stderr, flush=True)
        yield level, found


def verified(shapes: FixedShapes, requests: int) -> list[Verified]:
    """Return the baseline, then each share that is at least one request."""
    return [Verified(share, shapes) for share in (0.0, *SHARES) if not share or round(share * requests)]


def swept(shapes: FixedShapes, requests: int) -> list[Verified]:
    """Return the baseline and all deterministic in passes of other shapes, with windows of any lengths and of one."""
    del requests  # all of them, however many
    found = [Verified(0.0, shapes)]
    for rows, tokens in SWEEP:
        each = FixedShapes(rows, tokens, ragged=shapes.ragged)
        found += [Verified(1.0, each)] + [Verified(1.0, replace(each, ragged=False))] * shapes.ragged
    return found


def seconds_of(took: Took, clock: str) -> float:
    """Return the time of a run by this clock: wall or cpu."""
    return took.cpu_s if clock == "cpu" else took.seconds


def ratio(runs: Runs, name: str, clock: str) -> list[float]:
    """Return the throughput of a variant relative to the first one, by round."""
    base = next(iter(runs.values()))
    return [seconds_of(none, clock) / seconds_of(one, clock) for none, one in zip(base, runs[name], strict=True)]


def recomputed(taken: Sequence[Took]) -> float:
    """Return the share of candidates that were computed again: median over rounds."""
    return median(one.counters.recomputed_tokens / one.tokens for one in taken)


def verified_table(runs: Runs, clock: str) -> str:
    """Return a line per variant. The first one is the baseline, round by round."""
    rows = []
    for name, taken in runs.items():
        shares, tokens = ratio(runs, name, clock), [one.tokens / seconds_of(one, clock) for one in taken]
        rows.append(
            [
                name,
                f"{median(tokens):,.0f}",
                f"{median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})",
                f"{median(one.counters.verify_passes for one in taken):.0f}",
                f"{median(one.counters.rollbacks for one in taken):.0f}",
                f"{recomputed(taken):.2%}",
            ]
        )
    header = ["", f"tokens/s ({clock})", "of 0 % (spread)", "verify passes", "rollbacks", "recomputed"]
    return markdown(header, rows)


def paper_table(measured: Mapping[str, Runs], clock: str) -> str:
    """Return throughput by share, relative to none: of the paper's workloads, then of each model here."""
    rows = [[name, *(f"{value:.2f}" for value in values)] for name, values in PAPER.items()]
    for model, runs in measured.items():
        by_share = {f"{name.partition(',')[0]}": median(ratio(runs, name, clock)) for name in runs}
        rows.append([model, *(f"{by_share[key]:.2f}" if key in by_share else "-" for key in _names())])
    return markdown(["", *_names()], rows)


def worst(measured: Mapping[str, Runs], clock: str) -> dict[str, float]:
    """Return the figures that other programs use: of each, the worst model's."""
    found: dict[str, float] = {}
    for runs in measured.values():
        for name in runs:
            key = f"verify_throughput_{name.partition('%')[0]}"
            if key in KEYS:
                value = round(median(ratio(runs, name, clock)), 4)
                found[key] = min(found.get(key, value), value)
            if name.startswith("100%"):
                again = round(recomputed(runs[name]), 4)
                found[KEYS[-1]] = max(found.get(KEYS[-1], again), again)
    return found


def _names() -> list[str]:
    return [f"{share:.0%}" for share in SHARES]
