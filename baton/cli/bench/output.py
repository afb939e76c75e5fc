"""From a plan to its report: printed, written, drawn."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

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
        """What was seen until now. Raises OSError for a file that cannot be written, when all else is done."""
        found = report(run.samples, goals, run.load.plan.plain(), run.own())
        typer.echo(json.dumps(found) if self.as_json else table(found))
        if self.out is not None:
            origin = min(sample.start for sample in run.samples)
            samples = [sample.plain(origin) for sample in run.samples]
            self.out.write_text(json.dumps(found | {"samples": samples}) + "\n")
        if self.picture is not None:
            from baton.cli.bench.plot import plot

            plot(run.samples, goals, self.picture)


def bench(server: Server, load: Load, goals: Goals, output: Output) -> None:
    """Run the load and give the report, also of what Ctrl-C leaves. Raises the last error if no request succeeded, and
    ConfigError if there was none.
    """
    with shown() as show:
        run = Run(server, load, SystemClock(), show)
        try:
            uvloop.run(run.whole())
        finally:
            if run.samples:
                output.give(run, goals)
    if not run.samples:
        raise ConfigError(f"--duration: no request is due within {load.plan.duration:g} s")
    if run.failure is not None and all(sample.error for sample in run.samples):
        raise run.failure
