"""Forecasts of the latencies of requests: a pure model of the workers' queues. No clock, no I/O.

A prefill worker computes waiting prompts in order, as many as fit into a step. A decode worker computes one token of
each request per step. Costs are those of `router.placement.cost_model`. `plan` puts waiting requests on workers in the
order of their deadlines, as `router.admission.promising` does later, and returns when each would have its first token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from baton.core import WorkerRef
from router.admission.calibration import Calibration, length_class
from router.placement.promise import Flight, Seat
from router.placement.snapshot import Facts

_EQUAL_S = 1e-9


@dataclass(slots=True)
class Margins:
    """Upper limits of forecasts, by calibration of TTFT and of mean gaps."""

    ttft: Calibration = field(default_factory=Calibration)
    itl: Calibration = field(default_factory=Calibration)

    @property
    def bins(self) -> dict[str, Counter[int]]:
        """Outcomes by latency and tenth of the forecast."""
        return {"ttft": self.ttft.bins, "itl": self.itl.bins}

    def relax(self, now: float) -> None:
        """Have old outliers count less. `now` is on the router's clock."""
        self.ttft.relax(now)
        self.itl.relax(now)

    def ttft_s(self, forecast_s: float) -> float:
        return forecast_s * self.ttft.factor(length_class(forecast_s))

    def late(self, flight: Flight, first: float, now: float) -> bool:
        """Return whether the limit of a forecast, `first`, is after the deadline."""
        return first == math.inf or now + self.ttft_s(first - now) > flight.deadline

    def harms(self, flight: Flight, before: float, after: float, now: float) -> bool:
        """Return whether a change of its forecast makes `flight` late, or later. One that is late even by the forecast
        itself is lost, so that no request waits for it.
        """
        return after > before + _EQUAL_S and before <= flight.deadline and self.late(flight, after, now)

    def longest_s(self, flight: Flight, left: int, now: float) -> float:
        """Return the longest forecast of `left` later steps with which `flight` keeps its mean gap."""
        return flight.longest_s(left, now) / self.itl.factor(flight.gaps_key)


def work_of(flight: Flight, cached: float) -> tuple[float, float]:
    """Return the prompt tokens to compute, and the positions that they attend to."""
    new = max(flight.prompt + flight.done - cached, 1.0)
    return new, new * (cached + (new + 1.0) * 0.5)


def _ranked(flights: Iterable[Flight]) -> list[Flight]:
    """Return the order of a prefill worker. It also ages prompts, but slower than they are computed."""
    return sorted(flights, key=lambda flight: -flight.priority)


