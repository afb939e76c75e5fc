"""The workers of a cluster as its supervisor sees them: somebody keeps them as planned, here or on another machine."""

from __future__ import annotations

from typing import Protocol

from baton.cluster.stop import Stop


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
