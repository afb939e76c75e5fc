"""The thoughts of one sequence so far, kept to repeat them under another handoff id or to another router."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from baton.worker import events

if TYPE_CHECKING:
    from baton.core import HandoffId, Thought
    from baton.rpc.v1 import worker_pb2


class Thoughts:
    """Thoughts about consecutive chunks. Beyond `most_bytes` (None: no limit) the oldest are dropped."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = most_bytes
        self._nbytes = 0
        self._kept: deque[Thought] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, thoughts: Iterable[Thought]) -> None:
        """Append thoughts. One about an earlier chunk replaces that chunk and all later ones: it was recomputed."""
        for thought in thoughts:
            while self._kept and self._kept[-1].chunk != thought.chunk - 1:
                self._forget(self._kept.pop())
            self._kept.append(thought)
            self._nbytes += _nbytes(thought)
        while self._most_bytes is not None and self._nbytes > self._most_bytes:
            self._forget(self._kept.popleft())

    def events(self, handoff: HandoffId) -> list[worker_pb2.WorkerEvent]:
        """Return all thoughts kept as one event, or no event."""
        return [events.thoughts(handoff, self._kept)] if self._kept else []

    def _forget(self, thought: Thought) -> None:
        self._nbytes -= _nbytes(thought)


def _nbytes(thought: Thought) -> int:
    """Return the approximate size in a message, in bytes."""
    return 4 + 4 * len(thought.token_ids)
