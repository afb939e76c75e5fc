"""Actors that Ray itself keeps, of as many as the cluster file says: a `Control` until there is a placement on Ray."""

from __future__ import annotations

from baton.cluster.pool import WorkerPlan
from baton.cluster.ray_cluster import RayWorkers
from baton.cluster.state import StateFolder
from baton.cluster.stop import Stop
from baton.config import ClusterConfig
from baton.core import Role


class KeptRay:
    """`Control` without a controller."""

    def __init__(self, config: ClusterConfig, folder: StateFolder, workers: RayWorkers) -> None:
        self._workers = workers
        pools = ((Role.PREFILL, config.prefill.replicas), (Role.DECODE, config.decode.replicas))
        self._plans = [
            WorkerPlan(role, index, folder.config, folder.logs / f"{role.value}-{index}.log")
            for role, replicas in pools
            for index in range(replicas)
        ]

    def start(self, redis_url: str) -> None:
        self._workers.start(self._plans)

    def wait_ready(self, stop: Stop) -> None:
        self._workers.wait_ready(stop)

    def poll(self) -> None:
        self._workers.poll()

    def pids(self) -> dict[str, int]:
        return self._workers.pids()

    @property
    def size(self) -> int:
        return len(self._plans)

    def stop(self, grace_s: float) -> None:
        self._workers.stop(grace_s)
