"""A plot of a run's samples: distributions of latencies, and latencies over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from baton.bench.sample import Goals, Sample

SLOTS = 60  # of the throughput panel


def plot(samples: Sequence[Sample], goals: Goals, path: Path) -> None:
    """Write four panels; the suffix of `path` selects the file format. Raises OSError if the file cannot be written."""
    good = [sample for sample in samples if not sample.error and sample.times]
    origin = min(sample.start for sample in samples)
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    panels = figure.subplots(2, 2)
    _shares(panels[0][0], "TTFT", [sample.ttft_s for sample in good], goals.ttft_ms)
    _shares(panels[0][1], "ITL", [gap for sample in good for gap in sample.gaps_s], goals.gap_ms)
    _timeline(panels[1][0], samples, good, origin)
    _throughput(panels[1][1], samples, origin)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _shares(axes: Any, name: str, seconds: Sequence[float], goal_ms: float | None) -> None:
    """Draw the share of values up to each latency."""
    if seconds:
        axes.ecdf([value * 1e3 for value in seconds])
        axes.set_xscale("log")
    if goal_ms is not None:
        axes.axvline(goal_ms, color="tab:red", linewidth=0.8, linestyle="--")
    for share in (0.5, 0.99):
        axes.axhline(share, color="gray", linewidth=0.5, linestyle=":")
    _label(axes, f"{name}: share within", "ms", "")


def _timeline(axes: Any, samples: Sequence[Sample], good: Sequence[Sample], origin: float) -> None:
    axes.scatter([one.start - origin for one in good], [one.ttft_s * 1e3 for one in good], s=6, label="TTFT")
    slowest = [max(one.gaps_s, default=0.0) * 1e3 for one in good]
    axes.scatter([one.start - origin for one in good], slowest, s=6, marker="x", linewidth=0.6, label="longest ITL")
    failed = [one.start - origin for one in samples if one.error]
    if failed:
        axes.plot(
            failed, [0.02] * len(failed), "|", color="tab:red", transform=axes.get_xaxis_transform(), label="failed"
        )
    if good:
        axes.set_yscale("log")
    axes.legend(fontsize=7, frameon=False)
    _label(axes, "each request", "was to be sent at, s", "ms")


def _throughput(axes: Any, samples: Sequence[Sample], origin: float) -> None:
    """Draw messages with tokens per second, and the number of requests in flight."""
    span = max(sample.end for sample in samples) - origin
    width = max(span / SLOTS, 1e-9)
    middles = [(slot + 0.5) * width for slot in range(SLOTS)]
    counts = [0] * SLOTS
    for time in (time for sample in samples for time in sample.times):
        counts[min(SLOTS - 1, int((time - origin) / width))] += 1
    axes.plot(middles, [count / width for count in counts], label="token messages/s")
    other = axes.twinx()
    sent = [sample for sample in samples if sample.sent is not None]
    under_way = [sum(one.start <= origin + at < one.end for one in sent) for at in middles]
    other.plot(middles, under_way, color="tab:orange", linewidth=0.8)
    other.set_ylabel("requests under way", fontsize=8, color="tab:orange")
    other.tick_params(labelsize=7)
    _label(axes, "throughput", "s", "token messages/s")


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
