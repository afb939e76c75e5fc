"""`baton status --census`: checks that each block held by a worker belongs to a running request."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import typer

from baton.cli.target import Admins
from baton.core import HandoffId
from baton.errors import BatonError
from baton.rpc import convert
from baton.rpc.status import from_rpc_error
from baton.rpc.v1 import admin_pb2, worker_pb2
from baton.rpc.v1.worker_pb2_grpc import WorkerStub
from baton.worker.block_census import Census, Held

PAUSE_S = 1.0  # time for releases in flight to arrive
TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Problem:
    """A discrepancy at a worker. Problems of the same worker and handoff are equal, whatever their texts."""

    worker: str
    handoff: HandoffId | None
    text: str = field(compare=False)
    unasked: str = field(default="", compare=False)  # the router of the handoff, if it was not asked

    def __str__(self) -> str:
        return f"{self.worker}: {self.text}"


def print_census(name: str | None, target: str | None, tls: Path | None = None, *, as_json: bool) -> None:
    """Print the census. The exit code is 1 if two looks in a row find the same problem. It is 2 if there are only
    handoffs of routers that `target` does not name. Raises NoWorker.
    """
    admins = Admins.find(name, target, tls)
    censuses, found = look(admins)
    if found:
        time.sleep(PAUSE_S)
        censuses, again = look(admins)
        found = [problem for problem in again if problem in found]
    unasked = sorted({problem.unasked for problem in found if target and problem.unasked})
    found = [problem for problem in found if problem.unasked not in unasked]
    remedy = "was not asked, or has ended; name all routers in --target"
    notes = [f"not checked: router {router} {remedy}" for router in unasked]
    if as_json:
        workers = [dataclasses.asdict(one) for one in censuses]
        report = {"workers": workers, "problems": [str(problem) for problem in found], "not_checked": notes}
        typer.echo(json.dumps(report))
    else:
        for line in (*map(summary, censuses), *map(str, found), *notes):
            typer.echo(line)
    if found or notes:
        raise typer.Exit(1 if found else 2)


def look(admins: Admins) -> tuple[list[Census], list[Problem]]:
    """Return the census of each worker of the first router, and the problems. A request counts as running if any router
    runs it before or after the census.
    """
    censuses, found = [], []
    running = _running(admins)
    first = admins.started[0]
    reply = admins.call(first, lambda stub, **how: stub.Status(admin_pb2.StatusRequest(), **how), TIMEOUT_S)
    for worker in reply.workers:
        ref = worker.info.ref
        try:
            censuses.append(_census(ref.address, admins))
        except BatonError as error:
            found.append(Problem(ref.worker_id, None, f"no answer: {error}"))
    for router, requests in _running(admins).items():
        running.setdefault(router, set()).update(requests)
    return censuses, [*found, *problems(censuses, running)]


def _running(admins: Admins) -> dict[str, set[str]]:
    running = {}
    for admin in admins.started:
        reply = admins.call(admin, lambda stub, **how: stub.Requests(admin_pb2.RequestsRequest(), **how), TIMEOUT_S)
        running[reply.router_id] = set(reply.request_ids)
    return running


def _census(address: str, admins: Admins) -> Census:
    """Request a worker's census. Workers check certificates but no tokens, so none is sent. Raises BatonError."""
    with admins.credentials.wire.sync(address) as channel:
        try:
            message = WorkerStub(channel).Census(worker_pb2.CensusRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise from_rpc_error(error, address) from error
    held = [
        Held(convert.handoff_from_pb(entry.handoff), entry.state, entry.router_id, entry.blocks, entry.counted)
        for entry in message.holdings
    ]
    return Census(convert.ref_from_pb(message.worker), convert.counts_from_pb(message.blocks), tuple(held))


def summary(census: Census) -> str:
    """Return one line with the blocks held, by state."""
    states = Counter(held.state for held in census.held)
    blocks = {state: sum(held.counted for held in census.held if held.state == state) for state in states}
    parts = ", ".join(f"{count} {state} ({_blocks(blocks[state])})" for state, count in states.items())
    counts = census.blocks
    return f"{census.worker}: {counts.reserved + counts.owned} of {_blocks(counts.total)} held: {parts or 'no handoff'}"


def problems(censuses: Sequence[Census], running: Mapping[str, Set[str]]) -> Iterator[Problem]:
    """Yield the discrepancies. `running` has the requests of each router."""
    for census in censuses:
        worker = str(census.worker)
        if census.unaccounted > 0:
            yield Problem(worker, None, f"{_blocks(census.unaccounted)} that no handoff holds")
        elif census.unaccounted:
            lost = _blocks(-census.unaccounted)
            yield Problem(worker, None, f"{lost} that a handoff holds but the ledger counts as free")
        for held in census.held:
            if held.state == "parked":
                continue  # a parked stream needs no router for some time
            if held.handoff.request_id not in running.get(held.router_id, ()):
                unasked = "" if held.router_id in running else held.router_id
                yield Problem(worker, held.handoff, _leaked(held, unasked), unasked)


def _leaked(held: Held, unasked: str) -> str:
    if not held.router_id:
        why = "no router requested it"
    elif unasked:
        why = f"router {unasked} was not asked"
    else:
        why = f"router {held.router_id} does not run it"
    return f"{held.handoff} is {held.state} with {_blocks(held.blocks)}, and {why}"


def _blocks(number: int) -> str:
    return f"{number} block" if number == 1 else f"{number} blocks"
