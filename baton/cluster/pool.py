"""Workers as plain child processes (`ray.address: none`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from baton.cluster.placement import Seen
from baton.cluster.processes import Child, ProcessSpec, StartError, stop_all
from baton.core import Role


class ProcessPlacement:
    """Children of this process, which end with the thread that starts them. `command` gives the argv of one."""

    def __init__(self, command: Callable[[str, Role], Sequence[str]], logs: Path) -> None:
        self._command = command
        self._logs = logs
        self._children: dict[str, Child] = {}
        self._ended: dict[str, Seen] = {}

    def open(self) -> None:
        pass

    def found(self) -> Mapping[str, Role]:
        return {}

    def start(self, worker_id: str, role: Role) -> None:
        spec = ProcessSpec(worker_id, self._command(worker_id, role), self._logs / f"{worker_id}.log")
        self._children[worker_id] = Child(spec)
        try:
            self._children[worker_id].start()
        except OSError as error:  # no file for its log, no memory
            self._ended[worker_id] = Seen("ended", error=StartError(f"{worker_id} was not started: {error}"))

    def look(self) -> Mapping[str, Seen]:
        return {worker_id: self._look(worker_id, child) for worker_id, child in self._children.items()}

    def _look(self, worker_id: str, child: Child) -> Seen:
        if worker_id not in self._ended:
            if (pid := child.pid) is not None:
                return Seen("ready" if child.says_ready() else "starting", pid)
            self._ended[worker_id] = Seen("ended", error=child.failure())
        return self._ended[worker_id]

    def kill(self, worker_id: str) -> None:
        self._children[worker_id].kill()

    def forget(self, worker_id: str) -> None:
        self._children.pop(worker_id).wait(0.0)
        self._ended.pop(worker_id, None)

    def stop(self, grace_s: float) -> None:
        stop_all(list(self._children.values()), grace_s)
