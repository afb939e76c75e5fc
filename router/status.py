"""The router's status for operators, and its stream of views, each made once for all watchers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from heapq import nlargest
from typing import Generic, TypeVar

import structlog

from baton.clock import Clock
from baton.control_plane import Plan
from baton.errors import InvalidRequest, LedgerError, Overloaded
from baton.ledger.control_state import ControlReport, ControlState, Decision
from baton.limits import MAX_SHOWN_REQUESTS, MAX_WATCHERS
from baton.rpc import convert
from baton.rpc.v1 import admin_pb2
from baton.stages import Stage
from router.context import RouterContext
from router.request.client_request import ClientCall
from router.request.observer import ChoiceObserver
from router.workers.stream import WorkerStream

log = structlog.get_logger(__name__)

T = TypeVar("T")

ENDINGS = ("finished", "cancelled", "failed", "refused")
_FRESH_S = 0.09  # less than the shortest interval of a watcher
_SHARE = 20  # a view is kept this many times its making time, so that thousands of workers do not fill the loop
_STALE_S = 2.0  # maximum age: one making that waited for a core must not freeze the view
_LOOK_S = 1.0
_LATELY_S = 5
_INTERVAL_S = (0.1, 60.0)
_RETRY_S = 10.0
_UNPLACED = (Stage.QUEUE, Stage.ROUTE)


class SingleFlight(Generic[T]):
    """A single-flight cache: concurrent callers share one result of `make`, until it is too old. `first` is awaited
    before, outside the measured time, so that a silent Redis does not age the result.
    """

    def __init__(self, first: Callable[[], Awaitable[object]], make: Callable[[], Awaitable[T]], clock: Clock) -> None:
        self._first, self._make, self._clock = first, make, clock
        self._lock = asyncio.Lock()
        self._made: list[T] = []
        self._until = 0.0

    async def get(self) -> T:
        """Return the cached result or make a new one. Raises any error of `make`."""
        async with self._lock:
            if not self._made or self._clock.monotonic() >= self._until:
                await self._first()
                begun = self._clock.monotonic()
                self._made = [await self._make()]
                took_s = self._clock.monotonic() - begun
                self._until = begun + min(max(_FRESH_S, _SHARE * took_s), max(_STALE_S, 2 * took_s))
            return self._made[0]


class RouterStatus:
    """Status of this router, and the stream of its views for watchers. `control` is the controller's latest report, or
    None without a controller or Redis. A watcher pulls, so a slow one skips views and delays no other. `views` have no
    events, are shared by all watchers, and never change.
    """

    def __init__(self, context: RouterContext, control_state: ControlState | None = None) -> None:
        self.control: ControlReport | None = None
        self.views = SingleFlight(self.refresh, self._make, context.sinks.clock)
        self._context, self._control_state = context, control_state
        self._activity = context.sinks.activity
        self._started = context.sinks.clock.monotonic()
        self._decided = 0.0  # time of the last controller decision that was added to the feed
        self._watchers = 0
        self._closed = asyncio.Event()

    async def status(self) -> admin_pb2.StatusReply:
        await self.refresh()
        return self.current()

    def current(self) -> admin_pb2.StatusReply:
        """Return the current status with the `control` that was read last."""
        settings, sinks, queue = self._context.settings, self._context.sinks, self._context.admission
        pool, running = self._context.pool, self._context.running
        ended = {outcome: sinks.outcomes[outcome] for outcome in ENDINGS}
        links = sorted(pool.links, key=lambda link: link.info.ref.worker_id)
        return admin_pb2.StatusReply(
            name=settings.name,
            router_id=sinks.router_id,
            version=settings.version,
            model=settings.model,
            uptime_s=sinks.clock.monotonic() - self._started,
            running=len(running),
            queued=queue.queued,
            queued_tokens=queue.queued_tokens,
            drain_requests_per_s=queue.drain.requests_per_s,
            drain_tokens_per_s=queue.drain.tokens_per_s,
            accepted=sinks.outcomes["accepted"] + sum(call.observer.is_accepted for call in running),
            promises_kept=sinks.promises.outcomes["kept"],
            promises_broken=sinks.promises.broken,
            promises_refused=sinks.promises.outcomes["refused"],
            workers=[_worker(link, pool.note(link)) for link in links],
            control=None if self.control is None else _report(self.control, sinks.clock.wall()),
            **ended,
        )

    async def refresh(self) -> None:
        """Read the controller's report: one Redis round trip, or its timeout if Redis is silent."""
        try:
            self.control = await self._control_state.control() if self._control_state else None
        except LedgerError as error:
            log.warning("board_unreadable", error=str(error))
            self.control = None

    async def run(self) -> None:
        """Track worker arrivals and departures until cancelled, even without watchers."""
        while True:
            self._record_workers()
            self._activity.happenings.settle()
            await asyncio.sleep(_LOOK_S)

    def _record_workers(self) -> None:
        infos = [link.info for link in self._context.pool.connected]
        self._activity.record_workers({(info.ref.worker_id, info.ref.incarnation): info.role for info in infos})

    def close(self) -> None:
        self._closed.set()

    async def watch(
        self, interval_s: float, confirm: Callable[[], None] | None = None
    ) -> AsyncGenerator[tuple[admin_pb2.Live, list[admin_pb2.Happening]], None]:
        """Yield a view every `interval_s` (0 means 1) with the events since the previous one, until `close`.

        Raises InvalidRequest for an interval out of range, Overloaded if there are too many watchers, and any error of
        `confirm`. `confirm` is called before each view, because a watcher may lose its right during an endless stream.
        """
        interval_s, (least, most) = interval_s or 1.0, _INTERVAL_S
        if not least <= interval_s <= most:
            raise InvalidRequest.of("interval_s", f"must be from {least:g} to {most:g} seconds, got {interval_s:g}")
        if self._watchers >= MAX_WATCHERS:
            raise Overloaded(f"{MAX_WATCHERS} clients watch this router already, no more are accepted", _RETRY_S)
        self._watchers += 1
        try:
            sent, happenings = 0, self._activity.happenings
            while not self._closed.is_set():
                if confirm is not None:
                    confirm()
                view = await self.views.get()
                before, sent = sent, happenings.last
                yield view, happenings.since(before)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), interval_s)
        finally:
            self._watchers -= 1

    async def _make(self) -> admin_pb2.Live:
        status = self.current()
        self._record_workers()
        self._add_decisions()
        newest = nlargest(MAX_SHOWN_REQUESTS, self._context.running, key=lambda call: call.arrival)
        self._activity.happenings.settle()
        return admin_pb2.Live(
            time_s=self._context.sinks.clock.wall(),
            status=status,
            requests=[_shown(call, choice) for call in newest for choice in call.observer.choices][:MAX_SHOWN_REQUESTS],
            window=self._activity.recent.window(),
            lately=self._activity.recent.window(_LATELY_S),
        )

    def _add_decisions(self) -> None:
        control, before = self.control, self._decided
        for one in control.decisions if control is not None else ():
            if one.at > before:
                self._decided = max(self._decided, one.at)
                text = one.text.partition("\n")[0].rstrip(":")  # the last output of a process may follow
                self._activity.happenings.add("decision", f"{one.kind}: {text}", at=one.at)


