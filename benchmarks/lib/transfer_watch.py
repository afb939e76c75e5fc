"""What stands around a measured prefill role, and keeps the times: its router, its sender, and its engine's loop."""

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
DECODE = "decode"  # the request whose tokens are timed


class Router(Session):
    """Stands for a router's stream: keeps what is said, with the time."""

    def __init__(self) -> None:
        super().__init__("benchmark", asyncio.new_event_loop(), common_pb2.Load)
        self._said: queue.SimpleQueue[tuple[float, worker_pb2.WorkerEvent]] = queue.SimpleQueue()

    def emit(self, events: Iterable[worker_pb2.WorkerEvent]) -> None:
        """See `Session.emit`."""
        for event in events:
            self._said.put((time.monotonic(), event))

    def wait(self, kind: str) -> tuple[float, worker_pb2.WorkerEvent]:
        """The next event of this kind and its time. Raises RuntimeError for a failure, queue.Empty when none comes."""
        while True:
            at, event = self._said.get(timeout=LONG_S)
            found = event.WhichOneof("event")
            if found in {"failed", "refused"}:
                raise RuntimeError(str(event))
            if found == kind:
                return at, event


class NotedSender:
    """A sender as the role knows it. `computed_at`: what was said to be computed, and when: (time, layers, end)."""

    def __init__(self, sender: Sender) -> None:
        self._computed = sender.computed
        self.begin, self.withdraw, self.finish, self.abort = sender.begin, sender.withdraw, sender.finish, sender.abort
        self.computed_at: list[tuple[float, int, int]] = []

    def computed(self, handoff: HandoffId, blocks: Sequence[int], layers: int, end: int) -> None:
        """See `Sender.computed`."""
        self.computed_at.append((time.monotonic(), layers, end))
        self._computed(handoff, blocks, layers, end)


class Steps:
    """Whom the engine's loop tells: the role that is measured, and the clock of a request that decodes here."""

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
        """Nothing has a deadline here."""

    def token_times(self, tokens: int) -> list[float]:
        """When each of the next `tokens` came. Raises queue.Empty when one does not."""
        return [self._tokens_at.get(timeout=LONG_S) for _ in range(tokens)]
