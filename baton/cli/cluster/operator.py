"""Calls to a running cluster for `baton scale`, `drain` and `restart`, and waiting for the controller's report."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import psutil

from baton.cli.target import Admins
from baton.client.types import ClusterStatus
from baton.clock import SystemClock
from baton.config import ClusterConfig, load_config
from baton.core import WorkerRef
from baton.errors import BatonError, DeadlineExceeded, NoWorker
from baton.ledger.control_state import ControlState, WorkerCommand
from baton.ledger.registry import Ledger
from baton.rpc.v1 import admin_pb2

LOOK_S = 0.2
MOVE_S = 10.0  # as in baton.worker.lifecycle, which takes seconds to import
LEAVE_S = 5.0  # to notice an order, and to leave
Reply = TypeVar("Reply")


class Operator:
    """Calls `Admin` of the first router that answers; any router will do. Errors are BatonErrors."""

    def __init__(self, admins: Admins) -> None:
        self._admins = admins

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
        return self._first(self._admins.status, NoWorker, DeadlineExceeded)

    def wait_settled(self, number: int, seconds: float) -> None:
        def done(status: ClusterStatus) -> bool:
            control = status.control
            return control is not None and control.plan.number >= number and control.settled and not _missed(status)

        self._wait(done, seconds)

    def wait_gone(self, process: str, seconds: float) -> None:
        def done(status: ClusterStatus) -> bool:
            here = {str(worker.info.ref) for worker in status.workers}
            settled = status.control is not None and status.control.settled
            return process not in here and settled and not _missed(status)

        self._wait(done, seconds)

    def _wait(self, done: Callable[[ClusterStatus], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                status = self.status()
            except (NoWorker, DeadlineExceeded):  # the router may be restarting
                if time.monotonic() > deadline:
                    raise
                time.sleep(LOOK_S)
                continue
            if done(status):
                return
            if time.monotonic() > deadline:
                slots = status.control.slots if status.control else ()
                missed = _missed(status)
                notes = ["but not connected" if slot.worker_id in missed else slot.note for slot in slots]
                states = [
                    f"{slot.worker_id} is {slot.state} {note}".rstrip() for slot, note in zip(slots, notes, strict=True)
                ]
                left = ", ".join(states) or "the controller has sent no report"
                raise DeadlineExceeded(f"not done in {seconds:g} s: {left}")
            time.sleep(LOOK_S)

    def _call(self, method: Callable[..., Reply]) -> Reply:
        return self._first(lambda admin: self._admins.call(admin, method), NoWorker)

    def _first(self, call: Callable[[str], Reply], *passed_over: type[BatonError]) -> Reply:
        """Return the reply of the first router without one of these errors. Other errors are not retried elsewhere."""
        failures: list[BatonError] = []
        for admin in self._admins.started:
            try:
                return call(admin)
            except passed_over as error:
                failures.append(error)
        raise failures[-1]


def drain_here(file: Path, wait_s: float) -> list[str]:
    """Drain this host's workers, wait `wait_s` for their end, and return their ids. Calls no router or controller,
    because the host goes away in any case. Raises ConfigError, LedgerError, or DeadlineExceeded with the workers left.
    """
    return asyncio.run(_drain_host(load_config(file, env=os.environ), socket.gethostname(), wait_s))


async def _drain_host(config: ClusterConfig, host: str, wait_s: float) -> list[str]:
    prefix, drain_s = f"baton:{config.name}", config.scaling.drain_s
    grace_s = min(max(wait_s - MOVE_S - LEAVE_S, 0.0), drain_s) if wait_s else drain_s
    ledger = await Ledger.connect(config.redis.url, prefix, config.ledger.lease_s, SystemClock())
    try:
        drained = [info for info in await ledger.workers() if info.host == host]
        for info in drained:
            order = WorkerCommand(incarnation=str(info.ref.incarnation), role=info.role, drain=True, grace_s=grace_s)
            await ControlState(ledger.connection).put_order(info.ref.worker_id, order)
        if wait_s:
            await _wait_gone(ledger, {info.ref for info in drained}, wait_s)
            await _wait_moved([info.pid for info in drained])
        return [info.ref.worker_id for info in drained]
    finally:
        await ledger.close()


async def _wait_gone(ledger: Ledger, left: set[WorkerRef], wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while left := left & {info.ref for info in await ledger.workers()}:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"not done in {wait_s:g} s: {', '.join(sorted(map(str, left)))}")
        await asyncio.sleep(LOOK_S)


async def _wait_moved(pids: Sequence[int]) -> None:
    """Wait for the end of workers that have left, at most as long as their sequences move to other workers."""
    deadline = time.monotonic() + MOVE_S
    while time.monotonic() < deadline and any(map(psutil.pid_exists, pids)):  # noqa: ASYNC110 (a process has no event)
        await asyncio.sleep(LOOK_S)


def _missed(status: ClusterStatus) -> set[str]:
    """Return ready workers to which the router is not connected yet, because it learns of them slightly later."""
    connected = [worker.info for worker in status.workers if worker.state == "connected"]
    here = {(info.ref.worker_id, info.role.value) for info in connected}
    slots = status.control.slots if status.control else ()
    return {slot.worker_id for slot in slots if slot.state == "ready" and (slot.worker_id, slot.role) not in here}
