"""`baton status --census`: checks that each block held by a worker belongs to a running request."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import grpc
import typer

from baton.cli.credentials import NO_REACH, Target, find_reach
from baton.cli.up import find_cluster
from baton.core import HandoffId
from baton.errors import BatonError
from baton.rpc import convert
from baton.rpc.channel import from_here
from baton.rpc.status import from_rpc_error
from baton.rpc.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.worker.block_census import Census, Held

PAUSE_S = 1.0  # time for releases in flight to arrive
TIMEOUT_S = 15.0
T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """A discrepancy at a worker. Problems of the same worker and handoff are equal, whatever their texts."""

    worker: str
    handoff: HandoffId | None
    text: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.worker}: {self.text}"


def census(name: str | None, target: str | None, tls: Path | None = None, *, as_json: bool) -> None:
    """Print the census. The exit code is 1 if two looks in a row find the same problem. Raises NoWorker."""
    running = None if target else find_cluster(name)
    reach, admin = find_reach(running, tls), from_here(running.admin) if running else str(target)
    others = [from_here(other) for other in running.admins[1:] if other] if running else []
    censuses, found = look(admin, reach, others)
    if found:
        time.sleep(PAUSE_S)
        censuses, again = look(admin, reach, others)
        found = [problem for problem in again if problem in found]
    if as_json:
        workers = [dataclasses.asdict(one) for one in censuses]
        typer.echo(json.dumps({"workers": workers, "problems": [str(problem) for problem in found]}))
    else:
        for line in (*map(summary, censuses), *map(str, found)):
            typer.echo(line)
    if found:
        raise typer.Exit(1)


def look(admin: str, reach: Target = NO_REACH, others: Sequence[str] = ()) -> tuple[list[Census], list[Problem]]:
    """Return the census of each worker of this router, and the problems. A request counts as running if any router runs
    it before or after the census.
    """
    routers, censuses, found = [admin, *others], [], []
    before = [_ask(router, reach, _requests) for router in routers]
    for worker in _ask(admin, reach, _workers):
        ref = worker.info.ref
        try:
            censuses.append(_read(_ask(ref.address, reach, _census)))
        except BatonError as error:
            found.append(Problem(ref.worker_id, None, f"no answer: {error}"))
    running: dict[str, set[str]] = {}
    for reply in (*before, *(_ask(router, reach, _requests) for router in routers)):
        running.setdefault(reply.router_id, set()).update(reply.request_ids)
    return censuses, [*found, *problems(censuses, running)]


def summary(census: Census) -> str:
    """Return one line with the blocks held, by state."""
    states = Counter(held.state for held in census.held)
    blocks = {state: sum(held.counted for held in census.held if held.state == state) for state in states}
    parts = ", ".join(f"{count} {state} ({_blocks(blocks[state])})" for state, count in states.items())
    counts = census.blocks
    return f"{census.worker}: {counts.reserved + counts.owned} of {_blocks(counts.total)} held: {parts or 'no handoff'}"


def _requests(channel: grpc.Channel, metadata: Metadata) -> admin_pb2.RequestsReply:
    stub = admin_pb2_grpc.AdminStub(channel)
    return stub.Requests(admin_pb2.RequestsRequest(), timeout=TIMEOUT_S, metadata=metadata)


def _workers(channel: grpc.Channel, metadata: Metadata) -> Sequence[admin_pb2.WorkerStatus]:
    stub = admin_pb2_grpc.AdminStub(channel)
    return stub.Status(admin_pb2.StatusRequest(), timeout=TIMEOUT_S, metadata=metadata).workers


def _census(channel: grpc.Channel, metadata: Metadata) -> worker_pb2.CensusReply:
    """Request a worker's census. Workers check certificates but no tokens, so none is sent."""
    return worker_pb2_grpc.WorkerStub(channel).Census(worker_pb2.CensusRequest(), timeout=TIMEOUT_S)


def _read(message: worker_pb2.CensusReply) -> Census:
    """Convert a message. Raises InvalidRequest if its ledger is inconsistent or has no worker."""
    held = [
        Held(convert.handoff_from_pb(entry.handoff), entry.state, entry.router_id, entry.blocks, entry.counted)
        for entry in message.holdings
    ]
    return Census(convert.ref_from_pb(message.worker), convert.counts_from_pb(message.blocks), tuple(held))


def _ask(address: str, reach: Target, call: Callable[[grpc.Channel, Metadata], T]) -> T:
    with reach.channel(address) as channel:
        try:
            return call(channel, reach.metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error, address) from error


def problems(censuses: Sequence[Census], running: Mapping[str, Set[str]]) -> Iterator[Problem]:
    """Yield the discrepancies. `running` has the requests of each router."""
    for census in censuses:
        worker = str(census.worker)
        if census.unaccounted > 0:
            yield Problem(worker, None, f"{_blocks(census.unaccounted)} that no handoff holds")
        elif census.unaccounted:
            yield Problem(
                worker, None, f"{_blocks(-census.unaccounted)} that a handoff holds but the ledger counts as free"
            )
        for held in census.held:
            if held.state == "parked":
                continue  # a parked stream needs no router for some time
            if held.handoff.request_id not in running.get(held.router_id, ()):
                yield Problem(worker, held.handoff, _leaked(held, known=held.router_id in running))


def _leaked(held: Held, *, known: bool) -> str:
    if not held.router_id:
        why = "no router requested it"
    elif known:
        why = f"router {held.router_id} does not run it"
    else:
        why = f"router {held.router_id} was not asked"
    return f"{held.handoff} is {held.state} with {_blocks(held.blocks)}, and {why}"


def _blocks(number: int) -> str:
    return f"{number} block" if number == 1 else f"{number} blocks"
