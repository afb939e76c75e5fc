"""`baton logs`: its options."""

from __future__ import annotations

import re
import time
from typing import Annotated, Literal

import typer

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

Level = Annotated[
    Literal["debug", "info", "warning", "error", "critical"], typer.Option("--level", help="lowest level shown")
]


def logs(
    name: Annotated[str | None, typer.Option("--name", help="the cluster's name; it may have ended")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="show new lines until Ctrl-C")] = False,
    request: Annotated[str, typer.Option("--request", help="only lines about this request")] = "",
    worker: Annotated[str, typer.Option("--worker", help="only lines of or about this worker, or of the router")] = "",
    level: Level = "debug",
    since: Annotated[str, typer.Option("--since", help="only lines since then, such as 90s, 5m, 2h or 1d ago")] = "",
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, help="number of last lines (default: 100; with --since all)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON lines (default in a pipe)")] = False,
) -> None:
    """Show the log lines of all processes of a cluster started here, by time."""
    from baton.cli.inspect.log_lines import LogFilter, print_logs
    from baton.logs import LEVELS

    begin = time.time() - parse_age(since) if since else 0.0
    print_logs(name, LogFilter(request, worker, LEVELS[level.upper()], begin), lines, follow=follow, as_json=as_json)


def parse_age(text: str) -> float:
    """Parse `90`, `90s`, `5m`, `2h` or `1d` to seconds. Raises BadParameter (exit code 2)."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r}: must be a number and s, m, h or d, such as 5m", param_hint="--since")
    return float(found[1]) * UNITS[found[2] or "s"]
