"""`baton status` and `baton top`: the cluster as its routers report it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from baton.cli.options import AdminTarget, ClusterName, Json, Tls
from baton.core import first_line, sizes_text
from baton.errors import BatonError

if TYPE_CHECKING:
    from baton.client.types import ClusterStatus, Control, WorkerStatus
    from baton.core import WorkerInfo

COLUMNS = ["worker", "role", "state", "address", "metrics", "pid", "computes with", "running", "waiting", "prefill tok"]
COLUMNS += ["decode steps", "KV moved", "blocks", "channels"]
LEAST_NEEDED = ("channels", "metrics", "address", "computes with", "pid", "KV moved", "decode steps", "prefill tok")
SILENT_S = 5.0
TIMEOUT_S = 5.0  # of each router
LATEST = 5  # decisions shown
WATCH_S = 1.0

Interval = Annotated[float, typer.Option("--interval", min=0.1, max=60, help="seconds between two updates")]


def status(
    name: ClusterName = None,
    target: AdminTarget = None,
    tls: Tls = None,
    census: Annotated[bool, typer.Option("--census", help="holders of blocks; exit code 1 if some are lost")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="repeat each second until Ctrl-C")] = False,
    as_json: Json = False,
) -> None:
    """Show workers, their load and the block ledger. Set BATON_TOKEN to an admin's token if the cluster has tokens."""
    if census and watch:
        raise typer.BadParameter("--census: must be without --watch")
    if census:
        from baton.cli.inspect.block_census import print_census

        print_census(name, target, tls, as_json=as_json)
        return
    show = partial(print_status, name, target, tls, as_json=as_json)
    repeat(show) if watch else show()


def top(name: ClusterName = None, target: AdminTarget = None, tls: Tls = None, interval: Interval = 1.0) -> None:
    """Show a live view of the cluster in this terminal. Set BATON_TOKEN to an admin's token if it has tokens."""
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise typer.BadParameter("needs a terminal; `baton status --watch` does not")
    from baton.cli.inspect.top.app import run_top

    run_top(name, target, tls, interval)


def repeat(show: Callable[[], None]) -> None:
    """Print the status repeatedly until KeyboardInterrupt or an error that a retry cannot change."""
    from baton.cli.inspect.top.feed import PERMANENT

    screen = Console()
    while True:
        screen.clear()  # does nothing without a terminal
        try:
            show()
        except PERMANENT:
            raise
        except BatonError as error:  # a router that is slow, or is being replaced
            typer.echo(str(error), err=True)
        time.sleep(WATCH_S)


def print_status(name: str | None, target: str | None, tls: Path | None, *, as_json: bool) -> None:
    """Print the status by each router, because one of several may be restarting. Raises BatonError if none answers."""
    from baton.cli.target import Admins

    admins = Admins.find(name, target, tls)
    routers: list[ClusterStatus] = []
    failed: dict[str, BatonError] = {}
    for admin in admins.addresses:
        try:
            routers.append(admins.status(admin, TIMEOUT_S))
        except BatonError as error:
            failed[admin] = error
    if not routers:
        raise next(iter(failed.values()))
    if as_json:
        found, *others = map(dataclasses.asdict, routers)
        without = [{"admin": admin, "error": str(failure)} for admin, failure in failed.items()]
        typer.echo(json.dumps(found | {"other_routers": others, "unreachable_routers": without}))
        return
    show(routers[0], routers[1:])
    for admin, failure in failed.items():
        typer.echo(f"router at {admin}: no answer: {failure}")


