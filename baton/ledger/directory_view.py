"""A router's copy of the prefix directory: it starts from the sets, then follows the events."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import structlog

from baton.errors import LedgerError
from baton.ledger.connection import Connection
from baton.ledger.directory import DirectoryStore
from baton.ledger.prefix_map import Holder, PrefixMap

log = structlog.get_logger(__name__)

WAIT_MS = 1000  # for an event; less than a socket's timeout
COMPARE_S = 5.0
RETRY_S = 1.0


class DirectoryView:
    """Answers from memory, `prefixes`. `run` keeps it up to date; while Redis is away it answers what it knows.

    Every `compare_s` the numbers of the last changes are compared with the store's. That finds all that events cannot
    tell: some that the stream dropped, a Redis that came back empty, a worker that is gone.
    """

    def __init__(self, connection: Connection, *, compare_s: float = COMPARE_S) -> None:
        self._store = DirectoryStore(connection)
        self._compare_s = compare_s
        self.prefixes = PrefixMap()
        self._last = ""  # the last event that was taken in; "": none yet

    def holders(self, digests: Sequence[bytes]) -> dict[Holder, int]:
        """How many leading blocks of this chain each worker is known to have; those with none are left out."""
        return self.prefixes.holders(digests)

    async def run(self) -> None:
        """Follow, for ever; cancel it to end it."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self.compare()
                until = loop.time() + self._compare_s
                while loop.time() < until:
                    await self._advance(WAIT_MS)
            except LedgerError as error:
                log.warning("directory_away", error=str(error))
                await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.0))

    async def compare(self) -> None:
        """Read whatever the store knows and was missed here. Raises LedgerError."""
        last, listed = await self._store.listed()
        if not self._last or _order(last) < _order(self._last):
            self._last = last  # the first time, or the store has begun anew
        while _order(self._last) < _order(last) and await self._advance():
            pass
        for holder in self.prefixes.behind(listed):
            await self._read(holder)

    async def _advance(self, wait_ms: int = 0) -> bool:
        """Take in the next events. False: there was none."""
        events = await self._store.events(self._last, wait_ms)
        for self._last, change in events:
            if change is not None and not self.prefixes.apply(change):
                await self._read(change.holder)  # if that fails, the next comparison finds it
        return bool(events)

    async def _read(self, holder: Holder) -> None:
        everything = await self._store.read(holder.worker_id)
        if everything is not None:
            self.prefixes.apply(everything)


def _order(event_id: str) -> tuple[int, int]:
    ms, _, number = event_id.partition("-")
    return int(ms), int(number)
