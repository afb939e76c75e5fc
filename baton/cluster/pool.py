"""The workers of a cluster as its supervisor sees them, however they are placed; and as plain processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from baton.cluster.processes import Child, ProcessSpec, stop_all
from baton.cluster.stop import Stop
from baton.core import Role


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker to place: its role, its number within the pool, and the config file that it reads."""

    role: Role
    index: int
    config: Path
    log: Path

    @property
    def worker_id(self) -> str:
        return f"{self.role.value}-{self.index}"


class Workers(Protocol):
    """All workers of one cluster. `start` and `poll` are called from the supervisor's thread only."""

    def start(self, plans: Sequence[WorkerPlan]) -> None:
        """Begin to start all of them, without waiting."""

    def wait_ready(self, stop: Stop) -> None:
        """Wait until each of them is registered. Raises StartError with the end of a log; Cancelled by `stop`."""

    def poll(self) -> None:
        """Replace what died. Raises StartError when that is hopeless."""

    def pids(self) -> dict[str, int]:
        """Process ids by worker id, of those alive on this machine."""

    def stop(self, grace_s: float) -> None:
        """End all of them; when this returns no process is left."""


class ProcessWorkers:
    """Workers as plain child processes (`ray.address: none`). `command` gives the argv of one."""

    def __init__(self, command: Callable[[WorkerPlan], Sequence[str]]) -> None:
        self._command = command
        self._children: dict[str, Child] = {}

    def start(self, plans: Sequence[WorkerPlan]) -> None:
        for plan in plans:
            child = Child(ProcessSpec(plan.worker_id, self._command(plan), plan.log))
            self._children[plan.worker_id] = child
            child.start()

    def wait_ready(self, stop: Stop) -> None:
        for child in self._children.values():
            child.wait_ready(stop)

    def poll(self) -> None:
        for child in self._children.values():
            child.poll()

    def pids(self) -> dict[str, int]:
        return {name: pid for name, child in self._children.items() if (pid := child.pid) is not None}

    def stop(self, grace_s: float) -> None:
        stop_all(list(self._children.values()), grace_s)
