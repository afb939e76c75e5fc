"""Plot of latencies and goodput against rate. It needs matplotlib, which is no dependency of Baton."""

from __future__ import annotations

import importlib.util
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.lib.disagg_figures import attainment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.lib.disagg_figures import Phase, Slo


def plot(phases: Sequence[Phase], slo: Slo, path: Path) -> bool:
    """Write four panels in the format of the suffix of `path`. Returns False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    panels = figure.subplots(2, 2).flat
    for axes, (label, value, goal) in zip(panels, _panels(slo), strict=True):
        _panel(axes, phases, value)
        axes.set_ylabel(label, fontsize=8)
        axes.set_xlabel("requests/s", fontsize=8)
        if goal is not None:
            axes.axhline(goal, color="0.4", linestyle=":", linewidth=1, label="SLO")
            axes.set_yscale("log")
        axes.legend(fontsize=7, frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return True


def _panels(slo: Slo) -> list[tuple[str, Callable[[Phase], float], float | None]]:
    return [
        ("TTFT p50, ms", lambda phase: phase.ttft(0.5) * 1e3, slo.ttft_s * 1e3),
        ("ITL p50, ms", lambda phase: phase.itl(0.5) * 1e3, slo.itl_s * 1e3),
        ("ITL p99, ms", lambda phase: phase.itl(0.99) * 1e3, slo.itl_s * 1e3),
        ("share of requests within the SLO", lambda phase: attainment([phase], slo), None),
    ]


def _panel(axes: Any, phases: Sequence[Phase], value: Callable[[Phase], float]) -> None:
    """Plot the median of the rounds, and a band between their extremes."""
    for side in dict.fromkeys(phase.side for phase in phases):
        rates = sorted({phase.rate for phase in phases if phase.side == side})
        found = [[value(phase) for phase in phases if (phase.side, phase.rate) == (side, rate)] for rate in rates]
        (line,) = axes.plot(rates, [median(values) for values in found], marker="o", markersize=4, label=side)
        axes.fill_between(rates, [*map(min, found)], [*map(max, found)], color=line.get_color(), alpha=0.15)
    axes.grid(alpha=0.3)
