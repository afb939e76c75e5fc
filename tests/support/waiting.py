"""Waiting for a state that other processes or tasks reach."""

import asyncio
import inspect
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.support.time_factor import Deadline

LOOK_S = 0.1


def eventually(look: Callable[..., Any], what: object = "", *, within_s: float = 10.0, every_s: float = 0.02) -> Any:
    """Wait until `look()` is true and return it. Raises AssertionError after `within_s`, scaled to this machine."""
    deadline = Deadline(within_s)
    while not (found := look()):
        assert not deadline.passed(), f"not so within {within_s:g} s: {what or look}"
        time.sleep(every_s)
    return found


async def until(look: Callable[[], Any], what: str = "", within_s: float = 10.0, every_s: float = 0.002) -> Any:
    """Wait until `look()`, awaited if needed, is true. Return it. Raises AssertionError after `within_s`, scaled."""
    deadline = Deadline(within_s)
    while True:
        found = look()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert not deadline.passed(), f"not so within {within_s:g} s: {what or look}"
        await asyncio.sleep(every_s)


@asynccontextmanager
async def at_most(seconds: float) -> AsyncIterator[None]:
    """Like `asyncio.timeout`, scaled to this machine, which is measured again before the block is cancelled."""
    deadline = Deadline(seconds)

    async def watch() -> None:
        await until(deadline.passed, within_s=math.inf, every_s=LOOK_S)
        limit.reschedule(asyncio.get_running_loop().time())

    async with asyncio.timeout(None) as limit:
        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()


def until_interrupted(attempt: Callable[[], bool]) -> None:
    """Repeat an attempt until it returns true: a slow machine may interrupt streams or starts too late."""
    assert any(attempt() for _ in range(5)), "each time the kill or the signal came too late"
