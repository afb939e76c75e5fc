"""Where deterministic requests wait while no worker is there that computes them alike, and requests for thoughts while
nobody is there whose model might think: beside the queue, in which they would keep everybody else waiting, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from baton.clock import Clock
from baton.errors import BatonError, DeadlineExceeded, InvalidRequest, NoWorker, Overloaded, Violation
from router.workers.placement import Requirements

T = TypeVar("T")


class NoCapableWorker(NoWorker):
    """No decode worker is there that may compute a particular request, with room or without."""


class CapabilityWait:
    """`serves`: is a worker there for it? `why_not`: why none of those here takes it; empty: one does, or nobody is
    here. A newcomer finds no place beside `most` others. Call `changed` whenever a worker may have come.
    """

    def __init__(
        self,
        serves: Callable[[Requirements], bool],
        why_not: Callable[[Requirements], list[Violation]],
        clock: Clock,
        wait_s: float,
        most: int,
    ) -> None:
        self._serves = serves
        self._why_not = why_not
        self._clock = clock
        self._wait_s = wait_s
        self._most = most
        self._waiting: dict[asyncio.Future[None], None] = {}  # in order of arrival

    def changed(self) -> None:
        """Let those who wait look again."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def admitted(
        self, requirements: Requirements, admit: Callable[[], Awaitable[T]], *, deadline_s: float, since: float | None
    ) -> T:
        """What `admit` gives. When it raises NobodyAlike it is asked again, once somebody is there.

        `deadline_s`: what is left to the request. `since`: when it began to wait, on our clock; None: it goes on with
        what was begun, and time in which it waited for room alone does not count. Raises InvalidRequest (no worker here
        takes such requests), Overloaded (too many wait), NoWorker (none that computes alike came in time),
        DeadlineExceeded, and what `admit` raises.
        """
        deadline = self._clock.monotonic() + deadline_s
        if since is not None and requirements.is_special and not self._serves(requirements):
            self._check_place(requirements)
        while True:
            if requirements.is_special:
                began = self._clock.monotonic() if since is None else since
                await self._present(requirements, began + self._wait_s, deadline)
            try:
                return await admit()
            except NoCapableWorker:
                continue

    async def _present(self, requirements: Requirements, until: float, deadline: float) -> None:
        try:
            async with asyncio.timeout(max(min(until, deadline) - self._clock.monotonic(), 0.0)):
                while not self._serves(requirements):
                    self._refuse(requirements)
                    await self._news()
        except TimeoutError:
            raise self._gave_up(requirements, late=deadline < until) from None

    def _check_place(self, requirements: Requirements) -> None:
        if (count := len(self._waiting)) >= self._most:
            what = "deterministic requests" if requirements.deterministic else "requests"
            text = f"{count} {what} wait already for a worker that computes them, no more are taken"
            raise Overloaded(text, self._wait_s)

    def _refuse(self, requirements: Requirements) -> None:
        if wrong := self._why_not(requirements):
            raise InvalidRequest(*wrong)

    async def _news(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = None
        try:
            await waiter
        finally:
            del self._waiting[waiter]

    def _gave_up(self, requirements: Requirements, *, late: bool) -> BatonError:
        whose = f"with the system fingerprint {requirements.determinism} " if requirements.determinism else ""
        what = f"{whose}that computes deterministic requests " if requirements.deterministic else ""
        text = f"no decode worker {what}is connected"
        if late:
            return DeadlineExceeded(f"its deadline came while it waited: {text}")
        return NoWorker(f"waited {self._wait_s:g} s: {text}")
