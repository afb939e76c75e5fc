"""Virtual time: heaps of events, and an event loop on top of them that runs production's asyncio code.

Nothing reads a real clock. Events due at the same time run in the order of scheduling, and random numbers come from
seeded generators, so equal scenarios give equal runs.
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
_SOON_S = 0.002  # longest delay of most messages; a small heap for them is cheaper than one large heap


class Event:
    """A scheduled call that can be cancelled, like an asyncio handle."""

    __slots__ = ("off",)

    def __init__(self) -> None:
        self.off = False

    def cancel(self) -> None:
        self.off = True

    def cancelled(self) -> bool:
        return self.off


class Kernel:
    """Implementation of `baton.clock.Clock` and of the event loop parts that tasks, futures and timeouts need."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self.events = 0  # events run so far
        self._soon: list[Entry] = []  # heaps
        self._late: list[Entry] = []
        self._count = 0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def at(self, when: float, act: Act, *facts: Any) -> None:
        """Call `act(*facts)` at `when`, or now if that is past."""
        self._push(when, act, facts, None)

    def after(self, seconds: float, act: Act, *facts: Any) -> None:
        now = self.now
        self._count += 1
        heapq.heappush(self._soon if seconds < _SOON_S else self._late, (now + seconds, self._count, act, facts, None))

    def timer(self, when: float, act: Act, *facts: Any) -> Event:
        """Call `act(*facts)` at `when`, unless the returned event is cancelled."""
        event = Event()
        self._push(when, act, facts, event)
        return event

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task without waiting for it. An exception in it ends the run."""
        self.create_task(work).add_done_callback(asyncio.Task.result)

    def run(self, until: float = FOREVER) -> None:
        """Run until no event is left, or until `until`. Raises the exceptions of tasks and events."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self._loop)
        soon, late, pop = self._soon, self._late, heapq.heappop
        try:
            while soon or late:
                heap = soon if soon and not (late and late[0] < soon[0]) else late
                if heap[0][0] > until:
                    return
                self.now, _, act, facts, event = pop(heap)
                if event is None or not event.off:
                    self.events += 1
                    act(*facts)
        finally:
            asyncio._set_running_loop(before)

    def _push(self, when: float, act: Act, facts: tuple[Any, ...], event: Event | None) -> None:
        now = self.now
        self._count += 1
        heapq.heappush(
            self._soon if when < now + _SOON_S else self._late,
            (when if when > now else now, self._count, act, facts, event),
        )

    # methods of asyncio.AbstractEventLoop

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
        raise context.get("exception") or RuntimeError(context["message"])
