"""The output of `baton bench`: progress on a terminal, the report, its files and the plot.

Progress is drawn rarely, because it takes time of the process that measures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from baton.bench.report import report, table
from baton.bench.requests import Load
from baton.bench.runner import Run
from baton.bench.sample import Goals, percentile
from baton.bench.targets import Server
from baton.clock import SystemClock
from baton.errors import ConfigError

EACH_S = 0.5
LAST = 200  # number of recent requests in the progress line


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
    parts = [f"{len(run.samples) - failed} done", f"{run.under_way} under way", f"{failed} failed"]
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

    def give(self, run: Run, goals: Goals) -> None:
        """Write the report of all samples so far. Raises ConfigError last if a file cannot be written."""
        found = report(run.samples, goals, run.load.plan.plain(), run.own())
        typer.echo(json.dumps(found) if self.as_json else table(found))
        wrong = [
            *_tried("--out", self.out, lambda path: _write(found, run, path)),
            *_tried("--plot", self.picture, lambda path: _draw(run, goals, path)),
        ]
        if wrong:
            raise ConfigError("; ".join(wrong))


def _tried(option: str, path: Path | None, write: Callable[[Path], None]) -> list[str]:
    """Write the file of an option, if given, and return its errors."""
    try:
        if path is not None:
            write(path)
    except OSError as error:
        return [f"{option}: cannot write {path}: {error.strerror or error}"]
    return []


def _write(found: Mapping[str, Any], run: Run, path: Path) -> None:
    origin = min(sample.start for sample in run.samples)
    samples = [sample.plain(origin) for sample in run.samples]
    path.write_text(json.dumps({**found, "samples": samples}) + "\n")


def _draw(run: Run, goals: Goals, path: Path) -> None:
    from baton.bench.plot import plot

    plot(run.samples, goals, path)


def bench(server: Server, load: Load, goals: Goals, output: Output) -> None:
    """Run the load; report even after Ctrl-C. Raises ConfigError without requests, the last error if none succeeded."""
    screen = ExitStack()
    run = Run(server, load, SystemClock(), screen.enter_context(shown()))
    try:
        with screen:
            uvloop.run(run.whole())
    finally:
        if run.samples:  # after the screen is cleared, because the report starts on its last line
            output.give(run, goals)
    if not run.samples:
        raise ConfigError(f"--duration: no request is due within {load.plan.duration:g} s")
    if run.failure is not None and all(sample.error for sample in run.samples):
        raise run.failure
