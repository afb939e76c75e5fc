"""Waiting for a state that other processes or tasks reach."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

from tests.support.time_factor import Deadline


def eventually(look: Callable[..., Any], what: str = "", *, within_s: float = 10.0, every_s: float = 0.02) -> Any:
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


def until_interrupted(attempt: Callable[[], bool]) -> None:
    """Repeat an attempt until it returns true: on a slow machine, streams may end before their process is killed."""
    assert any(attempt() for _ in range(5)), "each time the streams ended before the kill"
