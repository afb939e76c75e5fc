"""Stop signals of a running cluster. Imports very little, so that signals are handled from the first moment."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from dataclasses import dataclass, field

from baton.errors import Cancelled

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FINISHING = b"stopping; running requests may finish, a second signal does not wait for them\n"


class SignalEvent(threading.Event):
    """An event that a signal handler may set. The handler may interrupt a `wait` of its own thread that holds the lock,
    so the lock is reentrant.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cond = threading.Condition(threading.RLock())


@dataclass(frozen=True, slots=True)
class Stop:
    """Two stop events: `drain` lets running requests finish, `now` does not wait for them. `serving` is set by the
    cluster when there may be requests.
    """

    drain: threading.Event = field(default_factory=SignalEvent)
    now: threading.Event = field(default_factory=SignalEvent)
    serving: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raise Cancelled after a stop signal. Called by work that is not finished yet."""
        if self.drain.is_set():
            raise Cancelled("stopped before it was done")


def stop_on_signals() -> Stop:
    """Handle SIGINT, SIGTERM and SIGHUP: the first drains, the second does not wait. Call this in the main thread."""
    stop = Stop()

    def on_signal(*_: object) -> None:
        if stop.drain.is_set():
            stop.now.set()
            return
        stop.drain.set()
        with contextlib.suppress(OSError):  # the terminal may be gone; `print` is unsafe in a signal handler
            os.write(2, FINISHING if stop.serving.is_set() else b"stopping\n")

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored signals stay ignored (nohup)
            signal.signal(number, on_signal)
    return stop
