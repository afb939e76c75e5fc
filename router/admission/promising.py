"""Admission with promises of latency. See docs/design/admission.md, section "Promises".

A request with a promise is refused immediately unless the plan keeps it together with all promises in force. An
accepted one gets workers now, or waits in a lane of its own, served by deadline before the queue. Every request,
promised or not, gets only workers on which all promises in force are still kept. Without such a worker it waits.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.clock import Clock
from baton.core import WorkerRef
from baton.errors import PromiseRefused
from baton.metrics.base import PROMISES
from router.admission.admission import Admission, Ticket
from router.admission.forecast import DecodeBatch, Forecast, Margins, Plan, PrefillQueue, fits, work_of
from router.parsing.ranges import Promise
from router.placement.promise import Flight, Seat
from router.workers.placement import Placement

_LEAST_RETRY_S = 0.05
_ANY_S = 1e9  # a TTFT that every worker reaches
_HOLD = 0.5  # share of the longest wait: while a request without a promise has waited this long, none is given
_NEVER_S = 60.0  # retry delay if idle workers cannot keep the promise either

Outlook = Callable[[int, Any], tuple[Sequence[Seat], Sequence[Seat]]]
PlaceOn = Callable[[int, Any, frozenset[WorkerRef], float], Placement | None]
SeatsOf = Callable[[Placement], tuple[Seat | None, Seat]]


@dataclass(eq=False, slots=True)
class _Waiting:
    flight: Flight
    tokens: int
    requirements: Any
    placed: asyncio.Future[Placement]


class Promises:
    """The promises in force, and the forecasts for them. `outlook` returns the seats of prefill and decode workers for
    a request. `place` returns a placement without the workers to avoid, in steps of at most so many seconds. `seats_of`
    returns the seats of its prefill and decode worker before it. `chunk` is the most prompt tokens of a prefill step.
    """

    def __init__(
        self, outlook: Outlook, place: PlaceOn, seats_of: SeatsOf, clock: Clock, chunk: float = math.inf
    ) -> None:
        self.margins = Margins()
        self.outcomes: Counter[str] = Counter(dict.fromkeys(PROMISES, 0))
        self.lane: list[_Waiting] = []  # by deadline
        self._outlook, self._place, self._seats_of = outlook, place, seats_of
        self._clock, self._chunk = clock, chunk
        self._queues: dict[WorkerRef, PrefillQueue] = {}
        self._placed: dict[WorkerRef, dict[Flight, None]] = {}
        self._in_force: dict[Flight, None] = {}  # placed or in the lane

    @property
    def in_force(self) -> int:
        return len(self._in_force)

    @property
    def broken(self) -> int:
        return sum(count for outcome, count in self.outcomes.items() if outcome.startswith("broken"))

    def __contains__(self, flight: Flight) -> bool:
        return flight in self._in_force

    def held_by(self, tenant: str) -> int:
        """Return the number of promises in force for a tenant."""
        return sum(flight.tenant == tenant for flight in self._in_force)

    # --- decisions -----------------------------------------------------------------------------------------------

    def consider(self, flight: Flight, tokens: int, requirements: Any) -> None:
        """Accept the promise of a new request, so that it is in force from now on. Raises PromiseRefused."""
        now = self._clock.monotonic()
        prefills, decodes = self._outlook(tokens, requirements)
        refusal = self._unable(prefills, decodes)
        if refusal is None:
            found = self._planned(prefills, decodes, flight, now)
            refusal = self._refusal(prefills, decodes, flight, found, now)
        if refusal is not None:
            self.outcomes["refused"] += 1
            raise refusal
        self._in_force[flight] = None
        flight.made_at, flight.ttft_s = now, found[flight].first - now

    def _unable(self, prefills: Sequence[Seat], decodes: Sequence[Seat]) -> PromiseRefused | None:
        if not prefills or not decodes:
            return PromiseRefused("no prefill and decode worker that can promise a latency are connected now")
        if not all(seat.known for seat in (*prefills, *decodes)):
            return PromiseRefused("no latency can be promised before each worker has measured some steps")
        return None

    def _planned(
        self, prefills: Sequence[Seat], decodes: Sequence[Seat], flight: Flight | None, now: float
    ) -> dict[Flight, Forecast]:
        """Return the forecasts of all waiting promises, and of `flight` among them, by deadline."""
        waiting = [one.flight for one in self.lane]
        waiting += [flight] if flight is not None else []
        plan = Plan(prefills, decodes, self._queue, self._on, self.margins, now)
        return {one: plan.put(one) for one in sorted(waiting, key=lambda one: one.deadline)}

    def _refusal(
        self, prefills: Sequence[Seat], decodes: Sequence[Seat], flight: Flight, found: dict[Flight, Forecast],
        now: float,
    ) -> PromiseRefused | None:  # fmt: skip
        """Return why `flight` cannot be promised, with limits that could be, or None."""
        late = [one for one, forecast in found.items() if self.margins.late(one, forecast.first, now)]
        if not late:
            return None
        if flight not in late:
            before = self._planned(prefills, decodes, None, now)
            if not any(self.margins.harms(one, before[one].first, found[one].first, now) for one in late):
                return None
        return self._offer(prefills, decodes, flight, now)

    def _offer(self, prefills: Sequence[Seat], decodes: Sequence[Seat], flight: Flight, now: float) -> PromiseRefused:
        """Return the refusal: the least TTFT behind all promises, or with them the least mean gap."""
        asked = flight.promise
        last = Flight(flight.prompt, flight.answer, now, Promise(_ANY_S, asked.itl_s))
        first = self._planned(prefills, decodes, last, now)[last].first
        if first == math.inf:
            return self._offer_gap(decodes, last, now)
        ttft_s = now - flight.arrived + self.margins.ttft_s(first - now)
        text = f"a TTFT of {asked.ttft_s * 1e3:.4g} ms cannot be promised now, {ttft_s * 1e3:.4g} ms can"
        idle_s = min(PrefillQueue(self._chunk).idle_s(seat.facts, work_of(last, seat.cached)) for seat in prefills)
        if self.margins.ttft_s(idle_s) > asked.ttft_s:
            return PromiseRefused(f"{text}; idle workers do not reach it either", _NEVER_S, ttft_ms=ttft_s * 1e3)
        return PromiseRefused(text, max(ttft_s - asked.ttft_s, _LEAST_RETRY_S), ttft_ms=ttft_s * 1e3)

    def _offer_gap(self, decodes: Sequence[Seat], flight: Flight, now: float) -> PromiseRefused:
        batches = [DecodeBatch(seat, self._on(seat.ref)) for seat in decodes]
        full = flight.prompt + flight.answer
        if not any(seat.facts.kv_tokens + seat.facts.available * seat.block_size > full for seat in decodes):
            return PromiseRefused(f"no decode worker has room for {full} tokens; set a smaller max_tokens", _NEVER_S)
        factor = self.margins.itl.factor(flight.gaps_key)
        itl_s = flight.mean_gap_s(min(batch.step_s(flight) for batch in batches) * factor, now)
        asked_ms, least_ms = flight.promise.itl_s * 1e3, itl_s * 1e3
        text = f"a mean time of {asked_ms:.4g} ms between tokens cannot be promised now, {least_ms:.4g} ms can"
        return PromiseRefused(text, _NEVER_S, itl_ms=least_ms)

    def place(self, tokens: int, requirements: Any) -> Placement | None:
        """Return a placement that keeps all promises in force, or None if there is none now."""
        flight: Flight | None = requirements.flight
        if flight is None:
            return self._place(tokens, requirements, frozenset(), math.inf)
        now = self._clock.monotonic()
        avoid: frozenset[WorkerRef] | None = frozenset()
        if self._in_force:
            avoid = self._avoided(flight, *self._outlook(tokens, requirements), now)
        if avoid is None:
            return None
        placement = self._place(tokens, requirements, avoid, self._tightest_s(flight))
        if placement is not None:
            self._register(flight, placement, now)
        return placement

    def _avoided(
        self, flight: Flight, prefills: Sequence[Seat], decodes: Sequence[Seat], now: float
    ) -> frozenset[WorkerRef] | None:
        """Return the workers on which `flight` would break a promise, or None if those are all decode workers."""
        avoid = {seat.ref for seat in decodes if not self._keeps_all(seat, flight, prefills, decodes, now)}
        if len(avoid) == len(decodes):
            return None
        for seat in prefills:
            flight.work = work_of(flight, seat.cached)
            queue = self._queue(seat.ref)
            plan = Plan(prefills, (), self._queue, self._on, self.margins, now)
            if plan.breaks(queue, seat, queue.finishes(seat.facts, now, (flight,)), ()):
                avoid.add(seat.ref)
        if prefills and all(seat.ref in avoid for seat in prefills):
            return None
        return frozenset(avoid)

    def _keeps_all(
        self, seat: Seat, flight: Flight, prefills: Sequence[Seat], decodes: Sequence[Seat], now: float
    ) -> bool:
        """Return whether all promises are kept with `flight` on this decode worker."""
        free = flight.overdue or flight.attempts > 0 or now > flight.deadline  # its own limit no longer counts
        if not fits(DecodeBatch(seat, self._on(seat.ref)), flight, self.margins, now, own=not free):
            return False
        if not self.lane or flight.promise.given:  # one from the lane is the most urgent
            return True
        before = self._planned(prefills, decodes, None, now)
        on = self._on(seat.ref)
        on[flight] = None
        try:
            after = self._planned(prefills, decodes, None, now)
        finally:
            del on[flight]
        return not any(self.margins.harms(one, before[one].first, after[one].first, now) for one in after)

    def _tightest_s(self, flight: Flight) -> float:
        """Return the longest step that no promised mean gap forbids. It limits prompts on decode workers."""
        return min((one.promise.itl_s for one in (*self._in_force, flight)), default=math.inf)

    # --- progress ------------------------------------------------------------------------------------------------

    def _register(self, flight: Flight, placement: Placement, now: float) -> None:
        """Count `flight` on its workers, and forecast its latencies there."""
        source, target = self._seats_of(placement)
        on = self._on(placement.decode.info.ref)
        batch = DecodeBatch(target, on)
        flight.attempts += 1
        if source is not None:
            flight.work = work_of(flight, source.cached)
            queue = self._queue(source.ref)
            queue.put(flight, now)
            if not flight.ttft_s and source.known and flight.attempts == 1:
                first = queue.first(source.facts, now, flight, now + batch.running_s)
                flight.made_at, flight.ttft_s = now, first - now
            for one, at in queue.finishes(source.facts, now).items():  # a step may take later prompts, too
                one.ttft_s = max(one.ttft_s, at - one.made_at) if one.ttft_s else 0.0
            placement.on_first = partial(self._first, flight, queue, placement.on_first)
        flight.move_s = flight.prompt * target.move_s
        step_s = batch.step_s(flight)
        for one in (*on, flight) if target.known else ():
            one.itl_s = max(one.itl_s, one.mean_gap_s(step_s, now))
        on[flight] = None
        placement.on_end = partial(self._end, flight, placement)

    def _first(self, flight: Flight, queue: PrefillQueue, then: Callable[[], None]) -> None:
        then()
        now = self._clock.monotonic()
        queue.remove(flight, now)
        if flight.ttft_s > 0 and flight.attempts == 1:
            self.margins.ttft.observe(math.frexp(flight.ttft_s)[1], (now - flight.made_at) / flight.ttft_s)

    def _end(self, flight: Flight, placement: Placement) -> None:
        if placement.prefill is not None:
            self._queue(placement.prefill.info.ref).remove(flight, self._clock.monotonic())
        self._on(placement.decode.info.ref).pop(flight, None)

    def settle(self, flight: Flight, *, complete: bool, failed: bool = False, lost: bool = False) -> str:
        """Count how a choice ended, and return the outcome of its promise, or "" without one. `complete` means that it
        has all tokens, `failed` that an error ended it, `lost` that a worker died during it.
        """
        promised = self._in_force.pop(flight, False) is None
        if complete and flight.attempts == 1 and flight.itl_s > 0 and flight.measured_gap_s > 0:
            self.margins.itl.observe(flight.gaps_key, flight.measured_gap_s / flight.itl_s)
        if not promised:
            return ""
        (ttft, itl), outcome = flight.kept, "kept"
        late = flight.first_at is None and self._clock.monotonic() > flight.deadline
        if not (ttft and itl) or late or failed:
            outcome = "broken_death" if lost else "broken_itl" if ttft and not late and not failed else "broken_ttft"
        elif not complete:
            return ""  # the client ended it while the promise held
        self.outcomes[outcome] += 1
        return outcome

    def _queue(self, ref: WorkerRef) -> PrefillQueue:
        return self._queues.setdefault(ref, PrefillQueue(self._chunk))

    def _on(self, ref: WorkerRef) -> dict[Flight, None]:
        return self._placed.setdefault(ref, {})


class PromisingAdmission(Admission[Placement]):
    """Admission that gives promises, and that keeps them before it serves the queue. `promises` decides both."""

    def __init__(self, promises: Promises, *rest: Any, **options: Any) -> None:
        """Take the arguments of `Admission`, with `promises` for `place`."""
        super().__init__(promises.place, *rest, **options)
        self.promises = promises

    async def admit(self, ticket: Ticket, tokens: int, requirements: Any = None, **rest: Any) -> Placement:
        """Return a placement like `Admission.admit`. A request with a promise waits in the lane instead of the queue.
        Raises PromiseRefused without waiting; an accepted promise is never refused later.
        """
        flight = requirements.flight
        if flight is None or not flight.promise.given or rest.get("returning") or rest.get("accepted"):
            return await super().admit(ticket, tokens, requirements, **rest)
        flight.tenant = rest.get("tenant", "")
        self._check_fairness(flight)
        self.promises.consider(flight, tokens, requirements)
        if not self.promises.lane and (placement := self._place(tokens, requirements)) is not None:
            return placement
        try:
            async with asyncio.timeout(min(self._limits.wait_s, rest.get("deadline_s", math.inf))):
                return await self._wait_in_lane(flight, tokens, requirements)
        except TimeoutError:  # no worker, or the deadline: the queue ends it with the right error
            flight.overdue = True
            return await super().admit(ticket, tokens, requirements, **{**rest, "returning": True})

    def admit_now(self, tokens: int, requirements: Any = None, *, returning: bool = False) -> Placement | None:
        """Return a placement like `Admission.admit_now`, None for a new request with a promise."""
        flight = requirements.flight
        if flight is not None and flight.promise.given and not (returning or flight in self.promises):
            return None
        return super().admit_now(tokens, requirements, returning=returning)

    def _check_fairness(self, flight: Flight) -> None:
        """Refuse a promise that would delay requests without one, or other tenants, for too long."""
        hold_s, total = self._limits.wait_s * _HOLD, self.promises.in_force
        refusal = None
        if self.oldest_s > hold_s:
            refusal = PromiseRefused(f"a request without a promise has waited {self.oldest_s:.3g} s", 1.0)
        elif self.waiting and self.promises.held_by(flight.tenant) > self._queue.share_of(flight.tenant) * (total + 1):
            refusal = PromiseRefused("this tenant has its share of promises, and other requests wait", 1.0)
        if refusal is not None:
            self.promises.outcomes["refused"] += 1
            raise refusal

    async def _wait_in_lane(self, flight: Flight, tokens: int, requirements: Any) -> Placement:
        waiter = _Waiting(flight, tokens, requirements, asyncio.get_running_loop().create_future())
        lane = self.promises.lane
        lane.append(waiter)
        lane.sort(key=lambda one: one.flight.deadline)
        self._serve_lane()
        try:
            return await waiter.placed
        except BaseException:
            if waiter in lane:
                lane.remove(waiter)
            elif waiter.placed.done() and not waiter.placed.cancelled():
                self._release(waiter.placed.result())
            raise

    def changed(self) -> None:
        """Serve the lane by deadline, then the queue, while there is capacity."""
        if not self._serving:
            self._serve_lane()
            super().changed()

    def _serve_lane(self) -> None:
        lane = self.promises.lane
        while lane:
            first = lane[0]
            if not first.placed.done():
                if (placement := self._place(first.tokens, first.requirements)) is None:
                    return
                first.placed.set_result(placement)
            lane.remove(first)
