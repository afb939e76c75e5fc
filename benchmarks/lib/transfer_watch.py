"""Stand-ins around a measured prefill role that record times: router, sender, and the engine loop's listener."""

from __future__ import annotations

import asyncio
import queue
import time
from typing import TYPE_CHECKING

from baton.rpc.v1 import common_pb2, worker_pb2
from baton.worker.service import Session
from benchmarks.lib.transfer_lane import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from baton.core import HandoffId
    from baton.engine.step_result import StepResult
    from kvtransfer.sender import Sender
    from prefill_workers.worker import PrefillWorker

LONG_S = 10 * WAIT_S
DECODE = "decode"  # the request with timed tokens


class Router(Session):
    """Stand-in for a router's stream that records events with their times."""

    def __init__(self) -> None:
        super().__init__("benchmark", asyncio.new_event_loop(), common_pb2.Load)
        self._said: queue.SimpleQueue[tuple[float, worker_pb2.WorkerEvent]] = queue.SimpleQueue()

    def emit(self, events: Iterable[worker_pb2.WorkerEvent]) -> None:
        """See `Session.emit`."""
        for event in events:
            self._said.put((time.monotonic(), event))

    def wait(self, kind: str) -> tuple[float, worker_pb2.WorkerEvent]:
        """Return the next event of this kind and its time. Raises RuntimeError on failure, queue.Empty on timeout."""
        while True:
            at, event = self._said.get(timeout=LONG_S)
            found = event.WhichOneof("event")
            if found in {"failed", "refused"}:
                raise RuntimeError(str(event))
            if found == kind:
                return at, event


class NotedSender:
    """A sender that records computed layers in `computed_at`, as (time, layers, end)."""

    def __init__(self, sender: Sender) -> None:
        self._computed = sender.computed
        self.begin, self.withdraw, self.finish, self.abort = sender.begin, sender.withdraw, sender.finish, sender.abort
        self.computed_at: list[tuple[float, int, int]] = []

    def computed(self, handoff: HandoffId, blocks: Sequence[int], layers: int, end: int) -> None:
        """See `Sender.computed`."""
        self.computed_at.append((time.monotonic(), layers, end))
        self._computed(handoff, blocks, layers, end)


class Steps:
    """Listener of the engine loop: the measured role, and the token times of a request that decodes here."""

    def __init__(self) -> None:
        self.role: PrefillWorker | None = None
        self._tokens_at: queue.SimpleQueue[float] = queue.SimpleQueue()

    def stepped(self, result: StepResult) -> None:
        """See `StepListener`."""
        if self.role is not None:
            self.role.stepped(result)
        for output in result.outputs:
            if output.key.request_id == DECODE:
                self._tokens_at.put(time.monotonic())

    def tick(self) -> None:
        """Do nothing, because there are no deadlines."""

    def token_times(self, tokens: int) -> list[float]:
        """Return the times of the next `tokens` tokens. Raises queue.Empty on timeout."""
        return [self._tokens_at.get(timeout=LONG_S) for _ in range(tokens)]
