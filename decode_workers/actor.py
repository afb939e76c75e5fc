"""The Ray actor around a decode worker: thin, without logic."""

from __future__ import annotations

import os
from functools import partial

from baton.config import load_config
from baton.core import Role
from baton.logs import configure_logging, redirect_output
from baton.worker.settings import from_config
from baton.worker.threaded import HostedWorker
from decode_workers.main import run


class DecodeActor:
    """Constructed by Ray with plain values; a restart constructs it again, as a new incarnation."""

    def __init__(self, config: str, index: int, log: str) -> None:
        redirect_output(log)
        cluster = load_config(config)
        configure_logging(cluster.log.level, cluster.log.format)
        self._worker = HostedWorker(partial(run, from_config(cluster, Role.DECODE, index)))

    def ready(self) -> dict[str, object]:
        """Wait until the worker is registered; then who and where it is."""
        ref = self._worker.ready()
        return {"worker": str(ref), "address": ref.address, "pid": os.getpid()}

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        self._worker.stop()
