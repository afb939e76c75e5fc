"""Admissions whose capacity tests change, and ways to let other tasks run: in turns of the loop or virtual time."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from baton.clock import Clock
from baton.errors import Overloaded
from baton.testing import FakeClock
from router.admission.admission import Admission, QueueLimits, ticket_for
from tests.simulation.clock import VirtualLoop

Result = TypeVar("Result")


def in_virtual_time(scenario: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scenario)


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorate a test that runs in virtual time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        in_virtual_time(test(*args, **kwargs))

    return run


async def turns() -> None:
    """Let other tasks run until each waits."""
    for _ in range(8):
        await asyncio.sleep(0)


class Gate:
    """An admission with capacity for `room` requests or tokens. `pair`: a worker that could serve is connected."""

    def __init__(
        self,
        room: int = 0,
        *,
        by_tokens: bool = False,
        pair: bool = True,
        clock: Clock | None = None,
        weights: dict[str, float] | None = None,
        **bounds: Any,
    ) -> None:
        self.room, self.pair, self.arrivals = room, pair, 0
        self.clock = clock or FakeClock()
        self.wishes: list[object] = []  # requirements of each placement attempt
        self.tasks: list[asyncio.Task[int]] = []
        self._by_tokens = by_tokens
        limits = QueueLimits(**{"requests": 1000, "tokens": 100_000, "wait_s": 30.0, **bounds})
        self.admission = Admission(self.placement, self.give_back, lambda: self.pair, self.clock, limits, weights)

    def placement(self, tokens: int, requirements: object) -> int | None:
        self.wishes.append(requirements)
        needs = tokens if self._by_tokens else 1
        if needs > self.room:
            return None
        self.room -= needs
        return tokens

    def give_back(self, placement: int) -> None:
        self.free(placement if self._by_tokens else 1)

    def free(self, more: int = 1) -> None:
        self.room += more
        self.admission.changed()

    async def enter(self, tokens: int = 10, priority: int = 0, arrival: int | None = None, **kwargs: Any) -> Any:
        """Start a request. Return its task if it waits, else its placement, or raise its error."""
        self.arrivals += 1
        ticket = ticket_for(self.arrivals if arrival is None else arrival, priority)
        task = asyncio.create_task(self.admission.admit(ticket, tokens, **kwargs))
        await asyncio.sleep(0)  # one turn of the loop: the task runs up to its first wait
        if task.done():
            return task.result()
        self.tasks.append(task)
        return task

    async def enter_all(self, count: int, **kwargs: Any) -> list[Any]:
        return [await self.enter(**kwargs) for _ in range(count)]

    async def refuses(self, match: str | None = None, **kwargs: Any) -> float:
        """Expect an immediate rejection. Return the delay that the client receives."""
        with pytest.raises(Overloaded, match=match) as caught:
            await self.enter(**kwargs)
        return caught.value.retry_after_s

    async def drain(self, times: int, per_s: float) -> None:
        for _ in range(times):
            self.clock.advance(1 / per_s)  # type: ignore[attr-defined]
            self.free()
        await asyncio.sleep(0)

    async def measured(self, per_s: float = 10.0) -> None:
        """Serve ten requests of ten tokens per second. Afterwards no request waits."""
        await self.enter_all(21)
        await self.drain(21, per_s)
        assert self.admission.waiting == 0

    async def cleared(self) -> None:
        """Cancel all waiting requests and check that none is left in the queue."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert (self.admission.waiting, self.admission.waiting_tokens) == (0, 0)
