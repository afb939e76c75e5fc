"""`baton scale | drain | restart`: changes of a running cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.options import AdminTarget, ClusterName, Json, Tls
from baton.core import sizes_text

if TYPE_CHECKING:
    from baton.cli.cluster.operator import Operator

POOLS = ("prefill", "decode")

Here = Annotated[bool, typer.Option("--here", help="all workers of this host, because the host will be shut down")]
Wait = Annotated[float, typer.Option("--wait", min=0, help="seconds to wait for completion; 0 means not to wait")]


def scale(
    sizes: Annotated[list[str], typer.Argument(metavar="POOL=N", help="such as prefill=2 decode=3")],
    wait: Wait = 0.0,
    name: ClusterName = None,
    target: AdminTarget = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Set the number of workers of each pool. Surplus workers change their role, or finish their requests and end."""
    wanted = parse_sizes(sizes)
    operator = _operator(name, target, tls)
    plan = operator.scale(wanted)
    if wait:
        operator.wait_settled(plan.number, wait)
    result = {"prefill": plan.prefill, "decode": plan.decode}
    _print(result, f"planned workers: {sizes_text(plan.prefill, plan.decode)}", as_json, done=bool(wait))


def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="the worker's name in `baton status`")] = "",
    here: Here = False,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="with --here: the cluster file, for its redis.url")
    ] = None,
    wait: Wait = 0.0,
    name: ClusterName = None,
    target: AdminTarget = None,
    tls: Tls = None,
    as_json: Json = False,
) -> None:
    """Replace a worker: it accepts no new requests, finishes its present ones and ends."""
    if here is not (worker == "") or here is not (config is not None):
        raise typer.BadParameter("must have either WORKER, or --here -c FILE")
    if config is not None:
        from baton.cli.cluster.operator import drain_here

        drained = drain_here(config, wait)
        _print({"workers": drained}, f"draining: {', '.join(drained) or 'no worker here'}", as_json, done=bool(wait))
        return
    operator = _operator(name, target, tls)
    process = operator.drain(worker)
    if wait:
        operator.wait_gone(process, wait)
    _print({"worker": process}, f"{process} drains", as_json, done=bool(wait))


def restart(
    wait: Wait = 0.0, name: ClusterName = None, target: AdminTarget = None, tls: Tls = None, as_json: Json = False
) -> None:
    """Replace each worker by a new process, one after the other. No request fails because of that."""
    operator = _operator(name, target, tls)
    plan = operator.restart()
    if wait:
        operator.wait_settled(plan.number, wait)
    text = f"replacing all workers, generation {plan.generation}"
    _print({"generation": plan.generation}, text, as_json, done=bool(wait))


def parse_sizes(words: Sequence[str]) -> dict[str, int]:
    """Parse `prefill=2 decode=3`. Raises BadParameter (exit code 2) with the wrong word."""
    sizes: dict[str, int] = {}
    for word in words:
        pool, _, size = word.partition("=")
        if pool not in POOLS or not (size.isascii() and size.isdecimal()) or pool in sizes:
            raise typer.BadParameter(f"{word!r}: must be prefill=N or decode=N, each once, such as prefill=2 decode=3")
        sizes[pool] = int(size)
    return sizes


def _operator(name: str | None, target: str | None, tls: Path | None) -> Operator:
    from baton.cli.cluster.operator import Operator
    from baton.cli.target import Admins

    return Operator(Admins.find(name, target, tls))


def _print(facts: Mapping[str, object], text: str, as_json: bool, *, done: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**facts, "done": done}))
        return
    typer.echo(text + (": done" if done else "; `baton status` shows the progress"))
