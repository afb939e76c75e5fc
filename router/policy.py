"""Which pair of workers takes a request: pure functions over what the router knows of the workers.

No network, no clock, no randomness, so that tests, the planner and the simulator run what production runs.
Load is counted when a request is dispatched, not when its first byte comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.core import Load, WorkerInfo


@dataclass(slots=True)
class WorkerView:
    """What this router knows of one worker: its last report, and what was sent to it since. Policies only read it."""

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

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a decode worker reserves for `tokens` known tokens: room for one more."""
        return self.info.layout.blocks_for(tokens + 1)

    def has_room(self, tokens: int) -> bool:
        """Would a reservation for `tokens` known tokens be granted, as far as we know?

        A worker keeps a block to grow for each running request. One on which we have nothing is always asked:
        then its own answer counts, also "this can never fit".
        """
        if self.full:
            return False
        blocks = self.load.blocks
        room = blocks.available - self.pending_blocks - self.load.running
        return self.dispatched == 0 or self.blocks_for(tokens) <= room


class Pair(NamedTuple):
    """Who prefills and who decodes."""

    prefill: WorkerView
    decode: WorkerView


# (prefill workers, decode workers, known tokens, how many were chosen before) -> a pair, or None: nobody has room now.
Policy = Callable[[Sequence[WorkerView], Sequence[WorkerView], int, int], Pair | None]


def has_pair(prefill: Sequence[WorkerView], decode: Sequence[WorkerView]) -> bool:
    """Could any two of them hand over to each other, room aside?"""
    return bool({view.info.fingerprint for view in prefill} & {view.info.fingerprint for view in decode})


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


def least_loaded(prefill: Sequence[WorkerView], decode: Sequence[WorkerView], tokens: int, turn: int) -> Pair | None:
    """The decode worker with the fewest requests among those with room; the prefill worker with the least to do."""
    prefill, decode = _candidates(prefill, decode, tokens)
    if not decode:
        return None
    chosen = min(decode, key=lambda view: (view.requests, -view.load.blocks.available, view.info.ref.worker_id))
    able = [view for view in prefill if view.info.fingerprint == chosen.info.fingerprint]
    return Pair(min(able, key=lambda view: (view.prefill_backlog, view.dispatched, view.info.ref.worker_id)), chosen)


def round_robin(prefill: Sequence[WorkerView], decode: Sequence[WorkerView], tokens: int, turn: int) -> Pair | None:
    """In turn, by worker id, skipping who has no room."""
    prefill, decode = _candidates(prefill, decode, tokens)
    if not decode:
        return None
    chosen = _in_turn(decode, turn)
    return Pair(_in_turn([view for view in prefill if view.info.fingerprint == chosen.info.fingerprint], turn), chosen)


POLICIES: dict[str, Policy] = {"least_loaded": least_loaded, "round_robin": round_robin}


def _candidates(
    prefill: Sequence[WorkerView], decode: Sequence[WorkerView], tokens: int
) -> tuple[list[WorkerView], list[WorkerView]]:
    """Those that can take the request, each with a counterpart of its fingerprint."""
    able = [view for view in prefill if not view.full]
    fingerprints = {view.info.fingerprint for view in able}
    return able, [view for view in decode if view.info.fingerprint in fingerprints and view.has_room(tokens)]


def _in_turn(views: Sequence[WorkerView], turn: int) -> WorkerView:
    return sorted(views, key=lambda view: view.info.ref.worker_id)[turn % len(views)]