def _line(line: str) -> None:
    """Print a line. A terminal breaks it between words."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else len(line) + 1
    typer.echo(textwrap.fill(line, width, subsequent_indent="    ", break_on_hyphens=False))


def show(cluster: ClusterStatus, others: Sequence[ClusterStatus] = ()) -> None:
    """Print a few lines for each router, and a table of the workers as the first router sees them."""
    where = f"router {cluster.router_id}, up {cluster.uptime_s:.0f} s"
    _line(f"cluster {cluster.name!r}, model {cluster.model}, {where}")
    _requests(cluster)
    for other in others:
        _line(f"router {other.router_id}, up {other.uptime_s:.0f} s")
        _requests(other)
    if cluster.control is not None:
        for line in control(cluster.control):
            _line(line)
    _workers(cluster)
    known = {(worker.info.ref, worker.state) for worker in cluster.workers}
    for other in others:
        for worker in other.workers:
            if (worker.info.ref, worker.state) not in known:
                _line(f"{worker.info.ref}: {worker.state} at router {other.router_id}")


def control(report: Control) -> Iterator[str]:
    """Yield lines about the plan, deviations from it, and recent decisions."""
    plan = report.plan
    because = f": {plan.reason}" if plan.reason else ""
    yield f"plan {plan.number}: {sizes_text(plan.prefill, plan.decode)}, by {plan.by}{because}"
    if report.age_s > SILENT_S:
        yield f"the controller on {report.host or '?'} has sent no report for {report.age_s:.0f} s"
    for slot in report.slots:
        if slot.state != "ready" or slot.generation != plan.generation:
            note = f": {first_line(slot.note)}" if slot.note else ""
            yield f"{slot.worker_id}: {slot.state}, generation {slot.generation} of {plan.generation}{note}"
    if report.outlook:
        yield f"autoscaler: {report.outlook}"
    for decision in report.decisions[-LATEST:]:
        yield f"{report.age_s + decision.age_s:6.0f} s ago  {decision.kind:8}  {first_line(decision.text)}"


def _requests(cluster: ClusterStatus) -> None:
    ended = f"{cluster.finished} finished, {cluster.cancelled} cancelled, {cluster.failed} failed"
    counts = f"{cluster.accepted} accepted, {ended}, {cluster.refused} refused"
    _line(f"requests: {cluster.running} running, {cluster.queued} queued; {counts}")
    if cluster.promises_kept + cluster.promises_broken + cluster.promises_refused:
        given = f"{cluster.promises_kept} kept, {cluster.promises_broken} broken"
        _line(f"promises of latency: {given}, {cluster.promises_refused} refused")
    if cluster.queued:
        drain = f"{cluster.drain_requests_per_s:.3g} requests/s" if cluster.drain_requests_per_s else "not measured yet"
        _line(f"queue: {cluster.queued_tokens} tokens; drains: {drain}")


def _workers(cluster: ClusterStatus) -> None:
    for worker in cluster.workers:
        if worker.note:
            _line(f"{worker.info.ref.worker_id}: {first_line(worker.note)}")
    for line in (*transports(cluster), *determinism(cluster), *speculation(cluster)):
        _line(line)
    rows = [dict(zip(COLUMNS, _row(worker), strict=True)) for worker in cluster.workers]
    console = Console(width=None if sys.stdout.isatty() else 240)
    table, hidden = fitting(rows, console)
    console.print(table)
    if hidden:
        console.print(f"{hidden} more columns in a wider terminal, or with --json", style="dim", highlight=False)


def fitting(rows: Sequence[dict[str, str]], console: Console) -> tuple[Table, int]:
    """Return the table with as many columns as the console has room for, and the number of hidden ones. Incarnations
    of workers are hidden first.
    """
    short = [{**row, "worker": row["worker"].partition("@")[0]} for row in rows]
    for hidden in range(-1, len(LEAST_NEEDED) + 1):
        names = [name for name in COLUMNS if name not in LEAST_NEEDED[: max(0, hidden)]]
        table = Table(*names, box=None, pad_edge=False)
        for row in rows if hidden < 0 else short:
            table.add_row(*(row[name] for name in names))
        if Measurement.get(console, console.options.update(max_width=1000), table).maximum <= console.width:
            break
    return table, max(0, hidden)


def transports(cluster: ClusterStatus) -> Iterator[str]:
    """Yield a line for each worker with channels that do not use a better transport: the peers, and why."""
    for worker in cluster.workers:
        peers: dict[tuple[str, str], list[str]] = {}
        for channel in worker.load.channels:
            if channel.left_out:
                key = channel.transport, "".join(f"; not over {one}" for one in channel.left_out)
                peers.setdefault(key, []).append(channel.peer)
        parts = [f"{taken} to {', '.join(to)}{why}" for (taken, why), to in peers.items()]
        if parts:
            yield f"{worker.info.ref.worker_id} sends over {'; '.join(parts)}"


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


def speculation(cluster: ClusterStatus) -> Iterator[str]:
    """Yield a line with the proposals of all workers that have made some."""
    found = [worker for worker in cluster.workers if worker.load.speculated_tokens]
    if found:
        proposed = sum(worker.load.speculated_tokens for worker in found)
        accepted = sum(worker.load.accepted_tokens for worker in found)
        names = ", ".join(worker.info.ref.worker_id for worker in found)
        yield f"speculation on {names}: {proposed} tokens proposed, {accepted} accepted ({accepted / proposed:.0%})"


def _computes_with(info: WorkerInfo) -> str:
    """Return the level of CPU kernels, the dtype of KV, and, if they are unusual, the weight format and the code of the
    layers: avx2 bfloat16 int8.
    """
    weights = "" if info.quantize == "none" else info.quantize
    dtype = "KV:int8" if info.layout.dtype == "int8" else info.layout.dtype
    return " ".join(part for part in (info.cpu_level, dtype, weights, info.backend) if part)


def _row(worker: WorkerStatus) -> tuple[str, ...]:
    load, blocks = worker.load, worker.load.blocks
    counts = {state: count for state, count in dataclasses.asdict(blocks).items() if state != "total" and count}
    ledger = ", ".join(f"{count} {state}" for state, count in counts.items())
    return (
        str(worker.info.ref),
        worker.info.role.value,
        "draining" if worker.load.draining and worker.state == "connected" else worker.state,
        worker.info.ref.address,
        worker.info.metrics or "-",
        str(worker.info.pid),
        _computes_with(worker.info),
        str(load.running),
        str(load.waiting),
        str(load.prefill_tokens),
        str(load.decode_steps),
        f"{load.transfer_bytes:,}",
        f"{ledger or '-'} of {blocks.total}",
        ", ".join(f"{c.transport} to {c.peer} ({c.bytes_per_s / 2**20:.0f} MiB/s)" for c in load.channels) or "-",
    )
