"""Who is alive: incarnations, minted once per process, and leases, which a live worker renews.

    PREFIX:epoch, PREFIX:counter     the store's epoch; how many incarnations were minted. They never expire
    PREFIX:grace                     there for one lease time after an epoch began in a store that had lost something
    PREFIX:workers                   set of worker ids that may be alive; it expires days after the last renewal
    PREFIX:worker:ID                 hash {incarnation, info (JSON), progress}; it expires with the lease
    PREFIX:place:ID                  the incarnation last registered at that place, remembered for days

Incarnations are compared for equality only, with one exception, which is here: of two that want one place, the one
minted later gets it.

**A store that lost something.** Every call says the highest incarnation that its process knows of. A store that knows
less (it came back empty, or from an older copy) begins the next epoch: above all that it is told of, its clock and the
caller's, in microseconds. Scripts are atomic, so it begins once. Who sees another epoch than before has to write again
what it holds (`follow`). For one lease time no incarnation is minted for a place that nobody has registered since:
first all who are alive enter again and say what they know, so that what is minted then is later than all of them.
Records are not arbitrated in that time either (`OwnershipStore.records_of`).

**A first store** cannot be told from one that lost everything until somebody who knows more speaks. A mint by a process
that knows nothing, in a store without an epoch, is granted at once: a new cluster does not wait. If that was a loss
after all, the first live worker's heartbeat, or a router's look, says so, and the grace begins then; a worker that
enters again after the grace begins another one. What was minted in between is unique like any other; should it be lower
than the live holder of its own place, it is refused there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import structlog

from baton.clock import Clock
from baton.core import Incarnation, WorkerInfo, WorkerRef
from baton.ledger import scripts
from baton.ledger.connection import Arg, Connection, Script
from baton.ledger.records import worker_from_json, worker_to_json

log = structlog.get_logger(__name__)

PLACE_TTL_S = 7 * 86400


class Ledger:
    """One process's view of the cluster's ledger. Every method raises LedgerError when Redis cannot be used."""

    def __init__(self, connection: Connection, lease_s: float, clock: Clock) -> None:
        self.connection = connection
        self._lease_ms = max(1, round(lease_s * 1000))
        self._clock = clock
        self._known = (0, 0)  # the latest incarnation that was seen anywhere
        self._epoch = 0  # the store's, as last seen
        self._followers: set[Callable[[], None]] = set()
        self._read: dict[str, tuple[str, WorkerInfo | None]] = {}  # what `workers` saw last: the row, and what it says

    @classmethod
    async def connect(cls, url: str, prefix: str, lease_s: float, clock: Clock) -> Ledger:
        """`prefix` is `baton:NAME`. Raises LedgerError (host, port, cause) within 5 s, ConfigError for a bad URL."""
        return cls(await Connection.open(url, prefix), lease_s, clock)

    def follow(self, forgotten: Callable[[], None]) -> Callable[[], None]:
        """From now on `forgotten` is called, on the event loop, when a call finds that the store lost something.

        What was written before may be gone then. A worker's heartbeat is such a call. The result ends it.
        """
        self._followers.add(forgotten)
        return partial(self._followers.discard, forgotten)

    async def mint(self, worker_id: str = "") -> Incarnation:
        """A new incarnation: never given before, and above all given before, even by a store that lost its data.

        Waits while the store's grace lasts, unless `worker_id`, the place it is for, was registered in this epoch.
        """
        while True:
            epoch, wait_ms, counter = await self._decide(scripts.MINT, [self.connection.key("place", worker_id)])
            if counter:
                minted = Incarnation(epoch, counter)
                self._learn(minted)
                return minted
            log.info("mint_waits", wait_s=wait_ms / 1000)
            await asyncio.sleep(wait_ms / 1000)

    async def register(self, info: WorkerInfo) -> bool:
        """Take the place `info.ref.worker_id` and a lease on it. An older incarnation there is replaced.

        False: a newer incarnation was registered there. This one is fenced; it must drop what it holds and mint anew.
        Raises ValueError when a field of `info` is out of range.
        """
        mine = info.ref.incarnation
        self._learn(mine)
        args = (mine.epoch, mine.counter, info.ref.worker_id, worker_to_json(info), self._place_ms)
        return bool((await self._decide(scripts.REGISTER, self._keys(info.ref), *args))[1])

    async def renew(self, ref: WorkerRef, progress: int) -> bool:
        """Extend the lease by `lease_s` from now. `progress` is a step count, for operators.

        False: the lease has lapsed, or another incarnation holds the place. A worker that was only slow is then fenced
        and must come back as a new incarnation. One that saw Redis fail in between, so that nobody could take its
        place, keeps its incarnation and registers again; `register` says whether somebody could.
        """
        args = (str(ref.incarnation), progress, self._place_ms)
        return bool((await self._decide(scripts.RENEW, self._keys(ref), *args))[1])

    async def deregister(self, ref: WorkerRef) -> bool:
        """Give the lease back. False: it was not this incarnation's any more, and nothing was changed."""
        args = (str(ref.incarnation), ref.worker_id)
        return bool((await self._decide(scripts.DEREGISTER, self._keys(ref), *args))[1])

    async def workers(self) -> list[WorkerInfo]:
        """Those whose lease is live, by worker id. A damaged or foreign record is logged once and left out."""
        key = self.connection.key
        rows = (await self._decide(scripts.WORKERS, [key("workers")], key("worker", "")))[1]
        live = {row[0].decode(errors="replace"): row[1:] for row in sorted(rows, key=itemgetter(0))}
        self._read = {worker_id: (str(row), self._parse(worker_id, row)) for worker_id, row in live.items()}
        return [info for _, info in self._read.values() if info is not None]

    async def _decide(self, script: Script, keys: Sequence[str], *args: Arg) -> list[Any]:
        """Run a script that begins by comparing epochs; its answer, the epoch first."""
        key = self.connection.key
        told = (*self._known, int(self._clock.wall() * 1e6), self._lease_ms)
        names = (key("epoch"), key("counter"), key("grace"), *keys)
        answer = await self.connection.run(script, names, (*told, *args))
        assert isinstance(answer, list)
        self._saw(answer[0])
        return answer

    def _saw(self, epoch: int) -> None:
        """Only upwards: an answer may come after a later one's."""
        before, self._epoch = self._epoch, max(self._epoch, epoch)
        self._known = max(self._known, (epoch, 0))
        if 0 < before < epoch:
            log.warning("ledger_forgot", epoch=epoch, before=before)
            for forgotten in list(self._followers):
                forgotten()

    def _keys(self, ref: WorkerRef) -> list[str]:
        key = self.connection.key
        return [key("place", ref.worker_id), key("worker", ref.worker_id), key("workers")]

    def _parse(self, worker_id: str, row: object) -> WorkerInfo | None:
        before = self._read.get(worker_id)
        if before is not None and before[0] == str(row):
            return before[1]
        try:
            info = _row_to_info(worker_id, row)
        except ValueError as error:
            log.warning("ledger_record_refused", worker=worker_id, error=str(error))
            return None
        self._learn(info.ref.incarnation)
        return info

    def _learn(self, incarnation: Incarnation) -> None:
        self._known = max(self._known, (incarnation.epoch, incarnation.counter))

    @property
    def _place_ms(self) -> int:
        return max(PLACE_TTL_S * 1000, 100 * self._lease_ms)

    async def close(self) -> None:
        """Close the connections. Leases stay until they lapse."""
        await self.connection.close()


def _row_to_info(worker_id: str, row: object) -> WorkerInfo:
    """Raises ValueError, also for a row without fields: a key of another type gives one."""
    match row:
        case [bytes() as incarnation, bytes() as raw]:
            info = worker_from_json(raw)
        case _:
            raise ValueError("not a worker record")
    if info.ref.worker_id != worker_id or str(info.ref.incarnation).encode() != incarnation:
        raise ValueError("the record names another worker or incarnation than its key")
    return info
