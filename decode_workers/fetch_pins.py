"""Blocks that prefill workers fetch from here, pinned until the push has ended.

Every method runs on the engine thread, except `fetch` and `push_ended`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import structlog

from baton.core import HandoffId, WorkerInfo
from baton.engine.block_pool import Allocation
from baton.engine.engine import Engine
from baton.errors import HandoffError
from baton.worker.engine_loop import EngineLoop
from baton.worker.role import Pusher
from kvtransfer.handoff import PushEnd, PushJob, PushResult

log = structlog.get_logger(__name__)


class FetchPins:
    """The pins and their pushes. Fetches are ignored before `attach`."""

    def __init__(self, info: WorkerInfo, engine: Engine, loop: EngineLoop) -> None:
        self._info = info
        self._engine = engine
        self._loop = loop
        self._history = engine.pool.history
        self._pins: dict[HandoffId, Allocation] = {}
        self._pusher: Pusher | None = None
        self._shared: Callable[[HandoffId], list[int]] = lambda handoff: []

    def __len__(self) -> int:
        return len(self._pins)

    def attach(self, shared: Callable[[HandoffId], list[int]], pusher: Pusher) -> None:
        """Set `shared`, which returns the blocks cached before a reservation, and `pusher`, which sends them."""
        self._shared, self._pusher = shared, pusher

    def holdings(self) -> Mapping[HandoffId, Allocation]:
        """Return the blocks that are being fetched."""
        return self._pins

    def fetch(self, job: PushJob) -> None:
        """Push cached blocks of a reservation to its prefill worker. Called from any thread."""
        self._loop.submit(partial(self._push_back, job))

    def _push_back(self, job: PushJob) -> None:
        shared = self._shared(job.handoff)
        if (
            self._pusher is None
            or job.handoff in self._pins
            or len(shared) * self._info.layout.block_size < job.known_tokens
            or not self._engine.pool.can_share(shared)
        ):
            return  # over, already requested, or invalidated by a failed step
        pin = self._engine.pool.allocate(0, shared=shared)
        assert pin is not None  # sharing needs no free blocks
        self._pins[job.handoff] = pin
        self._history.blocks("owned", job.handoff, pin, shared=len(pin), part="pin")
        try:
            self._pusher.begin(job)
        except (HandoffError, ValueError) as error:
            log.warning("fetch_refused", handoff=job.handoff, error=str(error))
            self._unpin(job.handoff)
            return
        self._pusher.computed(job.handoff, pin.blocks, self._info.layout.layers, job.known_tokens)
        self._pusher.finish(job.handoff, PushEnd())

    def push_ended(self, handoff: HandoffId, outcome: PushResult | HandoffError) -> None:
        """Unpin the blocks of an ended push. Called once per push, from a transfer thread."""
        self._loop.submit(partial(self._unpin, handoff))

    def _unpin(self, handoff: HandoffId) -> None:
        if (pin := self._pins.pop(handoff, None)) is not None:
            self._history.blocks("let_go", handoff, pin, part="pin")
            pin.release()
