"""What was thought about one sequence so far: to be said again, under another name or to another router."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from baton.worker import events

if TYPE_CHECKING:
    from baton.core import HandoffId, Thought
    from baton.rpc.v1 import worker_pb2


class Thoughts:
    """About consecutive chunks. Of more than `most_bytes`, the oldest are forgotten; None: all are remembered."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = most_bytes
        self._nbytes = 0
        self._kept: deque[Thought] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, thoughts: Iterable[Thought]) -> None:
        """These were made. One about a chunk from before takes the place of that and of all behind: it started over."""
        for thought in thoughts:
            while self._kept and self._kept[-1].chunk != thought.chunk - 1:
                self._forget(self._kept.pop())
            self._kept.append(thought)
            self._nbytes += _nbytes(thought)
        while self._most_bytes is not None and self._nbytes > self._most_bytes:
            self._forget(self._kept.popleft())

    def said(self, handoff: HandoffId) -> list[worker_pb2.WorkerEvent]:
        """All that is remembered, as one event; nothing: none."""
        return [events.thoughts(handoff, self._kept)] if self._kept else []

    def _forget(self, thought: Thought) -> None:
        self._nbytes -= _nbytes(thought)


def _nbytes(thought: Thought) -> int:
    """About what it takes in a message."""
    return 4 + 4 * len(thought.token_ids)
