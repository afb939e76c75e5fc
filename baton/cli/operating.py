"""`baton scale | drain | restart | trace`: what operators say to a running cluster, and how they wait for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options import AdminTarget, ClusterName, Json, Tls
from baton.core import sizes_text

if TYPE_CHECKING:
    from baton.cli.operate import Operator

Wait = Annotated[float, typer.Option("--wait", min=0, help="until it is done, for at most so many seconds")]


def scale(
    sizes: Annotated[list[str], typer.Argument(help="such as prefill=2 decode=3")],
    wait: Wait = 0.0,
    name: ClusterName = None,
    target: AdminTarget = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Say how many workers each pool should have. Surplus ones are turned, or finish what they have and end."""
    from baton.cli.operate import parse_sizes

    wanted = parse_sizes(sizes)
    operator = _operator(name, target, tls)
    plan = operator.scale(wanted)
    if wait:
        operator.wait_settled(plan.number, wait)
    said = {"prefill": plan.prefill, "decode": plan.decode}
    _say(said, f"workers are to be {sizes_text(plan.prefill, plan.decode)}", as_json, done=bool(wait))


def drain(
    worker: Annotated[str, typer.Argument(help="its name in `baton status`")] = "",
    here: Annotated[
        bool, typer.Option("--here", help="all workers of this host instead, at once: it is about to go away")
    ] = False,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="with --here: the cluster file, which names the Redis")
    ] = None,
    wait: Wait = 0.0,
    name: ClusterName = None,
    target: AdminTarget = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """A worker takes nothing new, finishes what it has and ends; another takes its place."""
    if here is not (worker == "") or here is not (config is not None):
        raise typer.BadParameter("say either a WORKER, or --here -c FILE")
    if config is not None:
        from baton.cli.operate import drain_here

        told = drain_here(config, wait)
        _say({"workers": told}, f"told to drain: {', '.join(told) or 'none is here'}", as_json, done=bool(wait))
        return
    operator = _operator(name, target, tls)
    process = operator.drain(worker)
    if wait:
        operator.wait_gone(process, wait)
    _say({"worker": process}, f"{process} drains", as_json, done=bool(wait))


def restart(
    wait: Wait = 0.0,
    name: ClusterName = None,
    target: AdminTarget = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Replace every worker by a new process, one after the other; no request fails for that."""
    operator = _operator(name, target, tls)
    plan = operator.restart()
    if wait:
        operator.wait_settled(plan.number, wait)
    text = f"all workers are replaced, generation {plan.generation}"
    _say({"generation": plan.generation}, text, as_json, done=bool(wait))


def trace(
    request: Annotated[str, typer.Argument(help="a request id (default: the last one)")] = "",
    out: Annotated[Path | None, typer.Option(help="write a file for ui.perfetto.dev")] = None,
    name: ClusterName = None,
    target: AdminTarget = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Show where the time of one of the last requests went, in the router and in its workers."""
    from baton.cli import trace as command

    command.trace(request, name, target, tls, out, as_json=as_json)


def _operator(name: str | None, target: str | None, tls: Path | None) -> Operator:
    from baton.cli.operate import Operator

    return Operator.find(name, target, tls)


def _say(facts: Mapping[str, object], text: str, as_json: bool, *, done: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**facts, "done": done}))
        return
    typer.echo(text + (": done" if done else "; `baton status` shows how far it is"))
