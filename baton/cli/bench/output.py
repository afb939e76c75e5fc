"""From a plan to its report: printed, written, drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import uvloop

from baton.cli.bench.plan import Load
from baton.cli.bench.progress import shown
from baton.cli.bench.report import report, table
from baton.cli.bench.run import Run
from baton.cli.bench.sample import Goals
from baton.cli.bench.servers import Server
from baton.clock import SystemClock
from baton.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Output:
    """Where the report goes, beside stdout."""

    as_json: bool
    out: Path | None
    picture: Path | None

    def give(self, run: Run, goals: Goals) -> None:
        """What was seen until now. Raises ConfigError for a file that cannot be written, when all else is done."""
        found = report(run.samples, goals, run.load.plan.plain(), run.own())
        typer.echo(json.dumps(found) if self.as_json else table(found))
        wrong = [
            *_tried("--out", self.out, lambda path: _write(found, run, path)),
            *_tried("--plot", self.picture, lambda path: _draw(run, goals, path)),
        ]
        if wrong:
            raise ConfigError("; ".join(wrong))


def _tried(option: str, path: Path | None, write: Callable[[Path], None]) -> list[str]:
    """Write the file of an option that is given; what is wrong with it, if something is."""
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
    from baton.cli.bench.plot import plot

    plot(run.samples, goals, path)


def bench(server: Server, load: Load, goals: Goals, output: Output) -> None:
    """Run the load and give the report, also of what Ctrl-C leaves. Raises the last error if no request succeeded, and
    ConfigError if there was none.
    """
    screen = ExitStack()
    run = Run(server, load, SystemClock(), screen.enter_context(shown()))
    try:
        with screen:
            uvloop.run(run.whole())
    finally:
        if run.samples:  # when the screen is cleared: the report begins where its last line was
            output.give(run, goals)
    if not run.samples:
        raise ConfigError(f"--duration: no request is due within {load.plan.duration:g} s")
    if run.failure is not None and all(sample.error for sample in run.samples):
        raise run.failure
