"""Tables of thinking states against a chain of thought, with the figures of the paper (arXiv 2602.08332)."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from benchmarks.lib.report import markdown
from benchmarks.lib.thinking_tasks import ANSWER, COT, THINKING
from models.tasks.registry import KINDS, LENGTHS, TASKS

if TYPE_CHECKING:
    from benchmarks.lib.thinking_tasks import Compared, Timing

TITLES = {THINKING: "thinking states", COT: "chain of thought", ANSWER: "neither"}
MISSING = "not trained"
# Right answers in %: thinking states, chain of thought, neither. Models are Qwen2.5-Base, .5B for the first three rows
# and 1.5B for the others. State tracking is trained on at most N steps and tested on up to 100.
PAPER = {
    "parity, N = 40": (100.0, 64.38, 59.60),
    "variables, N = 10": (33.76, 6.78, 2.15),
    "variables, N = 40": (97.71, 87.75, 2.19),
    "two-hop, full knowledge": (54.91, 54.79, 33.47),
    "two-hop, parametric": (43.05, 43.07, 31.92),
    "GSM8K": (42.22, 60.50, 34.11),
}
PAPER_SPEEDUP = {"two-hop, full knowledge": 1.19, "two-hop, parametric": 1.23, "GSM8K": 2.66}


def tables(compared: Compared) -> str:
    """Return all tables with their titles."""
    parts = {
        "Three ways, right answers of models trained on at most 10 steps": accuracy(compared),
        "Three ways, time to the end of the answer": speed(compared),
        "Figures of the paper, in % (other models, other tests: not comparable by value)": paper(),
    }
    return "\n\n".join(f"**{title}**\n\n{text}" for title, text in parts.items())


def accuracy(compared: Compared) -> str:
    """Return a line per task and kind."""
    lengths = (2, *LENGTHS)
    rows = []
    for task in TASKS:
        for kind in KINDS:
            scores = compared.scores.get((task, kind))
            cells = [MISSING] + [""] * (len(lengths) - 1)
            if scores is not None:
                cells = [f"{scores[n].right / scores[n].of:.1%}" if n in scores else "" for n in lengths]
            rows.append([f"{task}: {TITLES[kind]}", *cells])
    return markdown(["steps", *map(str, lengths)], rows)


def speed(compared: Compared) -> str:
    """Return a line per task, number of steps and way. Ratios are within a round, with their spread."""
    header = ["", *(f"{TITLES[kind]}, ms (tokens)" for kind in KINDS), "thinking states, times faster than the chain"]
    return markdown(header, [_line(compared, timing) for timing in compared.seconds])


def paper() -> str:
    """Return the figures of the paper."""
    rows = [
        [name, *(f"{value:.2f}" for value in values), f"{PAPER_SPEEDUP[name]:.2f}" if name in PAPER_SPEEDUP else ""]
        for name, values in PAPER.items()
    ]
    return markdown(["", *(TITLES[kind] for kind in KINDS), "times faster than the chain"], rows)


def _line(compared: Compared, timing: Timing) -> list[str]:
    cells = []
    for kind in KINDS:
        written = compared.written.get((timing.task, timing.steps, kind))
        cells.append(MISSING if written is None else f"{compared.milliseconds(timing, kind):,.1f} ({written:.0f})")
    if COT not in compared.seconds[timing]:
        return [str(timing), *cells, ""]
    ratios = compared.ratios(timing, COT)
    return [str(timing), *cells, f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]
