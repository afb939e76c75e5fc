"""Who waits, and for how long: one bounded queue in order of tickets.

A request waits when no live pair has room for it. It keeps its ticket for life: one that comes back (a decode worker
ran full, or preempted it) stands where it stood, before all later ones, and is never turned away by the bound.
The head of the queue is served first, even if a smaller request behind it would fit. A level of priority overtakes the
`OVERTAKES` arrivals before it and no others. So nobody starves.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from baton.clock import Clock
from baton.errors import BatonError, NoWorker, Overloaded

Claim = TypeVar("Claim")
Ticket = tuple[int, int]  # who has less is served first

OVERTAKES = 256


def ticket_for(arrival: int, priority: int) -> Ticket:
    """The ticket of the request that came as number `arrival`."""
    return arrival - priority * OVERTAKES, arrival


@dataclass(order=True, slots=True)
class _Waiter(Generic[Claim]):
    ticket: Ticket
    tokens: int = field(compare=False)
    keep: object = field(compare=False)
    since: float = field(compare=False)
    served: asyncio.Future[Claim] = field(compare=False)


class Admission(Generic[Claim]):
    """Gives `claim(tokens, keep)` to one after the other, in turn. Call `changed` whenever room, or a worker, may have
    appeared.
    """

    def __init__(
        self,
        claim: Callable[[int, Any], Claim | None],
        give_back: Callable[[Claim], None],
        has_pair: Callable[[], bool],
        clock: Clock,
        max_requests: int,
        max_wait_s: float,
    ) -> None:
        self._claim = claim
        self._give_back = give_back
        self._has_pair = has_pair
        self._clock = clock
        self._max_requests = max_requests
        self._max_wait_s = max_wait_s
        self._line: list[_Waiter[Claim]] = []  # by ticket
        self._serving = False

    @property
    def waiting(self) -> int:
        return len(self._line)

    async def admit(self, ticket: Ticket, tokens: int, keep: object = None, *, returning: bool = False) -> Claim:
        """A claim on a pair of workers for a request of `tokens` known tokens; `keep`: a prefill worker that has them.

        Raises Overloaded (the queue is full, or no room came up in time) or NoWorker (there was nobody to wait for).
        """
        if not self._line or ticket < self._line[0].ticket:
            claim = self._claim(tokens, keep)
            if claim is not None:
                return claim
        if not returning and self.waiting >= self._max_requests:
            raise Overloaded(f"{self.waiting} requests wait already, no more are taken", self._retry_after_s())
        waiter = _Waiter(ticket, tokens, keep, self._clock.monotonic(), asyncio.get_running_loop().create_future())
        bisect.insort(self._line, waiter)
        return await self._wait(waiter)

    async def _wait(self, waiter: _Waiter[Claim]) -> Claim:
        try:
            async with asyncio.timeout(self._max_wait_s):
                return await waiter.served
        except BaseException as error:
            if waiter in self._line:
                self._line.remove(waiter)
            if waiter.served.done() and not waiter.served.cancelled():
                self._give_back(waiter.served.result())  # served and cancelled in the same moment
            self.changed()  # the next one may have waited only for its turn
            if isinstance(error, TimeoutError):
                raise self._gave_up() from None
            raise

    def changed(self) -> None:
        """Serve whom the present state allows to."""
        if self._serving:
            return  # a claim that is given back below makes room itself; the loop goes on anyway
        self._serving = True
        try:
            while self._line and (claim := self._claim(self._line[0].tokens, self._line[0].keep)) is not None:
                served = self._line.pop(0).served
                if served.done():
                    self._give_back(claim)  # cancelled, its task did not run yet
                else:
                    served.set_result(claim)
        finally:
            self._serving = False

    def _gave_up(self) -> BatonError:
        waited = f"waited {self._max_wait_s:g} s"
        if self._has_pair():
            return Overloaded(f"{waited} for room on a decode worker", self._retry_after_s())
        return NoWorker(f"{waited}: no prefill worker and decode worker that fit each other are connected")

    def _retry_after_s(self) -> float:
        """The longest wait of those in the queue: a newcomer will hardly do better."""
        first = min((waiter.since for waiter in self._line), default=None)
        waited = self._max_wait_s if first is None else self._clock.monotonic() - first
        return min(max(waited, 0.5), max(self._max_wait_s, 0.5))
