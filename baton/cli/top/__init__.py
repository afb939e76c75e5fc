"""`baton top`: the live page in a terminal, over `Admin.Watch`."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import typer

from baton.cli.operate import Operator
from baton.cli.top.app import Top
from baton.cli.top.feed import Feed


def top(name: str | None, target: str | None, tls: Path | None, interval_s: float) -> None:
    """Show it until the user leaves. Raises BatonError when there is no cluster, or it will not be watched by us."""
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise typer.BadParameter("needs a terminal; `baton status --watch` does not")
    find = partial(Operator.find, name, target, tls)
    find()  # before the screen is taken: who names no cluster is told so
    failure = Top(Feed(find, interval_s)).run()
    if failure is not None:
        raise failure
