"""How a running cluster is told to end. Imports next to nothing, so that signals count from the first moment."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from dataclasses import dataclass, field

from baton.errors import Cancelled

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Stop:
    """`drain` lets running requests finish, `now` does not wait for them."""

    drain: threading.Event = field(default_factory=threading.Event)
    now: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raises Cancelled when told to end, for those who have not done yet what they were asked for."""
        if self.drain.is_set():
            raise Cancelled("stopped before it was done")


def stop_on_signals() -> Stop:
    """The first SIGINT, SIGTERM or SIGHUP drains, the second does not wait. Call it in the main thread."""
    stop = Stop()

    def on_signal(*_: object) -> None:
        if stop.drain.is_set():
            stop.now.set()
            return
        stop.drain.set()
        with contextlib.suppress(OSError):  # the terminal may be gone; `print` is not safe in a signal handler
            os.write(2, b"stopping; running requests may finish, a second signal does not wait for them\n")

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, on_signal)
    return stop
