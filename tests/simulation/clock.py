"""Virtual time: an event loop that never sleeps, and stand-ins for `time` and `threading` in the code under test."""

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

START = 1000.0


class Stuck(Exception):
    """A task still waits, and no event is left that could wake it."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Advances its clock where another loop would sleep."""

    def __init__(self) -> None:
        self.now = START
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now

    def _write_to_self(self) -> None:
        """Do nothing, because there is only one thread."""


class _Jump(selectors.BaseSelector):
    """Waits for time only, not for files."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("no timer is left")
        self._loop.now += timeout
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return {}


class LoopClock:
    """`baton.clock.Clock`, and the module `time`, on the running loop."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return self.monotonic()


class SimThread:
    """`threading.Thread` whose target is a coroutine function. It is a task of the process that starts it."""

    def __init__(
        self, *, target: Callable[..., Coroutine[Any, Any, None]], name: str, args: tuple = (), daemon: bool = True
    ) -> None:
        self._make, self._name = (lambda: target(*args)), name
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._make(), name=self._name)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done()

    def join(self, timeout: float | None = None) -> None:
        """Return immediately, because no test waits for the end of a thread."""


class SimCondition:
    """`threading.Condition` of one thread. Only `until` waits; other methods never block."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        return predicate()

    async def until(self, predicate: Callable[[], Any], within_s: float | None) -> None:
        """Wait until the predicate holds, or the time is up."""
        try:
            async with asyncio.timeout(within_s):
                while not predicate():
                    waiter = asyncio.get_running_loop().create_future()
                    self._waiters.append(waiter)
                    await waiter
        except TimeoutError:
            pass


class SimQueue:
    """`queue.SimpleQueue` of one thread, with a `take` that may wait."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._filled = asyncio.Event()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._filled.set()

    def empty(self) -> bool:
        return not self._items

    def get(self) -> Any:
        return self._items.popleft()

    async def filled(self) -> None:
        while not self._items:
            self._filled.clear()
            await self._filled.wait()

    async def take(self) -> Any:
        await self.filled()
        return self._items.popleft()


class OrderedSet(dict[Any, None]):
    """A set whose order depends neither on addresses nor on the seed of string hashes."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)

    remove = discard
