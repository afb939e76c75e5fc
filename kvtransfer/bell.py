"""Where the thread of a link waits: for a change of its pushes, and where there is an express, for a packet too."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtransfer.transports.express import Express


class Bell:
    """`changed` guards what is waited for; `express` is set by the thread that waits."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.express: Express | None = None
        self._listens = False

    def ring(self) -> None:
        """Something has changed. With the lock."""
        self.changed.notify_all()
        if self._listens and self.express is not None:
            self.express.wake()

    def wait(self, timeout_s: float | None) -> bytes | None:
        """Until the next change, or the next packet, which is returned, or the time is over. With the lock, which is
        let go meanwhile. Raises ChannelBroken: the other end is gone.
        """
        if self.express is None:
            self.changed.wait(timeout_s)
            return None
        self._listens = True
        self.changed.release()
        try:
            return self.express.receive(timeout_s)
        finally:
            self.changed.acquire()
            self._listens = False
