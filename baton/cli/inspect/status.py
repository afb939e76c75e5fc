"""`baton status`: the cluster as its routers report it."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from baton.cli.credentials import Target, find_reach
from baton.cli.up import find_cluster
from baton.client import Client
from baton.client.types import ClusterStatus, Control, WorkerStatus
from baton.core import sizes_text
from baton.errors import BatonError, NoWorker
from baton.rpc.channel import from_here

COLUMNS = (
    "worker",
    "role",
    "state",
    "address",
    "metrics",
    "pid",
    "running",
    "waiting",
    "prefill tok",
    "decode steps",
    "KV moved",
    "blocks",
    "channels",
)
SILENT_S = 5.0
LATEST = 5  # decisions shown
WATCH_S = 1.0


def status(name: str | None, target: str | None, tls: Path | None = None, *, as_json: bool) -> None:
    """Print the status. `target` is a router's admin address. Raises NoWorker if no router answers."""
    running = None if target else find_cluster(name)
    reach = find_reach(running, tls)
    admins = [from_here(admin) for admin in (running.admin, *running.admins[1:])] if running else [str(target)]
    asked = {admin: _ask(admin, reach) for admin in admins}
    routers = [found for found in asked.values() if isinstance(found, ClusterStatus)]
    failed = {admin: found for admin, found in asked.items() if isinstance(found, BatonError)}
    if not routers:
        raise next(iter(failed.values()))
    if as_json:
        found = dataclasses.asdict(routers[0])
        others = [dataclasses.asdict(router) for router in routers[1:]]
        without = [{"admin": admin, "error": str(error)} for admin, error in failed.items()]
        typer.echo(json.dumps(found | {"other_routers": others, "unreachable_routers": without}))
        return
    show(routers[0], routers[1:])
    for admin, error in failed.items():
        typer.echo(f"router at {admin}: no answer: {error}")


def watch(show: Callable[[], None]) -> None:
    """Print the status repeatedly until KeyboardInterrupt. A router that is being replaced is waited for."""
    screen = Console()
    while True:
        screen.clear()  # does nothing without a terminal
        try:
            show()
        except NoWorker as error:
            typer.echo(str(error))
        time.sleep(WATCH_S)


def _ask(admin: str, reach: Target) -> ClusterStatus | BatonError:
    """Return a router's status or the error, because one of several routers may be restarting."""
    if not admin:
        return NoWorker("the router is still starting")
    try:
        with Client(admin, admin=admin, timeout=5.0, token=reach.token, tls=reach.wire) as client:
            return client.cluster()
    except BatonError as error:
        return error


def show(cluster: ClusterStatus, others: Sequence[ClusterStatus] = ()) -> None:
    """Print a few lines for each router, and a table of the workers as the first router sees them."""
    typer.echo(
        f"cluster {cluster.name!r}, model {cluster.model}, router {cluster.router_id}, up {cluster.uptime_s:.0f} s"
    )
    _requests(cluster)
    for other in others:
        typer.echo(f"router {other.router_id}, up {other.uptime_s:.0f} s")
        _requests(other)
    if cluster.control is not None:
        for line in control(cluster.control):
            typer.echo(line)
    _workers(cluster)
    known = {(worker.info.ref, worker.state) for worker in cluster.workers}
    for other in others:
        for worker in other.workers:
            if (worker.info.ref, worker.state) not in known:
                typer.echo(f"{worker.info.ref}: {worker.state} at router {other.router_id}")


def control(report: Control) -> Iterator[str]:
    """Yield lines about the plan, deviations from it, and recent decisions."""
    plan = report.plan
    because = f": {plan.reason}" if plan.reason else ""
    yield f"plan {plan.number}: {sizes_text(plan.prefill, plan.decode)}, by {plan.by}{because}"
    if report.age_s > SILENT_S:
        yield f"the controller on {report.host or '?'} has sent no report for {report.age_s:.0f} s"
    for slot in report.slots:
        if slot.state != "ready" or slot.generation != plan.generation:
            note = f": {slot.note}" if slot.note else ""
            yield f"{slot.worker_id}: {slot.state}, generation {slot.generation} of {plan.generation}{note}"
    if report.outlook:
        yield f"autoscaler: {report.outlook}"
    for decision in report.decisions[-LATEST:]:
        yield f"{report.age_s + decision.age_s:6.0f} s ago  {decision.kind:8}  {decision.text}"


def _requests(cluster: ClusterStatus) -> None:
    counts = f"{cluster.accepted} accepted, {cluster.finished} finished, {cluster.cancelled} cancelled"
    typer.echo(
        f"requests: {cluster.running} running, {cluster.queued} queued; {counts}, {cluster.failed} failed, "
        f"{cluster.refused} refused"
    )
    if cluster.queued:
        drain = f"{cluster.drain_requests_per_s:.3g} requests/s" if cluster.drain_requests_per_s else "not measured yet"
        typer.echo(f"queue: {cluster.queued_tokens} tokens; drains: {drain}")


def _workers(cluster: ClusterStatus) -> None:
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for worker in cluster.workers:
        table.add_row(*_row(worker))
    for worker in cluster.workers:
        if worker.note:
            typer.echo(f"{worker.info.ref.worker_id}: {worker.note}")
    for line in determinism(cluster):
        typer.echo(line)
    width = None if sys.stdout.isatty() else 240
    Console(width=width).print(table)


def determinism(cluster: ClusterStatus) -> Iterator[str]:
    """Yield a line for each group of equal workers: whether they accept deterministic requests, or why not."""
    groups: dict[tuple[str, str], list[WorkerStatus]] = {}
    for worker in cluster.workers:
        groups.setdefault((worker.info.determinism, worker.info.nondeterminism), []).append(worker)
    for (how, why_not), workers in groups.items():
        names = ", ".join(worker.info.ref.worker_id for worker in workers)
        if not how:
            yield f"deterministic requests: not on {names}: {why_not or 'no reason reported'}"
            continue
        loads = [worker.load for worker in workers]
        yield (
            f"deterministic requests: {how} on {names}: {sum(load.verify_passes for load in loads)} verify passes, "
            f"{sum(load.rollbacks for load in loads)} rollbacks, "
            f"{sum(load.recomputed_tokens for load in loads)} tokens recomputed"
        )


def _row(worker: WorkerStatus) -> tuple[str, ...]:
    load, blocks = worker.load, worker.load.blocks
    ledger = ", ".join(
        f"{count} {state}"
        for state in ("free", "reserved", "owned", "cached", "quarantined")
        if (count := dataclasses.asdict(blocks)[state])
    )
    return (
        str(worker.info.ref),
        worker.info.role.value,
        "draining" if worker.load.draining and worker.state == "connected" else worker.state,
        worker.info.ref.address,
        worker.info.metrics or "-",
        str(worker.info.pid),
        str(load.running),
        str(load.waiting),
        str(load.prefill_tokens),
        str(load.decode_steps),
        f"{load.transfer_bytes:,}",
        f"{ledger or '-'} of {blocks.total}",
        ", ".join(f"{c.transport} to {c.peer} ({c.bytes_per_s / 2**20:.0f} MiB/s)" for c in load.channels) or "-",
    )
