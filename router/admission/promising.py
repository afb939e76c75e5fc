"""Admission with promises of latency. See docs/design/admission.md, section "Promises".

A request with a promise is refused immediately unless the plan keeps it together with all promises in force. An
accepted one gets workers now, or waits in a lane of its own, served by deadline before the queue. Every request,
promised or not, gets only workers on which all promises in force are still kept. Without such a worker it waits.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton.clock import Clock
from baton.core import WorkerRef
from baton.errors import InvalidRequest, PromiseRefused
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
_PLANNED = 16  # plans have this many workers of each role and group, those with the most room
_FEW = 4  # decode workers are tried for a request that must not delay the lane, and requests of the lane per turn

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
        self.is_able: Callable[[Any], bool] = lambda _: True  # whether a connected worker can compute a request
        self._outlook, self._place, self._seats_of = outlook, place, seats_of
        self._clock, self._chunk = clock, chunk
        self._queues: defaultdict[WorkerRef, PrefillQueue] = defaultdict(partial(PrefillQueue, chunk))
        self._placed: defaultdict[WorkerRef, dict[Flight, None]] = defaultdict(dict)  # both without empty ones
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
        self.margins.relax(now)
        prefills, decodes = self._outlook(tokens, requirements)
        refusal = self._unable(prefills, decodes)
        if refusal is None:
            _note_cached(flight, prefills)
            prefills, decodes = _roomiest(prefills, decodes)
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
        waiting = [one.flight for one in self.lane if self.is_able(one.requirements)]
        waiting += [flight] if flight is not None else []
        return self._plan(prefills, decodes, waiting, now)

    def _plan(
        self, prefills: Sequence[Seat], decodes: Sequence[Seat], waiting: Iterable[Flight], now: float
    ) -> dict[Flight, Forecast]:
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
        last = Flight(flight.prompt, flight.answer, now, Promise(_ANY_S, asked.itl_s), cached=flight.cached)
        found = self._planned(prefills, decodes, last, now)[last]
        if found.first == math.inf:
            return self._offer_gap(decodes, last, found.start, now)
        ttft_s = now - flight.arrived + self.margins.ttft_s(found.first - now)
        text = f"a TTFT of {_ms(asked.ttft_s)} cannot be promised now, {_ms(ttft_s)} can"
        idle_s = min(PrefillQueue(self._chunk).idle_s(seat.facts, work_of(last, seat.cached)) for seat in prefills)
        if self.margins.ttft_s(idle_s) > asked.ttft_s:
            return PromiseRefused(f"{text}; idle workers do not reach it either", _NEVER_S, ttft_ms=ttft_s * 1e3)
        return PromiseRefused(text, max(ttft_s - asked.ttft_s, _LEAST_RETRY_S), ttft_ms=ttft_s * 1e3)

    def _offer_gap(self, decodes: Sequence[Seat], flight: Flight, start: float, now: float) -> PromiseRefused:
        batches = [DecodeBatch(seat, self._on(seat.ref)) for seat in decodes]
        full = flight.prompt + flight.answer
        if not any(seat.facts.kv_tokens + seat.facts.available * seat.block_size > full for seat in decodes):
            return PromiseRefused(f"no decode worker has room for {full} tokens; set a smaller max_tokens", _NEVER_S)
        if all(batch.is_full for batch in batches):
            return PromiseRefused("requests of other routers take all max_running places of the decode workers", 1.0)
        if flight.promise.itl_s == math.inf:
            text = (
                f"no decode worker has room for {full} tokens now" if start == math.inf else "it would delay a promise"
            )
            return PromiseRefused(text, 1.0)
        factor = self.margins.itl.factor(flight.gaps_key)
        itl_s = flight.mean_gap_s(min(batch.step_s(flight) for batch in batches) * factor, now)
        text = f"a mean time of {_ms(flight.promise.itl_s)} between tokens cannot be promised now, {_ms(itl_s)} can"
        return PromiseRefused(text, _NEVER_S, itl_ms=itl_s * 1e3)

    def place(self, tokens: int, requirements: Any) -> Placement | None:
        """Return a placement that keeps all promises in force, or None if there is none now."""
        flight: Flight | None = requirements.flight
        if flight is None:
            return self._place(tokens, requirements, frozenset(), math.inf)
        now = self._clock.monotonic()
        self.margins.relax(now)
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
        """Return the workers on which `flight` would break a promise, or None if no pair keeps all."""
        free = flight.overdue or flight.attempts > 0 or now > flight.deadline  # its own limits no longer count
        _note_cached(flight, prefills)
        good = [seat for seat in decodes if self._keeps_gaps(seat, flight, now, own=not free)]
        sources = self._keep_prompts(flight, prefills, now, own=not free)
        if not good or (prefills and not sources):
            return None
        ahead = [one.flight for one in self.lane if one.flight is flight or self.is_able(one.requirements)]
        if flight in ahead:  # only promises with an earlier deadline are more urgent
            ahead = ahead[: ahead.index(flight)]
        if ahead:
            sources, good = self._keep_lane(flight, ahead, sources, good, (prefills, decodes), now)
            if not good:
                return None
        kept = {seat.ref for seat in (*sources, *good)}
        return frozenset(seat.ref for seat in (*prefills, *decodes) if seat.ref not in kept)

    def _keeps_gaps(self, seat: Seat, flight: Flight, now: float, *, own: bool) -> bool:
        """Return whether all promised gaps are kept with `flight` on this decode worker."""
        on = self._on(seat.ref)
        if not (own and flight.promise.given) and not any(one.promise.given for one in on):
            return True
        return fits(DecodeBatch(seat, on), flight, self.margins, now, own=own)

    def _keep_prompts(self, flight: Flight, prefills: Sequence[Seat], now: float, *, own: bool) -> list[Seat]:
        """Return the prefill workers on which `flight` breaks no promised TTFT, its own one included if any does."""
        plan, kept, soon = Plan(prefills, (), self._queue, self._on, self.margins, now), [], []
        for seat in prefills:
            flight.work = work_of(flight, seat.cached)
            queue = self._queue(seat.ref)
            found = queue.finishes(seat.facts, now, (flight,))
            if not plan.breaks(queue, seat, found, ()):
                kept.append(seat)
                if own and not self.margins.late(flight, found[flight], now):
                    soon.append(seat)
        return soon or kept

    def _keep_lane(
        self, flight: Flight, ahead: Sequence[Flight], sources: Sequence[Seat], good: Sequence[Seat],
        seats: tuple[Sequence[Seat], Sequence[Seat]], now: float,
    ) -> tuple[list[Seat], list[Seat]]:  # fmt: skip
        """Return a prefill and a decode worker with which `flight` delays none of `ahead` too long, or none."""
        able = [seat for seat in _roomiest((), good)[1] if _room(seat) >= flight.prompt + flight.done]
        if not able:
            return [], []
        prefills, decodes = _roomiest(*seats)
        before = self._plan(prefills, decodes, ahead, now)
        chosen: list[Seat | None] = [*sorted(sources, key=partial(_ready, flight))[:2]] or [None]
        for source in chosen:
            near = [seat for seat in able if source is None or seat.facts.group == source.facts.group]
            for seat in near[:_FEW]:
                after = self._tried(flight, source, seat, partial(self._plan, prefills, decodes, ahead, now), now)
                if not any(self.margins.harms(one, before[one].first, after[one].first, now) for one in ahead):
                    return [] if source is None else [source], [seat]
        return [], []

    def _tried(
        self, flight: Flight, source: Seat | None, target: Seat, plan: Callable[[], dict[Flight, Forecast]], now: float
    ) -> dict[Flight, Forecast]:
        """Return a plan with `flight` on these workers."""
        self._placed[target.ref][flight] = None
        flight.move_s = flight.prompt * target.move_s
        if source is not None:
            flight.work = work_of(flight, source.cached)
            self._queues[source.ref].put(flight, now)
        try:
            return plan()
        finally:
            self._forget(flight, None if source is None else source.ref, target.ref, now)

    def _forget(self, flight: Flight, source: WorkerRef | None, target: WorkerRef, now: float) -> None:
        """Remove `flight` from its workers, and what is empty then."""
        if source is not None and (queue := self._queues.get(source)) is not None:
            queue.remove(flight, now)
            if not queue:
                del self._queues[source]
        if (on := self._placed.get(target)) is not None:
            on.pop(flight, None)
            if not on:
                del self._placed[target]

    def _tightest_s(self, flight: Flight) -> float:
        """Return the longest step that no promised mean gap forbids. It limits prompts on decode workers."""
        return min((one.promise.itl_s for one in (*self._in_force, flight)), default=math.inf)

    # --- progress ------------------------------------------------------------------------------------------------

    def _register(self, flight: Flight, placement: Placement, now: float) -> None:
        """Count `flight` on its workers, and forecast its latencies there."""
        source, target = self._seats_of(placement)
        on = self._placed[target.ref]
        batch = DecodeBatch(target, on)
        flight.attempts += 1
        if source is not None:
            flight.work = work_of(flight, source.cached)
            queue = self._queues[source.ref]
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
        placement.on_end = partial(self._end, flight, None if source is None else source.ref, target.ref)

    def _first(self, flight: Flight, queue: PrefillQueue, then: Callable[[], None]) -> None:
        then()
        now = self._clock.monotonic()
        queue.remove(flight, now)
        if flight.ttft_s > 0 and flight.attempts == 1:
            self.margins.ttft.observe(math.frexp(flight.ttft_s)[1], (now - flight.made_at) / flight.ttft_s)

    def _end(self, flight: Flight, source: WorkerRef | None, target: WorkerRef) -> None:
        self._forget(flight, source, target, self._clock.monotonic())

    def settle(self, flight: Flight, *, complete: bool, failed: bool = False, lost: bool = False) -> str:
        """Count how a choice ended, and return the outcome of its promise, or "" without one. `complete` means that it
        has all tokens, `failed` that an error ended it, `lost` that a worker died during it.
        """
        promised = self._in_force.pop(flight, False) is None
        if complete and flight.attempts == 1 and flight.itl_s > 0 and flight.measured_gap_s > 0:
            self.margins.itl.observe(flight.gaps_key, flight.measured_gap_s / flight.itl_s)
        if not promised:
            return ""
        (ttft, itl), outcome, started = flight.kept, "kept", flight.first_at is not None
        late = not started and self._clock.monotonic() > flight.deadline
        if not (ttft and itl) or late or failed:
            outcome = "broken_death" if lost else "broken_itl" if ttft and started else "broken_ttft"
        elif not complete:
            return ""  # the client ended it while the promise held
        self.outcomes[outcome] += 1
        return outcome

    def _queue(self, ref: WorkerRef) -> PrefillQueue:
        return self._queues.get(ref) or PrefillQueue(self._chunk)

    def _on(self, ref: WorkerRef) -> Iterable[Flight]:
        return self._placed.get(ref, ())


def _ms(seconds: float) -> str:
    return f"{round(seconds * 1e3, 2):.9g} ms"


def _note_cached(flight: Flight, prefills: Sequence[Seat]) -> None:
    """Record the cached tokens of its prompt by prefill worker, for later plans."""
    flight.cached = {seat.ref: seat.cached for seat in prefills if seat.cached}


def _room(seat: Seat) -> float:
    return min(seat.facts.capacity, seat.facts.available * seat.block_size)


def _ready(flight: Flight, seat: Seat) -> float:
    """Return the seconds until a prefill worker has about computed the prompt."""
    return seat.facts.backlog * seat.facts.queued_s + work_of(flight, seat.cached)[0] * seat.facts.token_s


def _roomiest(prefills: Sequence[Seat], decodes: Sequence[Seat]) -> tuple[list[Seat], list[Seat]]:
    """Return the workers for plans: of each role and group those with the shortest queue, or with the most room."""
    taken: Counter[tuple[int, float]] = Counter()
    found: tuple[list[Seat], list[Seat]] = [], []
    by_backlog = sorted(prefills, key=lambda seat: seat.facts.backlog - seat.cached)
    for role, seats in enumerate((by_backlog, sorted(decodes, key=_room, reverse=True))):
        for seat in seats:
            key = role, seat.facts.group
            taken[key] += 1
            if taken[key] <= _PLANNED:
                found[role].append(seat)
    return found


class PromisingAdmission(Admission[Placement]):
    """Admission that gives promises, and that keeps them before it serves the queue. `promises` decides both."""

    def __init__(self, promises: Promises, *rest: Any, **options: Any) -> None:
        """Take the arguments of `Admission`, with `promises` for `place`."""
        super().__init__(promises.place, *rest, **options)
        self.promises, promises.is_able = promises, self._is_able
        self._lane_pending = False
        self._refused_at: dict[str, float] = {}  # by tenant, the last promise for which there was no capacity

    @property
    def queued(self) -> int:
        """The number of requests that wait for capacity: in the queue, and in the lane."""
        return self.waiting + len(self.promises.lane)

    @property
    def queued_tokens(self) -> int:
        return self.waiting_tokens + sum(one.tokens for one in self.promises.lane)

    @property
    def longest_s(self) -> float:
        """The longest wait for capacity until now, or 0."""
        now = self._clock.monotonic()
        return max(self.oldest_s, *(now - one.flight.arrived for one in self.promises.lane), 0.0)

    async def admit(self, ticket: Ticket, tokens: int, requirements: Any = None, **rest: Any) -> Placement:
        """Return a placement like `Admission.admit`. A request with a promise waits in the lane instead of the queue.
        Raises PromiseRefused without waiting. An accepted one is never refused, also not if a worker rejects it later.
        """
        flight = requirements.flight
        again, given = bool(rest.get("returning")), flight is not None and flight.promise.given
        if not given or rest.get("accepted") or (again and flight not in self.promises):
            return await super().admit(ticket, tokens, requirements, **rest)
        if not again:
            flight.tenant = rest.get("tenant", "")
            self._check_fairness(flight, tokens, requirements)
            self._consider(flight, tokens, requirements)
        if not self.promises.lane and (placement := self._place(tokens, requirements)) is not None:
            return placement
        begin = self._clock.monotonic()
        deadline_s = rest.get("deadline_s", math.inf)
        placed = await self._wait_in_lane(flight, tokens, requirements, deadline_s)
        if placed is not None:
            return placed
        flight.overdue = True  # the promise is broken, or there is no worker; its wait in the queue begins now
        left_s = deadline_s - (self._clock.monotonic() - begin)
        rest |= {"returning": True, "accepted": True, "since": None, "deadline_s": left_s}
        return await super().admit(ticket, tokens, requirements, **rest)

    def admit_now(self, tokens: int, requirements: Any = None, *, returning: bool = False) -> Placement | None:
        """Return a placement like `Admission.admit_now`, None for a new request with a promise."""
        flight = requirements.flight
        if flight is not None and flight.promise.given and not (returning or flight in self.promises):
            return None
        return super().admit_now(tokens, requirements, returning=returning)

    def _consider(self, flight: Flight, tokens: int, requirements: Any) -> None:
        try:
            self.promises.consider(flight, tokens, requirements)
        except PromiseRefused as refusal:
            if refusal.retry_after_s < _NEVER_S:
                self._refused_at[flight.tenant] = self._clock.monotonic()
            raise

    def _check_fairness(self, flight: Flight, tokens: int, requirements: Any) -> None:
        """Refuse a promise that no connected worker can compute, or that would delay other requests for too long."""
        hold_s, lane, limits = self._limits.wait_s * _HOLD, self.promises.lane, self._limits
        refusal = None
        if not self._is_able(requirements):
            if wrong := self._why_not(requirements):
                raise InvalidRequest(*wrong)
            refusal = PromiseRefused(requirements.absence)
        elif self.oldest_s > hold_s:
            refusal = PromiseRefused(f"a request without a promise has waited {self.oldest_s:.3g} s", 1.0)
        elif lane and (len(lane) >= limits.requests or tokens + sum(one.tokens for one in lane) > limits.tokens):
            refusal = PromiseRefused(f"{len(lane)} requests with a promise wait already, no more are accepted", 1.0)
        elif self.promises.held_by(flight.tenant) > self._share_of(flight.tenant) * (self.promises.in_force + 1):
            refusal = PromiseRefused("this tenant has its share of promises, and other tenants wait", 1.0)
        if refusal is not None:
            self.promises.outcomes["refused"] += 1
            raise refusal

    def _is_able(self, requirements: Any) -> bool:
        """Return whether a connected decode worker has the capability that a request needs, if it needs any."""
        return self._capability_of(requirements) is None or self._can_serve(requirements)

    def _share_of(self, tenant: str) -> float:
        """Return the tenant's share among those that wait, or got no promise in the last `wait_s` for want of capacity.
        1 if there are no others.
        """
        since = self._clock.monotonic() - self._limits.wait_s
        self._refused_at = {name: at for name, at in self._refused_at.items() if at > since}
        others = {*self._queue.tenants, *self._refused_at, *(one.flight.tenant for one in self.promises.lane)}
        return self._queue.share_among(tenant, others)

    async def _wait_in_lane(self, flight: Flight, tokens: int, requirements: Any, most_s: float) -> Placement | None:
        """Return the placement, or None after the promised TTFT, or after `wait_s` without a capable worker."""
        loop, lane = asyncio.get_running_loop(), self.promises.lane
        waiter = _Waiting(flight, tokens, requirements, loop.create_future())
        lane.append(waiter)
        lane.sort(key=lambda one: one.flight.deadline)
        self._serve_lane()
        try:
            async with asyncio.timeout(min(flight.deadline - self._clock.monotonic(), most_s)) as limit:
                loop.call_later(self._limits.wait_s, self._check_worker, waiter, limit)
                return await waiter.placed
        except BaseException as error:
            if waiter in lane:
                lane.remove(waiter)
            elif waiter.placed.done() and not waiter.placed.cancelled():
                self._release(waiter.placed.result())
            self.changed()  # the next one may fit
            if isinstance(error, TimeoutError):
                return None
            raise

    def _check_worker(self, waiter: _Waiting, limit: asyncio.Timeout) -> None:
        """End a wait without a worker, and repeat this."""
        loop = asyncio.get_running_loop()
        if waiter.placed.done():
            return
        if self._can_serve() and self._is_able(waiter.requirements):
            loop.call_later(self._limits.wait_s, self._check_worker, waiter, limit)
        else:
            limit.reschedule(loop.time())

    def changed(self) -> None:
        """Serve the lane by deadline, then the queue, while there is capacity. A head of the queue that has waited too
        long is first. While the lane has requests, this runs once per turn of the event loop.
        """
        if self._serving or self._lane_pending:
            return
        if not self.promises.lane:
            super().changed()
            return
        self._lane_pending = True
        asyncio.get_running_loop().call_soon(self._serve_both)

    def _serve_both(self) -> None:
        self._lane_pending = False
        if self.oldest_s > self._limits.wait_s * _HOLD:
            super().changed()
        self._serve_lane()
        super().changed()

    def _serve_lane(self) -> None:
        """Place those that delay no earlier deadline too long, until a few find no workers."""
        lane, blocked = self.promises.lane, 0
        for one in tuple(lane):
            if blocked == _FEW:
                return
            if not one.placed.done():
                if not self._is_able(one.requirements):
                    continue
                if (placement := self._place(one.tokens, one.requirements)) is None:
                    blocked += 1
                    continue
                one.placed.set_result(placement)
            lane.remove(one)
