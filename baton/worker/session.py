"""One router's stream into this worker: events gather here and leave as one message per engine step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable

from baton.core import HandoffId
from baton.rpc.v1 import common_pb2, worker_pb2

LoadSource = Callable[[], common_pb2.Load]


class Session:
    """Events for one router. `emit` may be called from any thread and never blocks."""

    def __init__(self, router_id: str, loop: asyncio.AbstractEventLoop, load: LoadSource) -> None:
        self.router_id = router_id
        self.handoffs: set[HandoffId] = set()  # what this router has here; engine thread only
        self._loop = loop
        self._load = load
        self._lock = threading.Lock()
        self._pending: list[worker_pb2.WorkerEvent] = []
        self._wake = asyncio.Event()
        self._closed = False
        self._finishing = False

    def emit(self, events: Iterable[worker_pb2.WorkerEvent]) -> None:
        """Queue events; all of one call leave in one message, as do those of calls that come before it is sent."""
        with self._lock:
            if self._closed:
                return
            idle = not self._pending
            self._pending.extend(events)
        if idle:
            self._signal()

    def beat(self) -> None:
        """Send a load report even if nothing happened. On the asyncio thread."""
        self._wake.set()

    async def next_message(self) -> worker_pb2.WorkerMessage | None:
        """The next message for the router; None once the session is closed."""
        await self._wake.wait()
        self._wake.clear()
        with self._lock:
            if self._closed or (self._finishing and not self._pending):
                return None
            events, self._pending = self._pending, []
        if self._finishing:
            self._wake.set()
        return worker_pb2.WorkerMessage(events=events, load=self._load())

    def finish(self) -> None:
        """Let `next_message` return what is pending, and then None. On the asyncio thread."""
        self._finishing = True
        self._wake.set()

    def close(self) -> None:
        """Drop what is pending and let `next_message` return None. From any thread."""
        with self._lock:
            self._closed = True
            self._pending = []
        self._signal()

    def _signal(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            self._closed = True  # the process is going down: its event loop is closed already
