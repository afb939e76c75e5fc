"""What workers are told of a stream, and what their words mean to an attempt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import BatonError, Cancelled, DeadlineExceeded, EngineFault, NoWorker, WorkerLost
from baton.rpc.v1 import worker_pb2 as pb

# What a worker's words mean to the client; what is not listed: WorkerLost for a failure, EngineFault for a refusal.
FAILURES: dict[str, type[BatonError]] = {
    "EngineFault": EngineFault,
    "DeadlineExceeded": DeadlineExceeded,
    "Cancelled": Cancelled,
}
REFUSALS: dict[int, type[BatonError]] = {
    pb.REFUSAL_REASON_FINGERPRINT: NoWorker,  # it serves another model now
    pb.REFUSAL_REASON_STALE: WorkerLost,
}
WORTH_ANOTHER = (WorkerLost, NoWorker)
MAY_FIT_LATER = (pb.REFUSAL_REASON_NO_ROOM, pb.REFUSAL_REASON_DRAINING)


@dataclass(frozen=True, slots=True)
class Lasting:
    """A stream that outlives its router: for so many `seconds`, under its client's name for it. `parks`: it is to go on
    without this one, which is leaving.
    """

    seconds: float = 0.0
    stream: str = ""
    parks: Callable[[], bool] = lambda: False
