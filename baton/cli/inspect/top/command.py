"""`baton top`: its options."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from baton.cli.options import AdminTarget, ClusterName, Tls

Interval = Annotated[float, typer.Option("--interval", min=0.1, max=60, help="seconds between two updates")]


def top(name: ClusterName = None, target: AdminTarget = None, tls: Tls = None, interval: Interval = 1.0) -> None:
    """Show a live view of the cluster in this terminal. Set BATON_TOKEN to an admin's token if it has tokens."""
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise typer.BadParameter("needs a terminal; `baton status --watch` does not")
    from baton.cli.inspect.top.app import run_top

    run_top(name, target, tls, interval)
