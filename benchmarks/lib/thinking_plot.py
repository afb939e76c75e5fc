"""Plot of the accuracy and speed of a model that thinks. It needs matplotlib, which is no dependency of Baton."""

from __future__ import annotations

import importlib.util
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.lib.thinking_figures import ALONE, AUTO, FAST, SEQUENTIAL

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.lib.thinking_figures import Measured

TRAINED = 10  # flips per story


def plot(measured: Measured, path: Path) -> bool:
    """Write both panels in the format of the suffix of `path`. Returns False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _accuracy(left, measured)
    _speed(right, measured)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return True


def _accuracy(axes: Any, measured: Measured) -> None:
    for who, scores in measured.scores.items():
        axes.plot(scores.keys(), [100 * s.right / s.of for s in scores.values()], marker="o", markersize=4, label=who)
    axes.axvspan(0, TRAINED, color="0.9", label="flips in training")
    axes.axhline(50, color="0.6", linestyle=":", linewidth=1)  # guessing
    axes.set_xlim(left=0)
    axes.set_ylim(0, 104)
    axes.set_xlabel("flips", fontsize=8)
    axes.set_ylabel("right answers, %", fontsize=8)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, frameon=False, loc="lower right")


def _speed(axes: Any, measured: Measured) -> None:
    """Plot the speed relative to mode sequential."""
    cases = [case for case in measured.runs if case.way == ALONE]
    for number, mode in enumerate((FAST, AUTO)):
        heights = [median(measured.ratios(case, mode, SEQUENTIAL)) for case in cases]
        axes.bar([place + 0.4 * (number - 0.5) for place in range(len(cases))], heights, 0.4, label=mode)
    axes.axhline(1, color="0.4", linewidth=1, label="sequential")
    labels = [f"{case.load.flips}\n{'filler' if case.load.filler else 'dense'}" for case in cases]
    axes.set_xticks(range(len(cases)), labels, fontsize=7)
    axes.set_xlabel("flips, each prompt alone", fontsize=8)
    axes.set_ylabel("speed of prefill, sequential = 1", fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=7, frameon=False)
