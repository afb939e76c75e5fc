"""`baton status`: the cluster as its router sees it."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from baton.cli.access import find_reach
from baton.cli.up import find_cluster
from baton.client import Client
from baton.client.types import ClusterStatus, WorkerStatus
from baton.rpc.channel import from_here

COLUMNS = (
    "worker",
    "state",
    "address",
    "pid",
    "running",
    "waiting",
    "prefill tok",
    "decode steps",
    "KV moved",
    "blocks",
    "channels",
)


def status(name: str | None, target: str | None, tls: Path | None = None, *, as_json: bool) -> None:
    """Print it. `target` is then a router's admin address. Raises NoWorker when there is none."""
    running = None if target else find_cluster(name)
    reach, admin = find_reach(running, tls), from_here(running.admin) if running else str(target)
    with Client(admin, admin=admin, timeout=5.0, token=reach.token, tls=reach.wire) as client:
        cluster = client.cluster()
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(cluster)))
        return
    show(cluster)


def show(cluster: ClusterStatus) -> None:
    """A few lines and a table."""
    typer.echo(
        f"cluster {cluster.name!r}, model {cluster.model}, router {cluster.router_id}, up {cluster.uptime_s:.0f} s"
    )
    counts = f"{cluster.accepted} accepted, {cluster.finished} finished, {cluster.cancelled} cancelled"
    typer.echo(
        f"requests: {cluster.running} running, {cluster.queued} queued; {counts}, {cluster.failed} failed, "
        f"{cluster.refused} refused"
    )
    if cluster.queued:
        drain = f"{cluster.drain_requests_per_s:.3g} requests/s" if cluster.drain_requests_per_s else "not measured yet"
        typer.echo(f"queue: {cluster.queued_tokens} tokens; drains: {drain}")
    table = Table(*COLUMNS, box=None, pad_edge=False)
    for worker in cluster.workers:
        table.add_row(*_row(worker))
    for worker in cluster.workers:
        if worker.note:
            typer.echo(f"{worker.info.ref.worker_id}: {worker.note}")
    width = None if sys.stdout.isatty() else 240
    Console(width=width).print(table)


def _row(worker: WorkerStatus) -> tuple[str, ...]:
    load, blocks = worker.load, worker.load.blocks
    ledger = ", ".join(
        f"{count} {state}"
        for state in ("free", "reserved", "owned", "cached", "quarantined")
        if (count := dataclasses.asdict(blocks)[state])
    )
    return (
        str(worker.info.ref),
        worker.state,
        worker.info.ref.address,
        str(worker.info.pid),
        str(load.running),
        str(load.waiting),
        str(load.prefill_tokens),
        str(load.decode_steps),
        f"{load.transfer_bytes:,}",
        f"{ledger or '-'} of {blocks.total}",
        ", ".join(f"{c.transport} to {c.peer} ({c.bytes_per_s / 2**20:.0f} MiB/s)" for c in load.channels) or "-",
    )
