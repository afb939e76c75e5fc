"""`baton logs | top`: what goes on in a cluster, as its processes say it and as its routers see it."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from baton.cli.options import AdminTarget, ClusterName, Tls

Level = Literal["debug", "info", "warning", "error", "critical"]


def logs(
    name: Annotated[str | None, typer.Option("--name", help="the cluster's name, also of one that has ended")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="and what comes, until Ctrl-C")] = False,
    request: Annotated[str, typer.Option("--request", help="only lines about this request")] = "",
    worker: Annotated[str, typer.Option("--worker", help="only lines of or about this worker; or router")] = "",
    level: Annotated[Level, typer.Option("--level", help="and all above it")] = "debug",
    since: Annotated[str, typer.Option("--since", help="not older than 90s, 5m, 2h or 1d")] = "",
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", min=0, help="the last ones (default: 100; with --since: all)")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON lines, which is what a pipe gets anyway")] = False,
) -> None:
    """Show what the processes of a cluster that was started here say, by time."""
    import time

    from baton.cli import logs as command
    from baton.logs import LEVELS

    begin = time.time() - command.parse_age(since) if since else 0.0
    wanted = command.Wanted(request, worker, LEVELS[level.upper()], begin)
    command.logs(name, wanted, lines, follow=follow, as_json=as_json)


def top(
    name: ClusterName = None,
    target: AdminTarget = None,
    tls: Tls = None,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=60, help="seconds between two looks")] = 1.0,
) -> None:
    """A live view of the cluster in this terminal. BATON_TOKEN: an admin's token, if the cluster has tokens."""
    from baton.cli.top import top as command

    command(name, target, tls, interval)
