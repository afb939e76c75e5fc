"""Who waits, for how long, and who is turned away at once.

A request waits when no live pair has room for it. `fair_queue` says in which order: fair between tenants, and in
order of tickets within one. A request keeps its ticket for life: one that comes back (a decode worker ran full, or
preempted it) stands where it stood, before all later ones, and is never turned away by a bound.
The head of the queue is served first, even if a smaller request behind it would fit.

Who has been accepted is not turned away for lack of room at all: it waits until its deadline, or until no worker has
been there that could serve it for as long as others wait.

A newcomer is refused when the queue holds too many requests or tokens, or when it would wait longer than it may: its
own wait, by what stands before it, and by how fast the queue has drained lately.

How fast the queue drains, as measured while somebody waits: what comes and goes without a wait says nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from baton.clock import Clock
from baton.errors import BatonError, DeadlineExceeded, NoWorker, Overloaded
from router.admission.capability_wait import NoCapableWorker
from router.admission.fair_queue import OVERTAKES, Entry, FairQueue, Ticket, ticket_for

_WINDOW_S = 5.0
_WINDOW_REQUESTS = 32  # where so many take longer than the time
_ENOUGH = 8.0  # requests, before that nothing is known


class DrainRate:
    """Exponentially weighted over the last seconds, or the last requests if those take longer.

    A gap of more than `longest_s` counts as that when it is over: nobody waits longer, and workers came back.
    """

    def __init__(self, clock: Clock, longest_s: float) -> None:
        self._clock = clock
        self._longest_s = longest_s
        self._requests = self._tokens = self._busy_s = 0.0
        self._since: float | None = None  # somebody has been waiting, and nobody was served

    @property
    def measured(self) -> bool:
        """Whether enough was served to say anything."""
        return self._requests >= _ENOUGH

    @property
    def requests_per_s(self) -> float:
        """0 until `measured`."""
        return self._requests / self._time() if self.measured else 0.0

    @property
    def tokens_per_s(self) -> float:
        """0 until `measured`."""
        return self._tokens / self._time() if self.measured else 0.0

    def watch(self, *, waiting: bool) -> None:
        """Somebody waits, or nobody. Say it whenever it may have changed."""
        if waiting and self._since is None:
            self._since = self._clock.monotonic()
        elif not waiting:
            self._busy_s += self._lap()
            self._since = None

    def served(self, tokens: int) -> None:
        """A request of `tokens` tokens was. Counts only while somebody waits."""
        if self._since is None:
            return
        gap = self._lap()
        keep = max(1 - 1 / _WINDOW_REQUESTS, math.exp(-gap / _WINDOW_S))
        self._requests = self._requests * keep + 1
        self._tokens = self._tokens * keep + tokens
        self._busy_s = self._busy_s * keep + gap

    def _lap(self) -> float:
        """Seconds since the last time."""
        if self._since is None:
            return 0.0
        now = self._clock.monotonic()
        gap, self._since = min(now - self._since, self._longest_s), now
        return gap

    def _time(self) -> float:
        waited = 0.0 if self._since is None else self._clock.monotonic() - self._since
        return max(self._busy_s + waited, 1e-6)


__all__ = ["OVERTAKES", "Admission", "QueueLimits", "Ticket", "ticket_for"]

Claim = TypeVar("Claim")

_LEAST_RETRY_S = 0.5
_LOOKS, _LOOK_S = 8, 1.0  # for workers: so often in the time that a request may wait, and after so long
_RESERVE = 8  # one part in so many, on top of a bound, is for tenants who have less than their share


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait: requests, their known tokens, and each for how long."""

    requests: int
    tokens: int
    wait_s: float


@dataclass(eq=False, kw_only=True, slots=True)
class _Waiter(Entry, Generic[Claim]):
    requirements: object
    since: float  # on the clock, as is the next
    deadline: float
    served: asyncio.Future[Claim]
    accepted: bool
    bounded_from: float  # `since`, or when somebody was last there who could serve it, if it was accepted
    reachable: bool = True


