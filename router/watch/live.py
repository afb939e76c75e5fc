"""What goes on here, again and again, for as many as watch: made once, shown to all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from heapq import nlargest

from baton.errors import InvalidRequest, Overloaded
from baton.limits import MAX_SHOWN_REQUESTS, MAX_WATCHERS
from baton.rpc.v1 import admin_pb2
from baton.stages import Stage
from router.call import Call
from router.floor import Floor
from router.lifecycle import Life
from router.watch.overview import Overview
from router.watch.shared import Shared

_LOOK_S = 1.0
_LATELY_S = 5
_INTERVAL_S = (0.1, 60.0)
_RETRY_S = 10.0
_UNPLACED = (Stage.QUEUE, Stage.ROUTE)


class Live:
    """One per router. A watcher asks when it is ready for more, so a slow one misses views and holds up nobody.

    `views`, which have no happenings, are shared by all who watch, and never changed.
    """

    def __init__(self, floor: Floor, overview: Overview) -> None:
        self._floor = floor
        self._overview = overview
        self.views = Shared(overview.look, self._make, floor.clock)
        self._decided = 0.0  # when the controller decided what was told last
        self._watchers = 0
        self._closed = asyncio.Event()

    async def run(self) -> None:
        """See who comes and goes, whether or not anybody watches; for ever."""
        while True:
            self._floor.seen.look(self._floor.pool.links)
            self._floor.seen.happenings.settle()
            await asyncio.sleep(_LOOK_S)

    def close(self) -> None:
        """Whoever watches is through."""
        self._closed.set()

    async def watch(
        self, interval_s: float, confirm: Callable[[], None] | None = None
    ) -> AsyncGenerator[tuple[admin_pb2.Live, list[admin_pb2.Happening]], None]:
        """A view every `interval_s` (0: 1), with what happened since the one before, until `close`.

        Raises InvalidRequest for an interval out of range, Overloaded when too many watch, and what `confirm` raises:
        it is asked before each view whether the watcher still may, since this ends only when either side does.
        """
        interval_s, (least, most) = interval_s or 1.0, _INTERVAL_S
        if not least <= interval_s <= most:
            raise InvalidRequest.of("interval_s", f"must be from {least:g} to {most:g} seconds, got {interval_s:g}")
        if self._watchers >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} watch this router already, no more may", _RETRY_S)
        self._watchers += 1
        try:
            known, happenings = 0, self._floor.seen.happenings
            while not self._closed.is_set():
                if confirm is not None:
                    confirm()
                view = await self.views.get()
                before, known = known, happenings.last
                yield view, happenings.since(before)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), interval_s)
        finally:
            self._watchers -= 1

    async def _make(self) -> admin_pb2.Live:
        floor, seen = self._floor, self._floor.seen
        status = self._overview.known()
        seen.look(floor.pool.links)
        self._tell_decisions()
        newest = nlargest(MAX_SHOWN_REQUESTS, floor.running, key=lambda call: call.arrival)
        seen.happenings.settle()
        return admin_pb2.Live(
            time_s=floor.clock.wall(),
            status=status,
            requests=[_shown(call, life) for call in newest for life in call.lives][:MAX_SHOWN_REQUESTS],
            window=seen.recent.window(),
            lately=seen.recent.window(_LATELY_S),
        )

    def _tell_decisions(self) -> None:
        control, known = self._overview.control, self._decided
        for one in control.decisions if control is not None else ():
            if one.at > known:
                self._decided = max(self._decided, one.at)
                text = one.text.partition("\n")[0].rstrip(":")  # what a process wrote last may follow; it is in its log
                self._floor.seen.happenings.add("decision", f"{one.kind}: {text}", at=one.at)


def _shown(call: Call, life: Life) -> admin_pb2.RequestView:
    stage, placed = life.stages.stage, life.placed
    workers = {}
    if placed is not None and stage not in _UNPLACED:
        workers["decode_worker"] = placed.decode.info.ref.worker_id
        if placed.prefill is not None:
            workers["prefill_worker"] = placed.prefill.info.ref.worker_id
    return admin_pb2.RequestView(
        request_id=call.name,
        choice=life.choice,
        stage=stage.value,
        prompt_tokens=call.prompt_tokens,
        tokens=len(life.delivery.ids),
        age_s=life.stages.age_s,
        attempt=life.attempts,
        deterministic=call.deterministic,
        **workers,
    )
