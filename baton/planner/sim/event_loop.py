"""Virtual time: heaps of what is to happen, and an event loop on them for production code that is written for asyncio.

Nothing here looks at a real clock, and what is due at the same time happens in the order in which it was asked for. So
the same scenario gives the same run; what is random in it draws from generators of its own, made from the seed.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, cast

Act = Callable[..., object]
Entry = tuple[float, int, Act, tuple[Any, ...], "Event | None"]
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
FOREVER = float("inf")
_SOON_S = 0.002  # messages take less, steps and transfers mostly more: two small heaps cost less than a large one


class Event:
    """Something that will happen, unless it is cancelled before: what asyncio calls a handle."""

    __slots__ = ("off",)

    def __init__(self) -> None:
        self.off = False

    def cancel(self) -> None:
        """It will not happen."""
        self.off = True

    def cancelled(self) -> bool:
        return self.off


class Kernel:
    """Implements `baton.clock.Clock`, and as much of an event loop as tasks, futures and timeouts need."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self.events = 0  # that happened
        self._soon: list[Entry] = []  # heaps
        self._late: list[Entry] = []
        self._count = 0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    # --- what the simulator asks for -----------------------------------------------------------------------------

    def at(self, when: float, act: Act, *facts: Any) -> None:
        """Call `act(*facts)` at `when`; what is past is due now."""
        self._push(when, act, facts, None)

    def after(self, seconds: float, act: Act, *facts: Any) -> None:
        """Call `act(*facts)` in so many seconds."""
        now = self.now
        self._count += 1
        heapq.heappush(self._soon if seconds < _SOON_S else self._late, (now + seconds, self._count, act, facts, None))

    def timer(self, when: float, act: Act, *facts: Any) -> Event:
        """As `at`, and it can be cancelled."""
        event = Event()
        self._push(when, act, facts, event)
        return event

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A task that nobody waits for; what it raises ends the run."""
        self.create_task(work).add_done_callback(asyncio.Task.result)

    def run(self, until: float = FOREVER) -> None:
        """Until nothing is left to happen, or until then. Raises what a task or an event raised."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)
        try:
            self._run(until)
        finally:
            asyncio._set_running_loop(before)

    def _run(self, until: float) -> None:
        soon, late, pop = self._soon, self._late, heapq.heappop
        while soon or late:
            heap = soon if soon and not (late and late[0] < soon[0]) else late
            if heap[0][0] > until:
                return
            self.now, _, act, facts, event = pop(heap)
            if event is None or not event.off:
                self.events += 1
                act(*facts)

    def _push(self, when: float, act: Act, facts: tuple[Any, ...], event: Event | None) -> None:
        now = self.now
        self._count += 1
        heapq.heappush(
            self._soon if when < now + _SOON_S else self._late,
            (when if when > now else now, self._count, act, facts, event),
        )

    # --- of asyncio.AbstractEventLoop -------------------------------------------------------------------------------

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return cast("asyncio.AbstractEventLoop", self)

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_soon(self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None) -> Event:
        return self.call_at(self.now, callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Event:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Event:
        return self.timer(when, callback, *args) if context is None else self.timer(when, context.run, callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._loop)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self._loop, name=name, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What nobody took ends the run."""
        raise context.get("exception") or RuntimeError(context["message"])
