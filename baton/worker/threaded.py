"""A worker inside a process that somebody else owns (a Ray actor): on a thread of its own, ended by `stop`.

When the worker ends by itself, the process ends too: with 0 if it was told to, and its supervisor sees that.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import structlog

from baton.core import WorkerRef
from baton.errors import BatonError, Cancelled

Run = Callable[[threading.Event, Callable[[WorkerRef], None]], None]
log = structlog.get_logger(__name__)


class HostedWorker:
    """Runs `run(stop, ready)` on a thread."""

    def __init__(self, run: Run, *, exit_process: Callable[[int], None] = os._exit) -> None:
        self._run = run
        self._exit_process = exit_process
        self._stop = threading.Event()
        self._settled = threading.Event()
        self._failure: BaseException | None = None
        self._ref: WorkerRef | None = None
        self._thread = threading.Thread(target=self._main, name="worker", daemon=True)
        self._thread.start()

    def ready(self) -> WorkerRef:
        """Wait until the worker is registered. Raises what kept it from starting, Cancelled if that was `stop`."""
        self._settled.wait()
        if self._failure is not None:
            raise self._failure
        if self._ref is None:
            raise Cancelled("the worker was stopped before it was ready")
        return self._ref

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the worker and wait for it."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _ready(self, ref: WorkerRef) -> None:
        self._ref = ref
        self._settled.set()

    def _main(self) -> None:
        try:
            self._run(self._stop, self._ready)
        except Exception as error:
            # The task boundary: whatever ended the worker is logged, then handed to `ready` or ends the process.
            if isinstance(error, BatonError):
                log.error("worker_failed", error=type(error).__name__, message=str(error))
            else:
                log.exception("worker_failed")
            self._failure = error
        was_ready = self._settled.is_set()
        self._settled.set()
        if was_ready and not self._stop.is_set():
            self._exit_process(0 if self._failure is None else 1)  # 0: it has drained
