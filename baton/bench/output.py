"""The output of `baton bench`: progress on a terminal, the report, its files and the plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from baton.bench.report import report, table
from baton.bench.requests import Load
from baton.bench.runner import Run
from baton.bench.sample import Goals, Sample, percentile
from baton.bench.targets import Server
from baton.clock import SystemClock
from baton.errors import ConfigError

EACH_S = 0.5  # between two updates of the progress line; each takes time of the process that measures
LAST = 200  # number of recent requests in the progress line
SLOTS = 60  # of the plot's throughput panel


@contextmanager
def shown() -> Iterator[Callable[[Run], None]]:
    """Return a callback that shows a run's progress on stderr, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda run: None
        return
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task, next_s = progress.add_task("warming up", total=None), 0.0

        def show(run: Run) -> None:
            nonlocal next_s
            now = run.clock.monotonic()
            if now < next_s or run.began is None:
                return
            next_s = now + EACH_S
            by_time = run.load.count is None
            done = now - run.began if by_time else len(run.samples)
            total = run.load.plan.duration if by_time else run.load.count
            progress.update(task, completed=done, total=total, description=line(run), refresh=True)

        yield show


def line(run: Run) -> str:
    """Format counts so far, and latencies of the last requests."""
    last = [sample for sample in run.samples[-LAST:] if sample.times]
    failed = sum(bool(sample.error) for sample in run.samples)
    parts = [f"{len(run.samples) - failed} done", f"{run.in_flight} in flight", f"{failed} failed"]
    if last:
        parts.append(f"TTFT p50 {percentile(sorted(sample.ttft_s * 1e3 for sample in last), 50):.0f} ms")
    if gaps := sorted(gap * 1e3 for sample in last for gap in sample.gaps_s):
        parts.append(f"ITL p99 {percentile(gaps, 99):.0f} ms")
    return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Output:
    """The destinations of the report in addition to stdout."""

    as_json: bool
    out: Path | None
    picture: Path | None

    def write(self, run: Run, goals: Goals) -> None:
        """Write the report of all samples so far. Raises ConfigError last if a file cannot be written."""
        found = report(run.samples, goals, run.load.plan.as_dict(), run.generator())
        typer.echo(json.dumps(found) if self.as_json else table(found))
        write_out, draw = partial(_write, found, run), partial(plot, run.samples, goals)
        failures = []
        for option, path, write in (("--out", self.out, write_out), ("--plot", self.picture, draw)):
            try:
                if path is not None:
                    write(path)
            except OSError as error:
                failures.append(f"{option}: cannot write {path}: {error.strerror or error}")
        if failures:
            raise ConfigError("; ".join(failures))


def _write(found: Mapping[str, Any], run: Run, path: Path) -> None:
    origin = min(sample.start for sample in run.samples)
    samples = [sample.as_dict(origin) for sample in run.samples]
    path.write_text(json.dumps({**found, "samples": samples}) + "\n")


def plot(samples: Sequence[Sample], goals: Goals, path: Path) -> None:
    """Write four panels; the suffix of `path` selects the file format. Raises OSError if the file cannot be written."""
    from matplotlib.figure import Figure  # an extra

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
        place = axes.get_xaxis_transform()
        axes.plot(failed, [0.02] * len(failed), "|", color="tab:red", transform=place, label="failed")
    if good:
        axes.set_yscale("log")
    axes.legend(fontsize=7, frameon=False)
    _label(axes, "each request", "was to be sent at, s", "ms")


def _throughput(axes: Any, samples: Sequence[Sample], origin: float) -> None:
    span = max(sample.end for sample in samples) - origin
    width = max(span / SLOTS, 1e-9)
    middles = [(slot + 0.5) * width for slot in range(SLOTS)]
    counts = [0] * SLOTS
    for time in (time for sample in samples for time in sample.times):
        counts[min(SLOTS - 1, int((time - origin) / width))] += 1
    axes.plot(middles, [count / width for count in counts], label="token messages/s")
    other = axes.twinx()
    sent = [sample for sample in samples if sample.sent is not None]
    in_flight = [sum(one.start <= origin + at < one.end for one in sent) for at in middles]
    other.plot(middles, in_flight, color="tab:orange", linewidth=0.8)
    other.set_ylabel("requests in flight", fontsize=8, color="tab:orange")
    other.tick_params(labelsize=7)
    _label(axes, "throughput", "s", "token messages/s")


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)


def run_bench(server: Server, load: Load, goals: Goals, output: Output) -> None:
    """Run the load; report even after Ctrl-C. Raises ConfigError without requests, the last error if none succeeded."""
    screen = ExitStack()
    run = Run(server, load, SystemClock(), screen.enter_context(shown()))
    try:
        with screen:
            uvloop.run(run.execute())
    finally:
        if run.samples:  # after the screen is cleared, because the report starts on its last line
            output.write(run, goals)
    if not run.samples:
        raise ConfigError(f"--duration: no request is due within {load.plan.duration:g} s")
    if run.failure is not None and all(sample.error for sample in run.samples):
        raise run.failure
