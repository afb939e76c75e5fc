"""What Ray makes an actor of: a worker of either role in a process of its own. Thin, without logic, and without Ray."""

from __future__ import annotations

import os
from functools import partial

import structlog

from baton import __version__
from baton.config import config_from_json
from baton.core import Role
from baton.logs import configure_logging, redirect_output
from baton.worker.host import run_worker
from baton.worker.hosted import RoleFactory
from baton.worker.settings import of_both_roles
from baton.worker.threaded import HostedWorker

log = structlog.get_logger(__name__)


class WorkerActor:
    """Constructed with plain values. When it is constructed again, that is a new incarnation of `worker_id`.

    `config_json`: the whole `ClusterConfig`; `log_file`: where output goes (empty: stays Ray's). `factories` make its
    role, now and whenever it is told to be of the other one.
    """

    def __init__(
        self, config_json: str, role: str, worker_id: str, log_file: str, factories: dict[Role, RoleFactory]
    ) -> None:
        if log_file:
            redirect_output(log_file)
        config = config_from_json(config_json)
        configure_logging(config.log.level, config.log.format, worker_id)
        log.info("process_started", version=__version__, pid=os.getpid())
        both, begins = of_both_roles(config, worker_id, Role(role)), Role(role)
        self._worker = HostedWorker(partial(run_worker, both, factories, begins))

    def ready(self) -> dict[str, object]:
        """Wait until the worker is registered; then who and where it is."""
        ref = self._worker.ready()
        return {"worker": str(ref), "address": ref.address, "pid": os.getpid()}

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        self._worker.stop()
