"""What a terminal shows while a load runs. It is drawn seldom: it takes time of the process that measures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from baton.cli.bench.run import Run
from baton.cli.bench.sample import percentile

EACH_S = 0.5
LAST = 200  # requests that the figures on the line are of


@contextmanager
def shown() -> Iterator[Callable[[Run], None]]:
    """Gives what a run calls to be shown: on stderr, and only if that is a terminal."""
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
    """Counts so far, and what the last requests were like."""
    last = [sample for sample in run.samples[-LAST:] if sample.times]
    failed = sum(bool(sample.error) for sample in run.samples)
    parts = [f"{len(run.samples) - failed} done", f"{run.under_way} under way", f"{failed} failed"]
    if last:
        parts.append(f"TTFT p50 {percentile(sorted(sample.ttft_s * 1e3 for sample in last), 50):.0f} ms")
    if gaps := sorted(gap * 1e3 for sample in last for gap in sample.gaps_s):
        parts.append(f"ITL p99 {percentile(gaps, 99):.0f} ms")
    return ", ".join(parts)