def plan_to_pb(plan: Plan) -> admin_pb2.Plan:
    """Return the plan as a protocol message."""
    return admin_pb2.Plan(**asdict(plan))


def _report(report: ControlReport, wall: float) -> admin_pb2.Control:
    return admin_pb2.Control(
        plan=plan_to_pb(report.plan),
        age_s=max(0.0, wall - report.at),
        slots=[admin_pb2.Slot(**asdict(slot)) for slot in report.slots],
        decisions=[_decision(one, report.at) for one in report.decisions],
        host=report.host,
        outlook=report.outlook,
    )


def _decision(decision: Decision, reported: float) -> admin_pb2.Decision:
    return admin_pb2.Decision(age_s=max(0.0, reported - decision.at), kind=decision.kind, text=decision.text)


def _worker(link: WorkerStream, note: str) -> admin_pb2.WorkerStatus:
    return admin_pb2.WorkerStatus(
        info=convert.info_to_pb(link.info),
        load=convert.load_to_pb(link.view.load),
        state=link.state,
        dispatched=link.view.dispatched,
        note=note,
    )


def _shown(call: ClientCall, choice: ChoiceObserver) -> admin_pb2.RequestView:
    stages, placed = choice.stages, choice.placed
    workers = {}
    if placed is not None and stages.stage not in _UNPLACED:
        workers["decode_worker"] = placed.decode.info.ref.worker_id
        if placed.prefill is not None:
            workers["prefill_worker"] = placed.prefill.info.ref.worker_id
    return admin_pb2.RequestView(
        request_id=call.name,
        choice=choice.choice,
        stage=stages.stage.value,
        prompt_tokens=choice.prompt_tokens,
        tokens=choice.tokens,
        age_s=stages.age_s,
        attempt=choice.attempts,
        deterministic=choice.deterministic,
        **workers,
    )
