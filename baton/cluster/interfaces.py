"""The contracts between a cluster's parts: `Control` is the supervisor's view of workers, and `Placement` the
controller's view of processes, which may be child processes, Ray actors, or a test double.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from baton.cluster.signals import Stop
from baton.core import Role
from baton.errors import BatonError


class Control(Protocol):
    """The workers of a cluster, kept as planned. All calls come from one thread that lives as long as the cluster."""

    def start(self, redis_url: str) -> None:
        """Begin to start all workers without waiting, from an existing config file. `redis_url` is the ledger's address
        as seen from here. Raises BatonError if there is no place for workers, or if Redis cannot be used.
        """

    def wait_ready(self, stop: Stop) -> None:
        """Wait until all planned workers are ready. Raises Cancelled, or the error of a worker."""

    def poll(self) -> None:
        """Approach the plan, every 0.2 s or so. A failed replacement is reported and retried, and raises no error."""

    def pids(self) -> dict[str, int]:
        """Return the ids of live processes on this machine by worker id."""

    @property
    def size(self) -> int:
        """The number of planned workers of both roles."""

    def stop(self, grace_s: float) -> None:
        """End everything that lives only for this supervisor, however far `start` came. No such process is left on
        return. Workers on other machines end too, unless they are to outlive their supervisor.
        """


@dataclass(frozen=True, slots=True)
class Seen:
    """A process's state. `pid` counts on its host, once it exists. `error` is why it ended or has no place."""

    state: Literal["starting", "ready", "ended"]
    pid: int | None = None
    error: BatonError | None = None


class Placement(Protocol):
    """Starts and ends processes and reports their state; restarts and decides nothing. Every call is made from the
    controller's thread. Only `open` and `stop` may block for long.
    """

    def open(self) -> None:
        """Find the place, such as a Ray cluster. Raises StartError, NoWorker or Cancelled."""

    def found(self) -> Mapping[str, Role]:
        """Return the live workers of an earlier controller, by worker id, with the role they were started in."""

    def start(self, worker_id: str, role: Role) -> None:
        """Begin to start a worker with that id. A failed start is reported as ended."""

    def look(self) -> Mapping[str, Seen]:
        """Return all workers that were started or found here and are not forgotten."""

    def kill(self, worker_id: str) -> None:
        """End the process immediately. It is then reported as ended."""

    def forget(self, worker_id: str) -> None:
        """Forget an ended worker. Its id may be started again."""

    def stop(self, grace_s: float) -> None:
        """End all workers, with a grace period of `grace_s` seconds. No process is left on return."""
