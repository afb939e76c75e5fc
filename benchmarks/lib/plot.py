"""Plot of the tables. It needs matplotlib, which is no dependency of Baton."""

from __future__ import annotations

import importlib.util
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.lib.ratios import BATON, LIMIT, Measured
from benchmarks.lib.shapes import LABELS

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.lib.ratios import Setting


def plot(measured: Measured, path: Path) -> bool:
    """Write one panel per setting in the format of the suffix of `path`. Returns False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(setting.size for setting in measured.settings))
    threads = list(dict.fromkeys(setting.threads for setting in measured.settings))
    figure = Figure(figsize=(1.5 + 4.5 * len(threads), 1 + 2.6 * len(sizes)), layout="constrained")
    panels = figure.subplots(len(sizes), len(threads), squeeze=False)
    for setting in measured.settings:
        _panel(panels[sizes.index(setting.size)][threads.index(setting.threads)], measured, setting)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return True


def _panel(axes: Any, measured: Measured, setting: Setting) -> None:
    """Plot the speed of each engine as a share of the machine's limit at that point."""
    engines = [BATON, *measured.peers]
    width = 0.8 / len(engines)
    for number, engine in enumerate(engines):
        shares = [_share(measured, setting, engine, index) for index in range(len(measured.points))]
        places = [index + (number - (len(engines) - 1) / 2) * width for index in range(len(shares))]
        axes.bar(places, shares, width, label=engine)
    axes.set_xticks(range(len(measured.points)), [str(point) for point in measured.points], rotation=60, fontsize=7)
    axes.set_title(f"{LABELS[setting.size]}, {setting.threads} thread{'s' * (setting.threads > 1)}", fontsize=9)
    axes.set_ylabel("share of the limit", fontsize=8)
    axes.grid(axis="y", alpha=0.3)


def _share(measured: Measured, setting: Setting, engine: str, index: int) -> float:
    point = measured.points[index]
    seconds, least = (measured.seconds(setting, name, point) for name in (engine, LIMIT))
    return median(least) / median(seconds) if seconds and least else 0.0
