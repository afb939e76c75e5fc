"""Who waits, and for how long: one bounded queue in order of arrival.

A request waits when no live pair has room for it. It keeps its ticket for life: one that comes back (a decode worker
ran full, or preempted it) stands where it stood, before all later ones, and is never turned away by the bound.
The head of the queue is served first, even if a smaller request behind it would fit: nobody starves.

`WaitingLine` decides and knows neither time nor tasks; `Admission` lets coroutines wait on its decisions.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from baton.clock import Clock
from baton.errors import BatonError, NoWorker, Overloaded

Claim = TypeVar("Claim")


class WaitingLine(Generic[Claim]):
    """Tickets (ordered numbers) that wait for `claim(tokens)` to give something. Pure: no clock, no tasks."""

    def __init__(self, claim: Callable[[int], Claim | None]) -> None:
        self._claim = claim
        self._line: list[tuple[int, int]] = []  # (ticket, tokens), by ticket

    def __len__(self) -> int:
        return len(self._line)

    def enter(self, ticket: int, tokens: int) -> Claim | None:
        """A claim at once when nobody stands before `ticket`; else None, and it waits."""
        if not self._line or ticket < self._line[0][0]:
            claim = self._claim(tokens)
            if claim is not None:
                return claim
        bisect.insort(self._line, (ticket, tokens))
        return None

    def leave(self, ticket: int) -> None:
        """Stop waiting. A ticket that does not wait is no error."""
        self._line = [entry for entry in self._line if entry[0] != ticket]

    def served(self) -> Iterator[tuple[int, Claim]]:
        """Take from the head who can be served now; each claim is made as the iterator is advanced."""
        while self._line:
            ticket, tokens = self._line[0]
            claim = self._claim(tokens)
            if claim is None:
                return
            del self._line[0]
            yield ticket, claim


class Admission(Generic[Claim]):
    """The waiting line for coroutines. Call `changed` whenever room, or a worker, may have appeared."""

    def __init__(
        self,
        claim: Callable[[int], Claim | None],
        give_back: Callable[[Claim], None],
        has_pair: Callable[[], bool],
        *,
        clock: Clock,
        max_requests: int,
        max_wait_s: float,
    ) -> None:
        self._line = WaitingLine(claim)
        self._give_back = give_back
        self._has_pair = has_pair
        self._clock = clock
        self._max_requests = max_requests
        self._max_wait_s = max_wait_s
        self._waiters: dict[int, tuple[float, asyncio.Future[Claim]]] = {}  # in order of entry
        self._serving = False

    @property
    def waiting(self) -> int:
        return len(self._line)

    async def admit(self, ticket: int, tokens: int, *, returning: bool = False) -> Claim:
        """A claim on a pair of workers for a request of `tokens` known tokens.

        Raises Overloaded (the queue is full, or no room came up in time) or NoWorker (there was nobody to wait for).
        """
        claim = self._line.enter(ticket, tokens)
        if claim is not None:
            return claim
        if not returning and self.waiting > self._max_requests:
            self._line.leave(ticket)
            raise Overloaded(f"{self.waiting} requests wait already, no more are taken", self._retry_after_s())
        return await self._wait(ticket)

    async def _wait(self, ticket: int) -> Claim:
        future: asyncio.Future[Claim] = asyncio.get_running_loop().create_future()
        self._waiters[ticket] = (self._clock.monotonic(), future)
        taken = False
        try:
            async with asyncio.timeout(self._max_wait_s):
                claim = await future
            taken = True
            return claim
        except TimeoutError:
            raise self._gave_up() from None
        finally:
            self._forget(ticket, future, taken=taken)

    def _forget(self, ticket: int, future: asyncio.Future[Claim], *, taken: bool) -> None:
        self._waiters.pop(ticket, None)
        self._line.leave(ticket)
        if not taken and future.done() and not future.cancelled():
            self._give_back(future.result())  # served and cancelled in the same moment
        if not taken:
            self.changed()  # the next one may have waited only for its turn

    def changed(self) -> None:
        """Serve whom the present state allows to."""
        if self._serving:
            return  # a claim that is given back below makes room itself; the loop goes on anyway
        self._serving = True
        try:
            for ticket, claim in self._line.served():
                self._serve(ticket, claim)
        finally:
            self._serving = False

    def _serve(self, ticket: int, claim: Claim) -> None:
        _, future = self._waiters[ticket]
        if future.done():
            self._give_back(claim)  # cancelled, its task did not run yet
        else:
            future.set_result(claim)

    def _gave_up(self) -> BatonError:
        waited = f"waited {self._max_wait_s:g} s"
        if self._has_pair():
            return Overloaded(f"{waited} for room on a decode worker", self._retry_after_s())
        return NoWorker(f"{waited}: no prefill worker and decode worker that fit each other are connected")

    def _retry_after_s(self) -> float:
        """The longest wait of those in the queue: a newcomer will hardly do better."""
        first = next(iter(self._waiters.values()), None)
        waited = self._clock.monotonic() - first[0] if first else self._max_wait_s
        return min(max(waited, 0.5), max(self._max_wait_s, 0.5))
