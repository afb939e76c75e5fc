"""Benefit and cost of thinking: answers, forwards and the time of prompts.

    python benchmarks/thinking.py --quick           under 3 minutes on one core
    python benchmarks/thinking.py                   under 15: more prompts and rounds, and a sweep
    python benchmarks/thinking.py --models FOLDER --write-docs   fill docs/measurements/thinking.md

One engine per mode of `thinking.prefill` runs the model of `--model` in this process, on one thread, greedily and
without a prefix cache. Stories are new (`--seed`); the model was trained on at most 10 flips.
- Answers: only a completely right answer counts. Thinking is mode auto, and mode off is the same model without its
  thinking block.
- Three ways: thinking states, a chain of thought in text, or neither, on three tasks. `--models` has the trained models
  in folders TASK-KIND, as `models/train_all.py` writes them. The others are named in the tables as not trained.
- Modes fast and auto must give the tokens and thoughts of mode sequential. Mode fast without a limit must take one
  forward per non-empty thought with a part of the prompt after it, plus one. Otherwise the program fails at its end.
- Time: in each round every mode runs every load, in a new order. Ratios are within a round, and the tables have their
  median and spread.
The last line of stdout is one JSON object with the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `python benchmarks/thinking.py`

import torch

from baton.logs import configure_logging
from benchmarks.lib import thinking_tasks, thinking_tasks_table
from benchmarks.lib.protocol import ROOT
from benchmarks.lib.report import write_section
from benchmarks.lib.thinking_figures import AUTO, FAST, NONE, OFF, SEQUENTIAL, THINKS, Measured, figures
from benchmarks.lib.thinking_measure import Plan, measure_accuracy, measure_agreement, measure_speed
from benchmarks.lib.thinking_plot import plot
from benchmarks.lib.thinking_run import engine_of
from benchmarks.lib.thinking_table import tables
from benchmarks.lib.thinking_tasks import compare, found_in

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME, PAGE, PICTURE = "thinking", "measurements/thinking.md", "thinking.svg"
QUICK, FULL = Plan(40, 100, 4, 3), Plan(200, 500, 5, 5, (4, 8, 16, 32, 64))
LEAST = Plan(2, 4, 1, 1)


def measure(model: Path, plan: Plan, seed: int) -> Measured:
    """Run the parts about models/coin."""
    measured = Measured()
    engines = {mode: engine_of(model, mode) for mode in (SEQUENTIAL, FAST, AUTO, NONE)}
    measure_accuracy({THINKS: engines[AUTO], OFF: engines[NONE]}, plan.stories, seed, measured)
    measure_agreement(engines, plan.agreed, seed, measured)
    measure_speed(engines, plan, seed, measured)
    return measured


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer prompts and rounds, no sweep")
    parser.add_argument("--least", action="store_true", help="a few prompts: to try the program, not to measure")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "coin", help="folder of a model that thinks")
    parser.add_argument("--models", type=Path, help="folder of the models of the three ways, from models/train_all.py")
    parser.add_argument(
        "--seed",
        type=int,
        default=41,
        help="of all stories and prompts; others than those of models/",
    )
    parser.add_argument(
        "--write-docs", action="store_true", help="put tables and picture into docs/measurements/thinking.md"
    )
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Measure, print, and fill the section of the page if requested. Exits with status 1 if modes disagree."""
    args = parse(argv)
    configure_logging("warning", "auto")
    torch.set_num_threads(1)
    plan, load = LEAST if args.least else QUICK if args.quick else FULL, os.getloadavg()[0]
    measured = measure(args.model, plan, args.seed)
    found = found_in(args.models, args.model)
    compared = compare(found, plan.stories, plan.prompts, plan.rounds, args.seed)
    facts = f"Seed {args.seed}, {plan.prompts} prompts of each load in {plan.rounds} rounds."
    shown = "\n\n".join([facts, tables(measured), thinking_tasks_table.tables(compared)])
    print(shown)
    if args.write_docs:
        drawn = plot(measured, ROOT / "docs/measurements" / PICTURE)
        told = [
            Path(word).name if Path(word) in {args.model, args.models} else word for word in argv
        ]  # no private paths
        picture = [f"![Answers and speed of prompts]({PICTURE})", ""] * drawn
        write_section(PAGE, NAME, told, load, "\n".join([*picture, shown]))
    print(json.dumps({"benchmark": NAME, "ratios": {**figures(measured), **thinking_tasks.figures(compared)}}))
    if not all(agreement.full for agreement in measured.agreements.values()):
        sys.exit("the modes disagree, or took other numbers of forwards than predicted")


if __name__ == "__main__":
    main(sys.argv[1:])
