"""The time without a message after which the stream of a worker is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_LATE_S = 0.1


@asynccontextmanager
async def silence(seconds: float) -> AsyncIterator[Callable[[], None]]:
    """End the block with TimeoutError `seconds` after its begin, or after the last call of the yielded function. A
    timer that fires late was held up with the whole process. Messages may be there unread then, so it starts once more.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as limit:

        def wait(*, again: bool = True) -> asyncio.TimerHandle:
            return loop.call_later(seconds, over, loop.time() + seconds, again)

        def over(due: float, again: bool) -> None:
            nonlocal timer
            if again and loop.time() - due > _LATE_S:
                timer = wait(again=False)
            else:
                limit.reschedule(loop.time())

        def heard() -> None:
            nonlocal timer
            timer.cancel()
            timer = wait()

        timer = wait()
        try:
            yield heard
        finally:
            timer.cancel()
