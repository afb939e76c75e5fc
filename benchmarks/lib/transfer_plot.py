"""Plots of measured transfers. They need matplotlib, which is no dependency of Baton."""

from __future__ import annotations

import importlib.util
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.lib.transfer_figures import OURS, RAW, Figures, Prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.lib.transfer_figures import FrameTimes

MIB = 1 << 20


def plot(figures: Figures, path: Path) -> bool:
    """Plot speed by size, and the exposed transfer's share of two latencies. Returns False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    speed, first, second = figure.subplots(1, 3)
    _speeds(speed, figures)
    _shares(first, figures, lambda prompt: prompt.of_first, "exposed transfer / time to first token")
    _shares(second, figures, lambda prompt: prompt.of_second, "exposed transfer in time to second token")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return True


def plot_timeline(frames: Sequence[FrameTimes], path: Path) -> bool:
    """Plot when each frame was ready, sent and in its blocks. Returns False without matplotlib or frames."""
    if importlib.util.find_spec("matplotlib") is None or not frames:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    ready, sent, landed = zip(*((1e3 * f.ready_s, 1e3 * f.sent_s, 1e3 * f.landed_s) for f in frames), strict=True)
    rows = range(len(frames))
    axes.hlines(rows, ready, landed, color="0.7", linewidth=1)
    for times, label, marker in ((ready, "ready", "|"), (sent, "sent", "."), (landed, "in its blocks", ">")):
        axes.plot(times, rows, marker, label=label, markersize=6)
    axes.invert_yaxis()
    axes.set_xlabel("ms since the prompt came")
    axes.set_ylabel("frame")
    axes.legend(frameon=False)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    return True


def _speeds(axes: Any, figures: Figures) -> None:
    for way in [way for way in figures.ways if way.kind in {OURS, RAW}]:
        points = [(size / MIB, median(rates) / 1e9) for size in figures.sizes if (rates := figures.rates(way, size))]
        style = "--" if way.kind == RAW else "-"
        axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=str(way))
    axes.set_xscale("log", base=2)
    _labelled(axes, "KV, MiB", "GB/s")


def _shares(axes: Any, figures: Figures, value: Callable[[Prompt], float], title: str) -> None:
    lengths = sorted({prompt.tokens for prompt in figures.prompts})
    for transport, streams in dict.fromkeys((p.transport, p.streams) for p in figures.prompts):
        found = [(n, figures.middle(transport, n, value, streams=streams)) for n in lengths]
        points = [(n, share * 100) for n, share in found if share is not None]
        label = f"{transport}, {'layer by layer' if streams else 'all at the end'}"
        axes.plot(*zip(*points, strict=True), "-" if streams else "--", marker="o", markersize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title(title, fontsize=9)
    _labelled(axes, "prompt, tokens", "%")


def _labelled(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False)