class Admission(Generic[Claim]):
    """Gives `claim(tokens, wish)` to one after the other, in turn. Call `changed` whenever room, or a worker, may have
    appeared.
    """

    def __init__(
        self,
        placement: Callable[[int, Any], Claim | None],
        give_back: Callable[[Claim], None],
        serves: Callable[[], bool],
        clock: Clock,
        bounds: QueueLimits,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.drain = DrainRate(clock, bounds.wait_s)
        self._placement = placement
        self._give_back = give_back
        self._serves = serves
        self._clock = clock
        self._bounds = bounds
        self._queue: FairQueue[_Waiter[Claim]] = FairQueue(weights or {})
        self._serving = False

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        return self._queue.tokens

    @property
    def oldest_s(self) -> float:
        """How long who is next has waited; 0: nobody waits."""
        first = self._queue.first
        return self._clock.monotonic() - first.since if first else 0.0

    @property
    def wait_s(self) -> float:
        """How long one that comes now, and behind all others, would wait: as fast as the queue drains, and, until that
        is measured, as long as who is next has waited.
        """
        return max(self._all_s(self.waiting, self.waiting_tokens), self.oldest_s)

    async def admit(
        self,
        ticket: Ticket,
        tokens: int,
        requirements: object = None,
        *,
        returning: bool = False,
        accepted: bool = False,
        tenant: str = "",
        deadline_s: float | None = None,
        since: float | None = None,
    ) -> Claim:
        """A claim on a pair of workers for a request of `tokens` known tokens; `wish` is passed on. `accepted`: its
        client has been told so, for this or another of its choices; it is never told Overloaded.

        `deadline_s`: what is left to the request, in seconds. `since`: when it began to wait for room, on our clock, if
        it was given a claim meanwhile that came to nothing.

        Raises Overloaded (the queue is full, its wait would be too long, or was), DeadlineExceeded, or NoWorker (there
        was nobody to wait for; NobodyAlike, as soon as its turn has come).
        """
        alone = not self.waiting
        if (placement := self.at_once(tokens, requirements, returning=returning)) is not None:
            return placement
        now = self._clock.monotonic()
        since = now if since is None else since
        waiter: _Waiter[Claim] = _Waiter(
            ticket,
            tokens,
            tenant,
            returning,
            requirements=requirements,
            since=since,
            deadline=math.inf if deadline_s is None else now + deadline_s,
            served=asyncio.get_running_loop().create_future(),
            accepted=accepted,
            bounded_from=now if accepted else since,
        )
        found = self._enter(waiter, tried=alone)
        return await self._wait(waiter) if found is None else found

    def at_once(self, tokens: int, requirements: object = None, *, returning: bool = False) -> Claim | None:
        """As `admit`, without a wait; None: somebody waits, or there is no room."""
        if self.waiting or (placement := self._placement(tokens, requirements)) is None:  # nobody to be fair to
            return None
        self._served(tokens, returning=returning)
        return placement

    def _enter(self, waiter: _Waiter[Claim], *, tried: bool) -> Claim | None:
        """A claim at once for who comes first and has not `tried`, or a place in the queue. Raises Overloaded."""
        self._queue.push(waiter)
        if not tried and self._queue.first is waiter:
            try:
                placement = self._placement(waiter.tokens, waiter.requirements)
            except NoCapableWorker:
                self._queue.remove(waiter)
                raise
            if placement is not None:
                self._serve(waiter)
                return placement
        refusal = None if waiter.returning or waiter.accepted else self._full(waiter) or self._too_long(waiter)
        if refusal is not None:
            self._queue.remove(waiter)
            raise refusal
        self.drain.watch(waiting=True)
        return None

    def _serve(self, first: _Waiter[Claim]) -> None:
        self._queue.serve()
        self._served(first.tokens, returning=first.returning)

    def _served(self, tokens: int, *, returning: bool) -> None:
        if not returning:  # else it was counted before
            self.drain.served(tokens)

    async def _wait(self, waiter: _Waiter[Claim]) -> Claim:
        try:
            async with asyncio.timeout(None if waiter.accepted else self._left_s(waiter)) as limit:
                if waiter.accepted:
                    self._look(waiter, limit)
                return await waiter.served
        except BaseException as error:
            if waiter in self._queue:
                self._queue.remove(waiter)
            served = waiter.served
            if served.done() and not served.cancelled() and served.exception() is None:
                self._give_back(served.result())  # served and cancelled in the same moment
            self.changed()  # the next one may have waited only for its turn
            if isinstance(error, TimeoutError):
                raise self._gave_up(waiter) from None
            raise

    def _look(self, waiter: _Waiter[Claim], limit: asyncio.Timeout) -> None:
        """One that was accepted goes on until its deadline, while somebody is there who could serve it, or was lately:
        is looked for from time to time.
        """
        if waiter.served.done():  # or cancelled
            return
        serves = self._serves()
        if serves or waiter.reachable:
            waiter.bounded_from = self._clock.monotonic()
        waiter.reachable = serves
        loop, left_s = asyncio.get_running_loop(), self._left_s(waiter)
        if left_s > 0:
            loop.call_later(min(left_s, self._bounds.wait_s / _LOOKS, _LOOK_S), self._look, waiter, limit)
        else:
            limit.reschedule(loop.time())

    def changed(self) -> None:
        """Serve whom the present state allows to."""
        if self._serving:
            return  # a claim that is given back below makes room itself; the loop goes on anyway
        self._serving = True
        try:
            while (first := self._queue.first) is not None and self._let_in(first):
                pass
        finally:
            self._serving = False
            self.drain.watch(waiting=self.waiting > 0)

    def _let_in(self, first: _Waiter[Claim]) -> bool:
        """Whether the next one may try."""
        if first.served.done():  # cancelled, its task did not run since
            self._queue.remove(first)
            return True
        try:
            placement = self._placement(first.tokens, first.requirements)
        except NoCapableWorker as error:  # it waits elsewhere
            self._queue.remove(first)
            first.served.set_exception(error)
            return True
        if placement is None:
            return False
        self._serve(first)
        first.served.set_result(placement)
        return True

    def _full(self, waiter: _Waiter[Claim]) -> Overloaded | None:
        """Why `waiter`, the last to come, finds no place."""
        (requests, tokens), share = self._queue.held_by(waiter.tenant), self._queue.share_of(waiter.tenant)
        if over := _over(self._bounds.requests, self.waiting, requests, 1, share):
            text = f"{self.waiting - 1} requests wait already, no more are taken"
            return self._refusal(text, over, self.drain.requests_per_s)
        alone = self.waiting == 1  # the longest prompt may wait, too
        over = _over(self._bounds.tokens, self.waiting_tokens, tokens, waiter.tokens, share)
        if alone or not over:
            return None
        text = f"{self.waiting_tokens - waiter.tokens} tokens wait already, there is no place for {waiter.tokens} more"
        return self._refusal(text, over, self.drain.tokens_per_s)

    def _too_long(self, waiter: _Waiter[Claim]) -> Overloaded | None:
        """Whether `waiter` is not worth waiting for. While no worker is there, the drain says nothing."""
        predicted, most = self._predicted_s(waiter), self._left_s(waiter)
        if predicted <= max(most, 0.0) or not self._serves():
            return None
        return self._refusal(
            f"it would wait for about {predicted:.3g} s, and {most:.3g} s are left", predicted - most, 1.0
        )

    def _predicted_s(self, waiter: _Waiter[Claim]) -> float:
        """0 when nothing is known."""
        requests, tokens = self.waiting - 1, self.waiting_tokens - waiter.tokens
        return self._all_s(requests, tokens) * self._queue.ahead(waiter) / tokens if tokens else 0.0

    def _all_s(self, requests: int, tokens: int) -> float:
        """Until so much has drained. Requests may be as dear as their tokens, or each as the other: the dearer counts.
        0 when nothing is known.
        """
        if not self.drain.measured:
            return 0.0
        return max(requests / self.drain.requests_per_s, tokens / self.drain.tokens_per_s)

    def _left_s(self, waiter: _Waiter[Claim]) -> float:
        """How long it may still wait."""
        return min(waiter.bounded_from + self._bounds.wait_s, waiter.deadline) - self._clock.monotonic()

    def _gave_up(self, waiter: _Waiter[Claim]) -> BatonError:
        if waiter.deadline < waiter.bounded_from + self._bounds.wait_s:
            return DeadlineExceeded("its deadline came while it waited for room")
        waited = f"waited {self._bounds.wait_s:g} s"
        if self._serves() and not waiter.accepted:
            return self._refusal(f"{waited} for room on a decode worker", self.waiting, self.drain.requests_per_s)
        return NoWorker(f"{waited}: no decode worker is connected, and prefill workers do not decode")

    def _refusal(self, text: str, over: float, per_s: float) -> Overloaded:
        """Come back when what is too much has drained. Unknown: after as long as the next one has waited."""
        first = self._queue.first
        waited = self._clock.monotonic() - first.since if first else self._bounds.wait_s
        most_s = max(self._bounds.wait_s, _LEAST_RETRY_S)
        return Overloaded(text, min(max(over / per_s if per_s else waited, _LEAST_RETRY_S), most_s))


def _over(bound: int, waiting: int, own: int, adding: int, share: float) -> int:
    """By how much `waiting` is too much for a tenant that has `own` of it, `adding` of it new."""
    if own == adding or own <= bound * share:
        bound += math.ceil(bound / _RESERVE)
    return max(waiting - bound, 0)
