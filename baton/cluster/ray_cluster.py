"""Workers as Ray actors. Ray places, starts and replaces the processes; it carries no tokens and no KV.

The actor classes are given by the caller, so this module knows no role. A local Ray listens on the loopback only, has
no dashboard, and asks for a token that lives as long as this process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.cluster.pool import WorkerPlan
from baton.cluster.processes import StartError, tail
from baton.core import Role
from baton.errors import BatonError

MAX_RESTARTS = 100
START_TIMEOUT_S = 120.0
LOCAL = "local"
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MB; nothing of ours goes through it

# Read by Ray when it is imported or started. The third makes a local Ray use 127.0.0.1 and nothing else.
LOCAL_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class RayWorkers:
    """Workers as actors of a Ray that is started here (`local`) or of the one at `address`."""

    def __init__(self, address: str, cluster: str, actors: Mapping[Role, type]) -> None:
        self._address = address
        self._cluster = cluster
        self._actors = actors
        self._handles: dict[str, Any] = {}
        self._plans: dict[str, WorkerPlan] = {}
        self._pids: dict[str, int] = {}
        self._folder: Path | None = None

    def start(self, plans: Sequence[WorkerPlan]) -> None:
        ray = self._init()
        for plan in plans:
            options = {
                "name": f"baton-{self._cluster}-{plan.worker_id}",
                "max_restarts": MAX_RESTARTS,
                "max_task_retries": 0,
                "num_cpus": 0,
                "max_concurrency": 4,
            }
            remote = ray.remote(self._actors[plan.role]).options(**options)
            self._handles[plan.worker_id] = remote.remote(str(plan.config), plan.index, str(plan.log))
            self._plans[plan.worker_id] = plan

    def _init(self) -> Any:
        if self._address == LOCAL:
            self._folder = Path(tempfile.mkdtemp(prefix="baton-ray-"))  # short: unix socket paths have 107 bytes
            os.environ.update(LOCAL_ENVIRONMENT)
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        import ray

        quiet = {"configure_logging": False, "logging_level": logging.ERROR, "log_to_driver": False}
        if self._address == LOCAL:
            options = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "num_cpus": 1}
            ray.init(address=LOCAL, _temp_dir=str(self._folder), **options, **quiet)
        else:
            ray.init(address=self._address, **quiet)
        return ray

    def wait_ready(self) -> None:
        import ray

        for worker_id, handle in self._handles.items():
            try:
                facts = ray.get(handle.ready.remote(), timeout=START_TIMEOUT_S)
            except ray.exceptions.RayError as error:
                if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, BatonError):
                    raise error.cause from None
                log = self._plans[worker_id].log
                raise StartError(f"{worker_id} did not start ({type(error).__name__}):\n{tail(log)}") from None
            self._pids[worker_id] = int(facts["pid"])

    def poll(self) -> None:
        """Ray replaces actors by itself; learn the process ids of the new ones."""
        import ray

        asked = {worker_id: handle.pid.remote() for worker_id, handle in self._handles.items()}
        done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=0.05)
        for worker_id, reference in asked.items():
            if reference in done:
                with contextlib.suppress(ray.exceptions.RayError):  # it is being replaced right now
                    self._pids[worker_id] = int(ray.get(reference))

    def pids(self) -> dict[str, int]:
        return dict(self._pids)

    def stop(self, grace_s: float) -> None:
        import ray

        if ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError):
                stopping = [handle.stop.remote() for handle in self._handles.values()]
                ray.wait(stopping, num_returns=len(stopping), timeout=grace_s) if stopping else None
            for handle in self._handles.values():
                ray.kill(handle, no_restart=True)
            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
