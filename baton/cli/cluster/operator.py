"""`baton scale`, `drain` and `restart`: calls to a router, and waiting for the controller's report."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc
import typer

from baton.cli.credentials import Target, find_reach
from baton.cli.up import find_cluster
from baton.client import Client
from baton.client.types import ClusterStatus
from baton.clock import SystemClock
from baton.config import ClusterConfig, load_config
from baton.core import WorkerRef
from baton.errors import BatonError, DeadlineExceeded, NoWorker
from baton.ledger.control_state import ControlState, WorkerCommand
from baton.ledger.registry import Ledger
from baton.rpc.channel import from_here
from baton.rpc.status import from_rpc_error
from baton.rpc.v1 import admin_pb2
from baton.rpc.v1.admin_pb2_grpc import AdminStub

TIMEOUT_S = 10.0
LOOK_S = 0.2
POOLS = ("prefill", "decode")
Reply = TypeVar("Reply")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Operator:
    """Calls `Admin` of the first router in `admins` that answers; any router will do. Errors are BatonErrors."""

    admins: Sequence[str]
    reach: Target

    @classmethod
    def find(cls, name: str | None, target: str | None, tls: Path | None) -> Operator:
        """Return the operator of `target` (an admin address) or of the running cluster `name`. Raises NoWorker."""
        running = None if target else find_cluster(name)
        admins = [str(target)] if running is None else [running.admin, *running.admins[1:]]
        return cls([from_here(admin) for admin in admins if admin], find_reach(running, tls))

    def scale(self, sizes: dict[str, int]) -> admin_pb2.Plan:
        """Set pool sizes. Raises InvalidRequest for a size that the cluster file does not allow."""
        reply: admin_pb2.ScaleReply = self._call(lambda stub, **how: stub.Scale(admin_pb2.ScaleRequest(**sizes), **how))
        return reply.plan

    def restart(self) -> admin_pb2.Plan:
        reply: admin_pb2.RestartReply = self._call(lambda stub, **how: stub.Restart(admin_pb2.RestartRequest(), **how))
        return reply.plan

    def drain(self, worker_id: str) -> str:
        """Drain a worker and return its `worker@incarnation`. Raises InvalidRequest if it does not exist."""
        refs = {str(worker.info.ref.worker_id): str(worker.info.ref) for worker in self.status().workers}
        self._call(lambda stub, **how: stub.Drain(admin_pb2.DrainRequest(worker_id=worker_id), **how))
        return refs.get(worker_id, worker_id)

    def status(self) -> ClusterStatus:
        """Return the cluster's status. Raises BatonError if no router answers."""
        return self._first(self._status)

    def wait_settled(self, number: int, seconds: float) -> None:
        """Wait until plan `number` or a later one is carried out. Raises DeadlineExceeded."""

        def done(status: ClusterStatus) -> bool:
            control = status.control
            return control is not None and control.plan.number >= number and control.settled and not _missed(status)

        self._wait(done, seconds)

    def wait_gone(self, process: str, seconds: float) -> None:
        """Wait until this incarnation is gone and the plan is carried out. Raises DeadlineExceeded."""

        def done(status: ClusterStatus) -> bool:
            here = {str(worker.info.ref) for worker in status.workers}
            settled = status.control is not None and status.control.settled
            return process not in here and settled and not _missed(status)

        self._wait(done, seconds)

    def _wait(self, done: Callable[[ClusterStatus], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            status = self.status()
            if done(status):
                return
            if time.monotonic() > deadline:
                slots = status.control.slots if status.control else ()
                missed = _missed(status)
                notes = {
                    slot.worker_id: "but not connected" if slot.worker_id in missed else slot.note for slot in slots
                }
                left = ", ".join(f"{slot.worker_id} is {slot.state} {notes[slot.worker_id]}".rstrip() for slot in slots)
                raise DeadlineExceeded(f"not done in {seconds:g} s: {left or 'the controller has sent no report'}")
            time.sleep(LOOK_S)

    def _status(self, admin: str) -> ClusterStatus:
        with Client(admin, admin=admin, timeout=TIMEOUT_S, token=self.reach.token, tls=self.reach.wire) as client:
            return client.cluster()

    def _call(self, call: Callable[..., Reply]) -> Reply:
        def ask(admin: str) -> Reply:
            with self.reach.channel(admin) as channel:
                try:
                    return call(AdminStub(channel), timeout=TIMEOUT_S, metadata=self.reach.metadata)
                except grpc.RpcError as error:
                    raise from_rpc_error(error, admin) from None

        return self._first(ask)

    def _first(self, ask: Callable[[str], Answer]) -> Answer:
        """Return the answer of the first reachable router. An error that a router returns is not retried at another."""
        failure: BatonError = NoWorker("the cluster is still starting")
        for admin in self.admins:
            try:
                return ask(admin)
            except NoWorker as error:
                failure = error
        raise failure


def drain_here(file: Path, wait_s: float) -> list[str]:
    """Drain this host's workers, wait `wait_s` for their end, and return their ids. Calls no router or controller,
    because the host goes away in any case. Raises ConfigError, LedgerError, or DeadlineExceeded with the workers left.
    """
    return asyncio.run(_drain_host(load_config(file, env=os.environ), socket.gethostname(), wait_s))


async def _drain_host(config: ClusterConfig, host: str, wait_s: float) -> list[str]:
    prefix, drain_s = f"baton:{config.name}", config.scaling.drain_s
    grace_s = min(wait_s, drain_s) if wait_s else drain_s
    ledger = await Ledger.connect(config.redis.url, prefix, config.ledger.lease_s, SystemClock())
    try:
        drained = [info for info in await ledger.workers() if info.host == host]
        for info in drained:
            order = WorkerCommand(incarnation=str(info.ref.incarnation), role=info.role, drain=True, grace_s=grace_s)
            await ControlState(ledger.connection).put_order(info.ref.worker_id, order)
        if wait_s:
            await _wait_gone(ledger, {info.ref for info in drained}, wait_s)
        return [info.ref.worker_id for info in drained]
    finally:
        await ledger.close()


async def _wait_gone(ledger: Ledger, left: set[WorkerRef], wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while left := left & {info.ref for info in await ledger.workers()}:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"not done in {wait_s:g} s: {', '.join(sorted(map(str, left)))}")
        await asyncio.sleep(LOOK_S)


def parse_sizes(words: Sequence[str]) -> dict[str, int]:
    """Parse `prefill=2 decode=3`. Raises BadParameter (exit code 2) with the wrong word."""
    sizes: dict[str, int] = {}
    for word in words:
        pool, _, size = word.partition("=")
        if pool not in POOLS or not (size.isascii() and size.isdecimal()) or pool in sizes:
            raise typer.BadParameter(f"{word!r}: must be prefill=N or decode=N, each once, such as prefill=2 decode=3")
        sizes[pool] = int(size)
    return sizes


def _missed(status: ClusterStatus) -> set[str]:
    """Return ready workers to which the router is not connected yet, because it learns of them slightly later."""
    connected = [worker.info for worker in status.workers if worker.state == "connected"]
    here = {(info.ref.worker_id, info.role.value) for info in connected}
    slots = status.control.slots if status.control else ()
    return {slot.worker_id for slot in slots if slot.state == "ready" and (slot.worker_id, slot.role) not in here}
