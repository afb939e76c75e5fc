"""What both roles need to read a router's commands, of which any field may be wrong."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from baton.errors import InvalidRequest
from baton.rpc.v1 import worker_pb2

if TYPE_CHECKING:
    from baton.clock import Clock


def deadline_after(seconds: float, clock: Clock, field: str = "deadline_s") -> float | None:
    """The moment `seconds` from now; 0 is none. Raises InvalidRequest for what no clock would ever reach."""
    if not 0 <= seconds < math.inf:  # a NaN is in no range
        raise InvalidRequest.of(field, f"must be finite and at least 0, got {seconds}")
    return clock.monotonic() + seconds if seconds else None


def not_taken(command: worker_pb2.RouterCommand, detail: str) -> list[worker_pb2.WorkerEvent]:
    """The answer to a malformed command, under the very id it came with; a Release is never answered."""
    match command.WhichOneof("command"):
        case "reserve":
            handoff = command.reserve.handoff
        case "prefill":
            handoff = command.prefill.handoff
        case "repush":
            handoff = command.repush.handoff
        case "fence":
            handoff = command.fence.handoff
        case "attach":
            handoff = command.attach.handoff
        case _:
            return []
    refused = worker_pb2.Refused(reason=worker_pb2.REFUSAL_REASON_INVALID, detail=detail)
    return [worker_pb2.WorkerEvent(handoff=handoff, refused=refused)]
