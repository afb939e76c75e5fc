"""Where a controller has its workers run: as child processes, as actors of Ray, or as whatever a test stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from baton.core import Role
from baton.errors import BatonError


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
