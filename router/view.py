"""What this router knows of a worker, and which workers fit each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.core import Load, WorkerInfo


@dataclass(slots=True)
class WorkerView:
    """What this router knows of one worker: its last report, and what was sent to it since.

    Links and claims write it, and tell the pool that they did (`router/fleet.py`).
    """

    info: WorkerInfo
    load: Load = field(default_factory=Load)
    dispatched: int = 0  # requests that this router has on it
    queued_tokens: int = 0  # prefill: prompt tokens sent there, first token not seen yet
    pending_blocks: int = 0  # decode: blocks asked for, not answered yet, so not in its report
    full: bool = False  # it refused for lack of room since its last report

    @property
    def prefill_backlog(self) -> int:
        """Prompt tokens before a newcomer: as the worker reports them (of all routers), or as we sent them."""
        return max(self.load.queued_tokens, self.queued_tokens)

    @property
    def requests(self) -> int:
        """Requests on it: as the worker reports them (of all routers), or as we sent them."""
        return max(self.load.running + self.load.waiting, self.dispatched)

    @property
    def room(self) -> float:
        """Blocks that a newcomer may have, as far as we know; infinity: nothing of ours is there, so it is asked.

        A worker keeps a block to grow for each running request. One on which we have nothing is always asked:
        then its own answer counts, also "this can never fit".
        """
        if not self.dispatched:
            return math.inf
        return self.load.blocks.available - self.pending_blocks - self.load.running

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a decode worker reserves for `tokens` known tokens: room for one more."""
        return self.info.layout.blocks_for(tokens + 1)


def has_pair(prefill: Sequence[WorkerView], decode: Sequence[WorkerView], *, alike: bool = False) -> bool:
    """Could any two of them hand over to each other, room aside? `alike`: to the bit."""
    left, right = (
        {(view.info.fingerprint, alike and view.info.determinism) for view in views} for views in (prefill, decode)
    )
    return bool(left & right)


def misfit(info: WorkerInfo, others: Sequence[WorkerInfo]) -> str:
    """Why `info` can hand over to none of `others` (or take from none); "": it can, or nobody of them is there."""
    others = [other for other in others if other.role is not info.role]
    if not others or any(other.fingerprint == info.fingerprint for other in others):
        return ""
    other = others[0]
    for what, mine, theirs in (
        ("dtype", info.layout.dtype, other.layout.dtype),
        ("model", info.model, other.model),
        ("KV layout", info.layout.wire, other.layout.wire),
    ):
        if mine != theirs:
            return f"{what} {mine}, {other.ref.worker_id} has {theirs}"
    return f"weights or config differ from those of {other.ref.worker_id}"
