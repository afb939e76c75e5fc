"""Admission of requests: a queue for those that no pair of workers has capacity for, and its limits.

`fair_queue` has the order. The head is served first, even if a smaller request behind it would fit. A request keeps its
ticket. One that returns, because a decode worker ran full or preempted it, regains its place and is never rejected.

A new request is rejected if the queue holds too many requests or tokens, or if its predicted wait is too long: the work
ahead of it, divided by the queue's recent service rate. An accepted request is never rejected for lack of capacity. It
waits until its deadline, or until for `QueueLimits.wait_s` no capable worker has been connected and none was starting.

Requests that need a capability no connected worker has wait aside, by capability. They keep their tickets and do not
block the queue. When a capable worker connects, they join the queue. If the last capable worker is lost, the head of
the queue moves aside.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from baton.clock import Clock
from baton.errors import BatonError, DeadlineExceeded, InvalidRequest, NoWorker, Overloaded, Violation
from router.admission.fair_queue import OVERTAKES, Entry, FairQueue, Ticket, ticket_for

__all__ = ["OVERTAKES", "Admission", "QueueLimits", "Ticket", "ticket_for"]

PlacementT = TypeVar("PlacementT")

_LEAST_RETRY_S = 0.5
_CHECKS, _CHECK_S = 8, 1.0  # an accepted request checks for workers 8 times per `wait_s`, at least each second
_LOADING_S = 600.0  # for a worker to start, as its supervisor allows
_RESERVE = 8  # 1/8 on top of a limit is reserved for tenants below their share
_WINDOW_S = 5.0
_WINDOW_REQUESTS = 32  # a longer window if this many requests take longer
_ENOUGH = 8.0  # requests before the rate counts as measured


class DrainRate:
    """The service rate, exponentially weighted over the last 5 s, or the last 32 requests if those take longer. Only
    samples taken while the queue is non-empty count. A gap counts as `longest_s` at most: no request waits longer.
    """

    def __init__(self, clock: Clock, longest_s: float) -> None:
        self._clock, self._longest_s = clock, longest_s
        self._requests = self._tokens = self._busy_s = 0.0
        self._since: float | None = None  # the last sample while the queue is non-empty, else None

    @property
    def measured(self) -> bool:
        return self._requests >= _ENOUGH

    @property
    def requests_per_s(self) -> float:
        return self._per_s(self._requests)

    @property
    def tokens_per_s(self) -> float:
        return self._per_s(self._tokens)

    def watch(self, *, waiting: bool) -> None:
        """Record whether the queue is non-empty. Call it after every possible change."""
        if waiting and self._since is None:
            self._since = self._clock.monotonic()
        elif not waiting:
            self._busy_s += self._lap()
            self._since = None

    def served(self, tokens: int) -> None:
        """Record that a request of `tokens` tokens was served. Ignored while the queue is empty."""
        if self._since is None:
            return
        gap = self._lap()
        keep = max(1 - 1 / _WINDOW_REQUESTS, math.exp(-gap / _WINDOW_S))
        self._requests = self._requests * keep + 1
        self._tokens = self._tokens * keep + tokens
        self._busy_s = self._busy_s * keep + gap

    def _lap(self) -> float:
        if self._since is None:
            return 0.0
        now = self._clock.monotonic()
        gap, self._since = min(now - self._since, self._longest_s), now
        return gap

    def _per_s(self, served: float) -> float:
        """Return the rate, or 0 until it is `measured`."""
        waited = 0.0 if self._since is None else self._clock.monotonic() - self._since
        return served / max(self._busy_s + waited, 1e-6) if self.measured else 0.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The limits of the queue: its requests, their known tokens, and the wait of each in seconds."""

    requests: int
    tokens: int
    wait_s: float


@dataclass(eq=False, kw_only=True, slots=True)
class _Waiter(Entry, Generic[PlacementT]):
    requirements: Any
    capability: Hashable | None
    since: float  # on the admission clock, like `deadline`
    deadline: float
    served: asyncio.Future[PlacementT]
    accepted: bool
    counts_from: float  # `since`, or if accepted the last time a capable worker was connected or starting
    connected_at: float  # the last time one was connected
    reachable: bool = True
    aside: bool = False