class PrefillQueue:
    """The prompts that this router sent to one prefill worker. `chunk` is the most tokens of a step."""

    def __init__(self, chunk: float) -> None:
        self._chunk = chunk
        self._running: dict[Flight, None] = {}
        self._waiting: dict[Flight, None] = {}
        self._began = 0.0

    def __bool__(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def tokens(self) -> float:
        return sum(flight.work[0] for queue in (self._running, self._waiting) for flight in queue)

    def put(self, flight: Flight, now: float) -> None:
        self._waiting = dict.fromkeys(_ranked((*self._waiting, flight)))
        self._step(now)

    def remove(self, flight: Flight, now: float) -> None:
        """Remove a prompt that has its first token or ended. The next step begins after the last one of a step."""
        self._running.pop(flight, None)
        self._waiting.pop(flight, None)
        self._step(now)

    def _step(self, now: float) -> None:
        if self._running or not self._waiting:
            return
        group = next(self._groups(self._waiting))
        self._running, self._began = dict.fromkeys(group), now
        for flight in group:
            del self._waiting[flight]

    def _groups(self, flights: Iterable[Flight]) -> Iterator[list[Flight]]:
        """Yield the prompts of each step. The last one of a step may be computed in part."""
        group: list[Flight] = []
        tokens = 0.0
        for flight in flights:
            if group and tokens + flight.work[0] > self._chunk:
                yield group
                group, tokens = [], 0.0
            group.append(flight)
            tokens += flight.work[0]
        if group:
            yield group

    def _seconds(self, facts: Facts[float], group: Iterable[Flight]) -> float:
        work = [flight.work for flight in group]
        tokens, context = sum(new for new, _ in work), sum(positions for _, positions in work)
        steps = max(math.ceil(tokens / self._chunk), 1)
        return facts.step_s * steps + facts.token_s * tokens + facts.context_s * context

    def idle_s(self, facts: Facts[float], work: tuple[float, float]) -> float:
        """Return the seconds of a prompt alone."""
        return self._seconds(facts, [Flight(0, 0, work=work)])

    def finishes(self, facts: Facts[float], now: float, more: Sequence[Flight] = ()) -> dict[Flight, float]:
        """Return when each prompt would have its first token, with `more` behind those of their priority."""
        at = now
        if self._running:
            at = max(self._began + self._seconds(facts, self._running), now)
        found = dict.fromkeys(self._running, at)
        at += max(facts.backlog - self.tokens, 0.0) * facts.queued_s  # of other routers
        for group in self._groups(_ranked((*self._waiting, *more))):
            at += self._seconds(facts, group)
            found |= dict.fromkeys(group, at)
        return found

    def first(
        self, facts: Facts[float], now: float, flight: Flight, reserved: float, sent: Sequence[Flight] = ()
    ) -> float:
        """Return when `flight`, behind `sent`, has its first token. Its prompt is sent when a decode worker has
        `reserved` blocks, which it does between two steps.
        """
        more = () if flight in self._running or flight in self._waiting else (flight,)
        return max(self.finishes(facts, now, (*sent, *more))[flight], reserved + self.idle_s(facts, flight.work))


class DecodeBatch:
    """The requests on one decode worker at present: `flights` that this router placed, and others by its report.
    `left` has the tokens to come of the former. `free` is the room for tokens, less what their answers may still take.
    """

    def __init__(self, seat: Seat, flights: Iterable[Flight] = ()) -> None:
        facts = self._facts = seat.facts
        self._block_size, self._rows, self.move_s = seat.block_size, seat.rows, seat.move_s
        self.left = {one: one.left for one in flights}  # read once, because a simulation counts it at each read
        self._limits: dict[Flight, float] = {}
        self._foreign = max(facts.requests - len(self.left), 0.0)
        full, left = sum(one.prompt + one.answer for one in self.left), sum(self.left.values())
        self._tokens = full - left / 2
        self._foreign_tokens = max(facts.kv_tokens - (full - left), 0.0) if self._foreign else 0.0
        growth = left + self._block_size * len(self.left)
        self.free = min(facts.capacity, facts.available * self._block_size) - growth

    def _full(self, flight: Flight) -> int:
        return flight.prompt + flight.answer + self._block_size

    def step_s(self, *more: Flight) -> float:
        """Return the seconds of a step, with each request in the middle of the rest of its answer."""
        requests = self._foreign + len(self.left) + len(more)
        tokens = self._foreign_tokens + self._tokens + sum(one.prompt + one.answer - one.left / 2 for one in more)
        return self._facts.step_s + self._facts.token_s * requests + self._facts.context_s * tokens

    def alone_s(self, flight: Flight) -> float:
        """Return the seconds of a step with one request."""
        return self._facts.step_s + self._facts.token_s + self._facts.context_s * (flight.prompt + flight.answer)

    @property
    def running_s(self) -> float:
        """The longest wait for the end of the present step."""
        return self.step_s() if self.left or self._foreign else 0.0

    def has_room(self, flight: Flight) -> bool:
        """Return whether each step has a row for it, and all answers fit at full length, so that none is preempted."""
        return self._full(flight) <= self.free and self._foreign + len(self.left) < self._rows

    @property
    def is_full(self) -> bool:
        """Whether requests that this router has not placed take all rows of a step."""
        return self._foreign >= self._rows

    def limit_s(self, margins: Margins, now: float) -> float | None:
        """Return the longest step that keeps the mean gaps of all promises in this batch, or None without promises. A
        promise that would fail alone in the batch has no limit. All calls have the same `margins` and `now`.
        """
        for one, left in self.left.items():
            if one.promise.given and one not in self._limits:
                longest_s = margins.longest_s(one, left, now)
                self._limits[one] = longest_s if longest_s >= self.alone_s(one) else math.inf
        return min(self._limits.values(), default=None)

    def put(self, flight: Flight) -> None:
        left = self.left[flight] = flight.left
        self._tokens += flight.prompt + flight.answer - left / 2
        self.free -= self._full(flight)

    def end(self, flight: Flight) -> None:
        left = self.left.pop(flight)
        self._limits.pop(flight, None)
        self._tokens -= flight.prompt + flight.answer - left / 2
        self.free += self._full(flight)


class Forecast(NamedTuple):
    """When a waiting request would be placed, and when it would have its first token, on the router's clock. inf if
    never. `step_s` is the step of its decode worker with it.
    """

    start: float
    first: float
    step_s: float


class _Desk:
    """A decode worker in a plan: requests end, and later ones take their place."""

    def __init__(self, seat: Seat, flights: Iterable[Flight], now: float) -> None:
        self.group = seat.facts.group
        self._batch, self._now, self._at = DecodeBatch(seat, flights), now, now
        step_s = self._batch.step_s()
        self._ends: list[tuple[float, int, Flight]] = []
        for number, (one, left) in enumerate(self._batch.left.items()):
            begin = now if one.first_at is not None else max(one.made_at + one.ttft_s, now)
            self._ends.append((begin + left * step_s, number, one))
        heapify(self._ends)

    def start(self, flight: Flight, margins: Margins) -> float:
        """Let requests end until `flight` fits, and return that time, or inf."""
        while not fits(self._batch, flight, margins, self._now):
            if not self._ends:
                return math.inf
            self._at, _, ended = heappop(self._ends)
            self._batch.end(ended)
        return self._at

    @property
    def running_s(self) -> float:
        return self._batch.running_s

    def put(self, flight: Flight, first: float) -> float:
        """Place `flight`, and return the seconds of a step with it."""
        self._batch.put(flight)
        step_s = self._batch.step_s()
        heappush(self._ends, (first + flight.answer * step_s, -len(self._ends), flight))
        return step_s


def fits(batch: DecodeBatch, flight: Flight, margins: Margins, now: float, *, own: bool = True) -> bool:
    """Return whether `flight` and all promises in this batch keep their mean gaps, and all answers have room. A promise
    that would fail alone in the batch does not count, nor that of `flight` if not `own`. A batch without promises takes
    everything.
    """
    given = own and flight.promise.given
    flight.move_s = flight.prompt * batch.move_s
    if given and not batch.has_room(flight):
        return False
    limit_s = batch.limit_s(margins, now)
    if limit_s is None and not given:
        return True
    own_s = margins.longest_s(flight, flight.left, now) if given else math.inf
    return batch.has_room(flight) and batch.step_s(flight) <= min(own_s, math.inf if limit_s is None else limit_s)


Queues = Callable[[WorkerRef], PrefillQueue]
Placed = Callable[[WorkerRef], Iterable[Flight]]


class Plan:
    """Places requests on copies of the workers' queues. `prefills` and `decodes` are the seats of the newest request;
    the cached tokens of each request are its own, `Flight.cached`.
    """

    def __init__(
        self, prefills: Sequence[Seat], decodes: Sequence[Seat], queues: Queues, placed: Placed, margins: Margins,
        now: float,
    ) -> None:  # fmt: skip
        self._prefills, self._queues, self._margins, self._now = prefills, queues, margins, now
        self._desks = [_Desk(seat, placed(seat.ref), now) for seat in decodes]
        self._sent: dict[WorkerRef, list[Flight]] = {seat.ref: [] for seat in prefills}  # at `now`
        self._free: dict[WorkerRef, float] = {}  # when later prompts may begin

    def put(self, flight: Flight) -> Forecast:
        """Place `flight` where it starts first, and return its forecast."""
        starts = [(desk.start(flight, self._margins), n) for n, desk in enumerate(self._desks)]
        start, number = min(starts, default=(math.inf, 0))
        if start == math.inf:
            return Forecast(start, start, math.inf)
        desk = self._desks[number]
        offers = [
            (self._first(seat, flight, start, start + desk.running_s), n)
            for n, seat in enumerate(self._prefills)
            if seat.facts.group == desk.group
        ]
        first, place = min(offers, default=(math.inf, 0))
        if first == math.inf:
            return Forecast(start, first, math.inf)
        seat = self._prefills[place]
        flight.work = work_of(flight, flight.cached.get(seat.ref, 0.0))  # the last offer has set another one
        if start > self._now or self._free.get(seat.ref, 0.0) > self._now:
            self._free[seat.ref] = first
        else:
            self._sent[seat.ref].append(flight)
        return Forecast(start, first, desk.put(flight, first))

    def _first(self, seat: Seat, flight: Flight, start: float, reserved: float) -> float:
        """Return when a prefill worker would compute the first token of `flight`, or inf if that broke a promise."""
        flight.work = work_of(flight, flight.cached.get(seat.ref, 0.0))
        queue, sent = self._queues(seat.ref), self._sent[seat.ref]
        if start <= self._now and seat.ref not in self._free:
            found = queue.finishes(seat.facts, self._now, [*sent, flight])
            if self.breaks(queue, seat, found, sent):
                return math.inf
            return queue.first(seat.facts, self._now, flight, reserved, sent)
        busy = max(queue.finishes(seat.facts, self._now, sent).values(), default=self._now)
        return max(reserved, busy, self._free.get(seat.ref, 0.0)) + queue.idle_s(seat.facts, flight.work)

    def breaks(self, queue: PrefillQueue, seat: Seat, found: dict[Flight, float], sent: Sequence[Flight]) -> bool:
        """Return whether `found` harms a promised prompt."""
        late = [one for one, at in found.items() if self._margins.late(one, at, self._now)]
        if not late:
            return False
        before = queue.finishes(seat.facts, self._now, sent)
        return any(one in before and self._margins.harms(one, before[one], found[one], self._now) for one in late)
