"""One push under way, as the outbox keeps it and the link's thread works on it."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtransfer.handoff import PushEnd, PushJob, PushResult
from kvtransfer.plan import Progress

if TYPE_CHECKING:
    from baton.engine.kv import Mark
    from baton.errors import HandoffError
    from kvtransfer.digests import KVDigest

NEVER = float("inf")


class State(enum.Enum):
    """Of a push; its life is drawn in `kvtransfer.outbox`."""

    WAITING = enum.auto()
    OFFERED = enum.auto()
    ACCEPTED = enum.auto()
    COMMITTED = enum.auto()


@dataclass(slots=True, eq=False)
class Push:
    """State under the outbox's lock; what stands below `outcome` is the link thread's own."""

    job: PushJob
    progress: Progress
    state: State = State.WAITING
    deadline: float = NEVER  # of the receiver's answer
    blocks: Sequence[int] = ()  # of the pusher's cache, with all positions up to the last that was computed
    mark: Mark | None = None  # on a GPU: what must be done before they are read
    end: PushEnd | None = None
    offered_at: float = 0.0
    round_trip_s: float = 0.0
    finished_at: float = 0.0
    nbytes: int = 0
    reading: bool = False
    outcome: HandoffError | None = None  # decided while `reading`, reported after it
    digests: list[bytes] = field(default_factory=list)
    whole: KVDigest | None = None
    filling_s: float = 0.0

    def result(self, transport: str) -> PushResult:
        """Acknowledged now."""
        return PushResult(
            nbytes=self.nbytes,
            frames=len(self.digests),
            exposed_s=time.monotonic() - self.finished_at,
            round_trip_s=self.round_trip_s,
            filling_s=self.filling_s,
            transport=transport,
        )