class Admission(Generic[PlacementT]):
    """Makes placements in queue order with `place(tokens, requirements)`. Call `changed` if capacity may have grown.
    `can_serve` returns whether a decode worker is connected, with requirements a capable one. `capability_of` returns
    the capability that a request needs, or None; `why_not` why no known worker has it, or [] if one may have it.
    The owner may set `starting`, which returns the decode workers that are being started, as text, or "".
    """

    def __init__(
        self,
        place: Callable[[int, Any], PlacementT | None],
        release: Callable[[PlacementT], None],
        can_serve: Callable[..., bool],
        clock: Clock,
        limits: QueueLimits,
        weights: Mapping[str, float] | None = None,
        *,
        capability_of: Callable[[Any], Hashable | None] = lambda _: None,
        why_not: Callable[[Any], Sequence[Violation]] = lambda _: (),
    ) -> None:
        self.drain = DrainRate(clock, limits.wait_s)
        self._place, self._release = place, release
        self._can_serve, self._capability_of, self._why_not = can_serve, capability_of, why_not
        self.starting: Callable[[], str] = lambda: ""
        self._clock, self._limits = clock, limits
        self._queue: FairQueue[_Waiter[PlacementT]] = FairQueue(weights or {})
        self._aside: dict[Hashable, dict[_Waiter[PlacementT], None]] = {}  # by capability
        self._serving = False

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        return self._queue.tokens

    @property
    def aside(self) -> int:
        """The number of requests that wait for a capable worker."""
        return sum(map(len, self._aside.values()))

    @property
    def oldest_s(self) -> float:
        """Wait time of the request at the head of the queue, or 0 if the queue is empty."""
        first = self._queue.first
        return self._clock.monotonic() - first.since if first else 0.0

    @property
    def wait_s(self) -> float:
        """Predicted wait of a new request at the end of the queue: at least as long as its head has waited."""
        return max(self._all_s(self.waiting, self.waiting_tokens), self.oldest_s)

    async def admit(
        self,
        ticket: Ticket,
        tokens: int,
        requirements: Any = None,
        *,
        returning: bool = False,
        accepted: bool = False,
        tenant: str = "",
        deadline_s: float = math.inf,
        since: float | None = None,
    ) -> PlacementT:
        """Return a placement for a request of `tokens` known tokens. `accepted` means that its client has received
        Accepted for any choice; such a request never gets Overloaded. `deadline_s` is the time left to it. `since` is
        the begin of its wait on the admission clock, if an earlier placement failed. Raises Overloaded if the queue is
        full or the wait too long, NoWorker, DeadlineExceeded, and InvalidRequest if no known worker is capable.
        """
        now = self._clock.monotonic()
        since = now if since is None else since
        waiter: _Waiter[PlacementT] = _Waiter(
            ticket,
            tokens,
            tenant,
            returning,
            requirements=requirements,
            capability=self._capability_of(requirements),
            since=since,
            deadline=now + deadline_s,
            served=asyncio.get_running_loop().create_future(),
            accepted=accepted,
            counts_from=since,
            connected_at=now,
        )
        if not accepted and self._lacks(waiter) and (count := self.aside) >= self._limits.requests:
            text = f"{count} requests wait already for a worker that can compute them, no more are accepted"
            raise Overloaded(text, self._limits.wait_s)
        placement = self._enter(waiter)
        return await self._wait(waiter) if placement is None else placement

    def admit_now(self, tokens: int, requirements: Any = None, *, returning: bool = False) -> PlacementT | None:
        """Return a placement like `admit`, or None if the queue is non-empty or there is no capacity."""
        if self.waiting or (placement := self._place(tokens, requirements)) is None:  # an empty queue needs no fairness
            return None
        if not returning:  # a returning request was counted before
            self.drain.served(tokens)
        return placement

    def _enter(self, waiter: _Waiter[PlacementT]) -> PlacementT | None:
        """Return a placement if there is one now, else let `waiter` wait in the queue, or aside. Raises as `admit`."""
        waiter.aside = self._lacks(waiter)
        waiter.reachable = not waiter.aside
        if waiter.accepted:
            waiter.counts_from = self._clock.monotonic()
        if not waiter.aside:
            return self._enter_queue(waiter)
        if wrong := self._why_not(waiter.requirements):
            waiter.aside = False
            raise InvalidRequest(*wrong)
        self._aside.setdefault(waiter.capability, {})[waiter] = None
        return None

    def _enter_queue(self, waiter: _Waiter[PlacementT]) -> PlacementT | None:
        """Return a placement if the queue is empty or `waiter` is its head, else queue it. Raises Overloaded."""
        tried = not self.waiting
        placement = self.admit_now(waiter.tokens, waiter.requirements, returning=waiter.returning)
        if placement is not None:
            return placement
        self._queue.push(waiter)
        if not tried and self._queue.first is waiter and (placement := self._serve(waiter)) is not None:
            return placement
        refusal = None if waiter.returning or waiter.accepted else self._full(waiter) or self._too_long(waiter)
        if refusal is not None:
            self._queue.remove(waiter)
            raise refusal
        self.drain.watch(waiting=True)
        return None

    def _enter_again(self, waiter: _Waiter[PlacementT]) -> None:
        """Enter with a waiter that has left the queue, or its place aside."""
        if waiter.served.done():  # cancelled, but its task has not run since
            return
        try:
            placement = self._enter(waiter)
        except (InvalidRequest, Overloaded) as error:
            waiter.served.set_exception(error)
            return
        if placement is not None:
            waiter.served.set_result(placement)

    def _recall(self) -> None:
        """Queue the waiters with a capable worker, by ticket, and end those that no known worker is capable of."""
        for group in list(self._aside.values()):
            first = next(iter(group))
            if not self._lacks(first) or self._why_not(first.requirements):
                del self._aside[first.capability]
                for waiter in sorted(group, key=lambda one: one.ticket):
                    waiter.aside = False
                    self._enter_again(waiter)

    def _lacks(self, waiter: _Waiter[PlacementT]) -> bool:
        """Return whether `waiter` needs a capability that no connected worker has."""
        return waiter.capability is not None and not self._can_serve(waiter.requirements)

    def _serve(self, first: _Waiter[PlacementT]) -> PlacementT | None:
        """Return a placement for the head of the queue, which then leaves it, or None."""
        placement = self._place(first.tokens, first.requirements)
        if placement is not None:
            self._queue.serve()
            if not first.returning:
                self.drain.served(first.tokens)
        return placement

    async def _wait(self, waiter: _Waiter[PlacementT]) -> PlacementT:
        try:
            async with asyncio.timeout(None if waiter.accepted else self._left_s(waiter)) as limit:
                if waiter.accepted:
                    self._extend_wait(waiter, limit)
                return await waiter.served
        except BaseException as error:
            self._leave(waiter)
            served = waiter.served
            if served.done() and not served.cancelled() and served.exception() is None:
                self._release(served.result())  # served and cancelled at the same time
            self.changed()  # the next one may fit
            if isinstance(error, TimeoutError):
                raise self._timed_out(waiter) from None
            raise

    def _leave(self, waiter: _Waiter[PlacementT]) -> None:
        if waiter in self._queue:
            self._queue.remove(waiter)
        elif waiter.aside:
            del self._aside[waiter.capability][waiter]
            if not self._aside[waiter.capability]:
                del self._aside[waiter.capability]

    def _extend_wait(self, waiter: _Waiter[PlacementT], limit: asyncio.Timeout) -> None:
        """Extend the wait of an accepted request while a worker that can serve it is connected or starting, and repeat
        this. A model may take longer to load than `wait_s`; a worker that starts again and again does not count.
        """
        if waiter.served.done():
            return
        now = self._clock.monotonic()
        if not waiter.aside and self._can_serve():
            waiter.connected_at = now
        serves = waiter.connected_at == now or (now < waiter.connected_at + _LOADING_S and bool(self.starting()))
        if serves or waiter.reachable:
            waiter.counts_from = self._clock.monotonic()
        waiter.reachable = serves
        loop, left_s = asyncio.get_running_loop(), self._left_s(waiter)
        if left_s > 0:
            loop.call_later(min(left_s, self._limits.wait_s / _CHECKS, _CHECK_S), self._extend_wait, waiter, limit)
        else:
            limit.reschedule(loop.time())

    def changed(self) -> None:
        """Recall requests with a capable worker, then serve from the head of the queue while there is capacity."""
        if self._serving:
            return  # releasing a placement calls this again; the running loop continues anyway
        self._serving = True
        try:
            self._recall()
            while (first := self._queue.first) is not None and self._admit_first(first):
                pass
        finally:
            self._serving = False
            self.drain.watch(waiting=self.waiting > 0)

    def _admit_first(self, first: _Waiter[PlacementT]) -> bool:
        """Return whether `first` has left the queue, so that the next request may try."""
        if first.served.done():  # cancelled, but its task has not run since
            self._queue.remove(first)
            return True
        if self._lacks(first):
            self._queue.remove(first)
            self._enter_again(first)
            return True
        if (placement := self._serve(first)) is None:
            return False
        first.served.set_result(placement)
        return True

    def _full(self, waiter: _Waiter[PlacementT]) -> Overloaded | None:
        (requests, tokens), share = self._queue.held_by(waiter.tenant), self._queue.share_of(waiter.tenant)
        if over := _over(self._limits.requests, self.waiting, requests, 1, share):
            text = f"{self.waiting - 1} requests wait already, no more are accepted"
            return self._refusal(text, over, self.drain.requests_per_s)
        over = _over(self._limits.tokens, self.waiting_tokens, tokens, waiter.tokens, share)
        if self.waiting == 1 or not over:  # even the longest prompt may wait alone
            return None
        text = f"{self.waiting_tokens - waiter.tokens} tokens wait already, {waiter.tokens} more exceed the limit"
        return self._refusal(text, over, self.drain.tokens_per_s)

    def _too_long(self, waiter: _Waiter[PlacementT]) -> Overloaded | None:
        """Return the rejection of `waiter` if its predicted wait is too long. Without a worker the rate is ignored."""
        predicted, most = self._predicted_s(waiter), self._left_s(waiter)
        if predicted <= max(most, 0.0) or not self._can_serve():
            return None
        text = f"the predicted wait is {predicted:.3g} s, but only {most:.3g} s are left"
        return self._refusal(text, predicted - most, 1.0)

    def _predicted_s(self, waiter: _Waiter[PlacementT]) -> float:
        """Return the predicted wait, or 0 if the rate is unknown."""
        requests, tokens = self.waiting - 1, self.waiting_tokens - waiter.tokens
        return self._all_s(requests, tokens) * self._queue.ahead(waiter) / tokens if tokens else 0.0

    def _all_s(self, requests: int, tokens: int) -> float:
        """Return the seconds to serve so much: the longer of two estimates, or 0 if the rate is unknown."""
        if not self.drain.measured:
            return 0.0
        return max(requests / self.drain.requests_per_s, tokens / self.drain.tokens_per_s)

    def _left_s(self, waiter: _Waiter[PlacementT]) -> float:
        return min(waiter.counts_from + self._limits.wait_s, waiter.deadline) - self._clock.monotonic()

    def _timed_out(self, waiter: _Waiter[PlacementT]) -> BatonError:
        waited = f"waited {self._limits.wait_s:g} s"
        if waiter.deadline < waiter.counts_from + self._limits.wait_s:
            what = f": {waiter.requirements.absence}" if waiter.aside else " for capacity"
            what = f" for {starting} to start" if (starting := self.starting()) else what
            return DeadlineExceeded(f"the deadline passed while the request waited{what}")
        if waiter.aside:
            return NoWorker(f"{waited}: {waiter.requirements.absence}")
        if self._can_serve() and not waiter.accepted:
            return self._refusal(f"{waited} for capacity on a decode worker", self.waiting, self.drain.requests_per_s)
        more = f"; {starting} is starting" if (starting := self.starting()) else ""
        return NoWorker(f"{waited}: no decode worker is connected, and prefill workers do not decode{more}")

    def _refusal(self, text: str, over: float, per_s: float) -> Overloaded:
        """Return Overloaded. The retry delay is the time to serve `over`, or without a rate the wait of the head."""
        waited = self.oldest_s if self.waiting else self._limits.wait_s
        most_s = max(self._limits.wait_s, _LEAST_RETRY_S)
        return Overloaded(text, min(max(over / per_s if per_s else waited, _LEAST_RETRY_S), most_s))


def _over(limit: int, waiting: int, own: int, adding: int, share: float) -> int:
    """Return how far `waiting` exceeds the limit for one tenant. `own` is the tenant's part of `waiting`, `adding` that
    of the new request. A tenant within its share, or without other requests in the queue, may also use the reserve.
    """
    if own == adding or own <= limit * share:
        limit += math.ceil(limit / _RESERVE)
    return max(waiting - limit, 0)
