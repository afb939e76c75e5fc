"""Holds requests that need a capability no connected worker has: bitwise compatible workers, or thinking. They wait
outside the main queue, so that they do not block requests that any worker can serve.
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
    """No connected decode worker can compute the request, whatever its capacity."""


class CapabilityWait:
    """The wait for a capable worker. `serves` returns whether one is connected, `why_not` why no connected worker is
    capable (empty if one is or none is connected). At most `most` requests wait. Call `changed` for each new worker.
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
        self._waiting: dict[asyncio.Future[None], None] = {}

    def changed(self) -> None:
        """Wake all waiting requests to check again."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def admitted(
        self, requirements: Requirements, admit: Callable[[], Awaitable[T]], *, deadline_s: float, since: float | None
    ) -> T:
        """Return the result of `admit`. It is called again after NoCapableWorker, once a capable worker is connected.
        `deadline_s` is the time left to the request, in seconds. `since` is when its wait began on the clock, or None
        for an accepted request: then waits for capacity alone do not count. Raises InvalidRequest if no worker takes
        such requests, Overloaded if too many wait, or NoWorker if no capable worker connects in time. Also raises
        DeadlineExceeded and the errors of `admit`.
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
