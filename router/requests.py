"""Which requests run here now, how those before them ended, and what this router is."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from baton.errors import BatonError
from router.lifecycle import Life


@dataclass(frozen=True, slots=True)
class Identity:
    """Who serves what: for Status, for logs, and for requests that name a model."""

    name: str
    router_id: str
    version: str
    model: str
    max_model_len: int | None


@dataclass(slots=True)
class Running:
    """A request in flight. `end` makes its task leave with `reason`, in whatever state it is."""

    scope: asyncio.Timeout
    life: Life
    reason: BatonError | None = None

    def end(self, reason: BatonError) -> None:
        """Release its workers and answer its client with `reason`. The first reason counts."""
        if self.reason is None and not self.scope.expired():
            self.reason = reason
            self.scope.reschedule(asyncio.get_running_loop().time())


class RequestTable:
    """Which requests run, and how those before them ended."""

    def __init__(self) -> None:
        self.running: dict[str, Running] = {}
        self.outcomes: Counter[str] = Counter()
        self.accepting = True
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def entry(self, request_id: str, running: Running) -> Iterator[None]:
        """While this lasts, the request can be found and ended."""
        self.running[request_id] = running
        self._idle.clear()
        try:
            yield
        finally:
            del self.running[request_id]
            if not self.running:
                self._idle.set()

    @property
    def accepted(self) -> int:
        """Requests for which decode room was reserved, running ones included."""
        return self.outcomes["accepted"] + sum(running.life.accepted for running in self.running.values())

    async def idle(self) -> None:
        """Return when nothing runs."""
        await self._idle.wait()
