"""Whether and when a broken stream goes on. No I/O."""

from __future__ import annotations

from baton.client._base import Attempts
from baton.errors import BatonError, InvalidRequest, NoWorker, UnknownModel, Unsupported, WorkerLost

RESUMABLE = "baton-resumable"
"""Initial metadata of a stream: "1" when `Resume` can go on with it."""

RESUMABLE_S = 30.0
"""For how long a stream goes on without a router, unless its caller says otherwise: time to find another one."""

REFUSALS = (Unsupported, UnknownModel, InvalidRequest)  # by a router that cannot resume, or not this request


class Recovery:
    """The breaks of one stream that has begun. `targets`: how many routers may be asked to go on with it.

    Only a lost connection or worker is a break; every other failure is the answer. What the caller sees at last is the
    loss, not that some router knew nothing about the request.
    """

    def __init__(self, targets: int) -> None:
        self.resumable = False
        self._targets = targets
        self._refused = 0
        self._lost: BatonError | None = None

    def progressed(self) -> None:
        """The answer has got further: what was before is forgotten."""
        self._refused, self._lost = 0, None

    def wait_after(self, error: BatonError, attempts: Attempts, *, answered: bool) -> float:
        """Seconds to wait before a Resume, or raises what ends the stream. `answered`: the stream had events."""
        if self._lost is not None and not answered:
            return self._wait_after_resume(self._lost, error, attempts)
        lost = self.resumable and isinstance(error, WorkerLost | NoWorker)
        if lost:
            self._lost = error
        return attempts.wait_after(error, started=not lost)

    def _wait_after_resume(self, lost: BatonError, error: BatonError, attempts: Attempts) -> float:
        """As above, after a Resume that brought nothing."""
        if not isinstance(error, REFUSALS):
            return attempts.wait_after(error)
        self._refused += 1
        if self._refused >= self._targets:
            raise lost from error
        return 0.0
