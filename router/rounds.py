"""When the requests on a link hear of their tokens: at once, or in rounds while the router is short of time.

A message to a client costs a router about the same however many tokens it carries. A router whose event loop has
lately worked for more than half of the time therefore wakes those who wait for tokens in rounds: what comes for a
request meanwhile leaves as one message. The rounds are as long as it takes to get down to half of the time, and never
longer than `LONGEST_S`. A router that has time to spare holds nothing back; and no router holds back a first token,
an end, or a failure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.link import Mailbox

BUSY = 0.5  # of the time
SHORTEST_S, LONGEST_S = 0.001, 0.02
_LOOK_S = 0.05  # the least time over which the use of the processor is measured


class Rounds:
    """Of one link, on the thread of `loop`. `cpu` gives the seconds of processor time that this thread has used."""

    def __init__(self, loop: asyncio.AbstractEventLoop, cpu: Callable[[], float] = time.thread_time) -> None:
        self.length_s = 0.0
        self._cpu = cpu
        self._loop = loop
        self._held: dict[Mailbox, None] = {}
        self._looked = loop.time(), cpu()
        self._end = 0.0

    def holds(self) -> bool:
        """Whether tokens that come now are for `later`. If not, a round begins."""
        now = self._loop.time()
        self._look(now)
        if now < self._end:
            return True
        self._end = now + self.length_s
        return False

    def later(self, mailbox: Mailbox) -> None:
        """Its reader is woken at the end of this round."""
        if not self._held:
            self._loop.call_at(self._end, self._wake)
        self._held[mailbox] = None

    def _wake(self) -> None:
        self._end = self._loop.time() + self.length_s
        held, self._held = self._held, {}
        for mailbox in held:
            mailbox.wake()

    def _look(self, now: float) -> None:
        then, used = self._looked
        if now - then < _LOOK_S:
            return
        self._looked = now, self._cpu()
        length_s = max(self.length_s, SHORTEST_S) * (self._looked[1] - used) / (now - then) / BUSY
        self.length_s = min(length_s, LONGEST_S) if length_s > SHORTEST_S else 0.0
