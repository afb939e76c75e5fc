"""Where a controller has its workers run: as child processes, as actors of Ray, or as whatever a test stands for.

The workers of a cluster as its supervisor sees them: somebody keeps them as planned, here or on another machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from baton.cluster.signals import Stop
from baton.core import Role
from baton.errors import BatonError


class Control(Protocol):
    """Keeps the workers. Every call is made from the supervisor's thread, which lives as long as the cluster."""

    def start(self, redis_url: str) -> None:
        """Begin to start all workers, without waiting for them; the folder's config, which they read, is written.

        `redis_url`: the ledger of this cluster, as it can be reached from here. Raises BatonError when there is no
        place for workers, or no use of Redis.
        """

    def wait_ready(self, stop: Stop) -> None:
        """Wait until as many are ready as planned. Raises StartError with the end of a log, ConfigError or LedgerError
        if a worker ended for such a reason, Cancelled by `stop`.
        """

    def poll(self) -> None:
        """Called every 0.2 s or so once all are ready: make the workers as planned. A worker that cannot be replaced
        is no error here: it is seen in the report on the board, and tried again.
        """

    def pids(self) -> dict[str, int]:
        """Process ids by worker id, of those alive on this machine."""

    @property
    def size(self) -> int:
        """How many workers are planned, of both roles."""

    def stop(self, grace_s: float) -> None:
        """End what lives only for this supervisor; called at the end, however far `start` came. When this returns no
        process of it is left. Workers on another machine are ended too, unless they are to outlive their supervisor.
        """


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker's process. `error`: why it ended, or has no place yet, as far as that is known; `pid`: on its machine,
    once it is there.
    """

    state: Literal["starting", "ready", "ended"]
    pid: int | None = None
    error: BatonError | None = None


class Placement(Protocol):
    """Starts and ends processes, and says what became of them. It decides nothing: nothing is started again by itself.

    Every call is made from the controller's thread and returns soon; only `open` and `stop` may take their time.
    """

    def open(self) -> None:
        """Find the place, such as a Ray. Raises StartError, NoWorker or Cancelled."""

    def found(self) -> Mapping[str, Role]:
        """What an earlier controller started there and still runs, by worker id, with the role it was started in."""

    def start(self, worker_id: str, role: Role) -> None:
        """Begin to start a worker of that id. What cannot be started is seen as ended."""

    def look(self) -> Mapping[str, Seen]:
        """All that were started or found here and are not forgotten."""

    def kill(self, worker_id: str) -> None:
        """End its process at once; it is seen as ended then."""

    def forget(self, worker_id: str) -> None:
        """It has ended, and nobody asks for it any more; its id may be started again."""

    def stop(self, grace_s: float) -> None:
        """End all of them, gently for so long; when this returns no process is left."""
