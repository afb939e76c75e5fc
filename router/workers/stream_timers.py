"""The two timers of a worker stream: its end after silence, and the rounds in which requests are woken.

Rounds save messages to clients. While the event loop is busy more than half of the time, requests are woken in rounds
of at most `LONGEST_S`, and a round's tokens leave in one message. First tokens, ends and failures never wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

_LATE_S = 0.1  # a timer that fires later was held up with the process
BUSY = 0.5  # share of the time
SHORTEST_S, LONGEST_S = 0.001, 0.02
_MEASURE_S = 0.05  # minimum interval for measuring processor use


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


class Wakeable(Protocol):
    """A mailbox with events."""

    def wake(self) -> None:
        """Wake its reader."""


class WakeupBatcher:
    """The rounds of one stream, on the thread of `loop`. `cpu` returns that thread's processor time in seconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cpu: Callable[[], float] = time.thread_time) -> None:
        self.length_s = 0.0
        self._cpu = cpu
        self._loop = loop
        self._held: dict[Wakeable, None] = {}
        self._measured = loop.time(), cpu()
        self._end = 0.0

    def holds(self) -> bool:
        """Return whether tokens that come now must wait for the end of the round (`later`). If not, a round begins."""
        now = self._loop.time()
        self._measure(now)
        if now < self._end:
            return True
        self._end = now + self.length_s
        return False

    def later(self, mailbox: Wakeable) -> None:
        """Wake the mailbox's reader at the end of this round."""
        if not self._held:
            self._loop.call_at(self._end, self._wake)
        self._held[mailbox] = None

    def _wake(self) -> None:
        self._end = self._loop.time() + self.length_s
        held, self._held = self._held, {}
        for mailbox in held:
            mailbox.wake()

    def _measure(self, now: float) -> None:
        then, used = self._measured
        if now - then < _MEASURE_S:
            return
        self._measured = now, self._cpu()
        length_s = max(self.length_s, SHORTEST_S) * (self._measured[1] - used) / (now - then) / BUSY
        self.length_s = min(length_s, LONGEST_S) if length_s > SHORTEST_S else 0.0
