"""A worker's writer of the prefix directory: what it publishes and forgets, beside the path."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice

from baton.core import WorkerRef
from baton.errors import LedgerError
from baton.ledger.beside import BesideWriter
from baton.ledger.directory import DONE, REFUSED, TTL_S, DirectoryStore
from baton.ledger.ledger import Ledger
from baton.ledger.prefix_map import NAME_BYTES, Change, Holder

BATCH = 1024  # names in one event
INTERVAL_S = 0.05  # between two round trips: what is noted meanwhile goes together


class DirectoryLog(BesideWriter):
    """Keeps the set of names that this worker has, and in Redis a copy. Create it on the event loop.

    What was added and removed between two writes is not written at all. So the queue is bounded, however long Redis is
    away: by the blocks that the worker has now and had at the last write. A store that does not have the change before
    (the first write, a Redis that forgot, a key that expired) is given the whole set.
    """

    def __init__(self, ledger: Ledger, owner: WorkerRef, *, ttl_s: float = TTL_S) -> None:
        self._store = DirectoryStore(ledger.connection, ttl_s=ttl_s)
        self._holder = Holder(owner.worker_id, owner.incarnation)
        self._names: set[bytes] = set()
        self._turned: dict[bytes, bool] = {}  # name: is it here now? where the store, with what is in flight, differs
        self._seq = 0
        self._reset = True  # the next write starts from nothing
        self._touch = False  # write, be there a change or not
        self._in_flight: Change | None = None
        super().__init__(ledger, "prefix blocks", ttl_s / 3)

    def note(self, added: Sequence[bytes] = (), removed: Sequence[bytes] = ()) -> None:
        """Blocks with these digests can be found here, or not any more (`removed` comes first).

        From any thread; never blocks, never raises.
        """
        with self._lock:
            if self._closed:
                return
            for digest in removed:
                self._turn(digest[:NAME_BYTES], False)
            for digest in added:
                self._turn(digest[:NAME_BYTES], True)
            if self._turned:
                self._signal()

    def _turn(self, name: bytes, here: bool) -> None:
        if (name in self._names) is here:
            return
        if here:
            self._names.add(name)
        else:
            self._names.remove(name)
        if self._turned.pop(name, None) is None:
            self._turned[name] = here

    def _repeat(self) -> None:
        self._touch = True

    def _left(self) -> int:
        return len(self._turned) + self._touch + (self._in_flight is not None)

    async def _write(self) -> LedgerError | None:
        try:
            answer = await self._store.publish(self._take())
        except LedgerError as error:
            return error
        with self._lock:
            self._in_flight = None
            if answer != DONE:
                self._turned = dict.fromkeys(self._names, True)
                self._reset = self._touch = True
        if answer == REFUSED:
            return LedgerError(f"the place of {self._holder.worker_id} belongs to another incarnation")
        if answer == DONE and len(self._turned) < BATCH:
            await asyncio.sleep(INTERVAL_S)
        return None

    def _take(self) -> Change:
        """The next change; the last one again if nobody knows whether it was made."""
        with self._lock:
            if self._in_flight is None:
                turned = {name: self._turned.pop(name) for name in list(islice(self._turned, BATCH))}
                self._seq += self._reset or bool(turned)
                added = [name for name, here in turned.items() if here]
                removed = [name for name, here in turned.items() if not here]
                self._in_flight = Change(self._holder, self._seq, self._reset, added, removed)
                self._reset = self._touch = False
            return self._in_flight
