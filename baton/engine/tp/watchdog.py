"""The end of a worker whose GPUs hang.

NCCL's kernels wait for a lost rank without a limit, and so does each thread that waits for their results. No error can
be raised there, and to free memory would wait as well. Therefore a thread of its own ends the process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread

import structlog
import torch

from baton.errors import RankLost

log = structlog.get_logger(__name__)
POLL_S = 0.005
ISSUE_S = 600.0  # limit of the host's part, which compiles kernels
Done = Callable[[], bool]


def mark_on(device: torch.device) -> Callable[[], Done]:
    """Return a function that marks the current point of a GPU's stream, and returns how to ask if it is reached."""

    def mark() -> Done:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event.query

    return mark


class Watchdog:
    """Ends this process if a rank ends, or makes no progress for `timeout_s`, while GPUs work for the ranks. `check`
    raises RankLost if a rank has ended. `mark` is that of `mark_on`.
    """

    def __init__(
        self,
        check: Callable[[], None],
        mark: Callable[[], Done],
        timeout_s: float,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._check, self._mark, self._timeout_s, self._end = check, mark, timeout_s, end
        self._watched: SimpleQueue[list[Done]] = SimpleQueue()
        Thread(target=self._run, name="rank-watchdog", daemon=True).start()

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Watch the work that the block issues to the GPU, also if it raises."""
        marks: list[Done] = []
        self._watched.put(marks)
        try:
            yield
        finally:
            marks.append(self._mark())

    def _run(self) -> None:
        try:
            while True:
                marks = self._watched.get()
                self._wait(lambda: bool(marks), ISSUE_S)  # noqa: B023  (it is called in this round only)
                self._wait(marks[0], self._timeout_s)
        except Exception as error:  # noqa: BLE001  # the boundary of this thread
            log.error("worker_failed", error=type(error).__name__, message=str(error))
            self._end(1)

    def _wait(self, done: Done, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            try:
                self._check()
                if time.monotonic() > deadline:
                    raise RankLost(f"the GPUs of this worker made no progress for {timeout_s:g} s")
            except RankLost:
                if not done():  # ranks may end after their work
                    raise
            time.sleep(POLL_S)
