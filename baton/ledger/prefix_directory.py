"""The prefix directory in Redis: the block hashes that each worker incarnation has cached, and recent changes.

    PREFIX:blocks:ID      hash {incarnation, seq, and one field without a value per block}: all blocks of worker ID
    PREFIX:block-events   stream {worker, incarnation, seq, reset, added, removed}: recent changes of all workers

Block hashes are cut to 16 bytes (`prefix_index`); an event has them joined. One script writes both keys, so change
`seq` is in the stream if and only if the hash has `seq` or more. Both expire `ttl_s` after the last write, which a live
worker repeats in time. The directory is a hint for routing and no authority: it may be late, or lost.

Read `DirectoryStore` first. `PrefixPublisher` is a worker's background writer. `PrefixReplica` is a router's copy,
which starts from the hashes and follows the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator, Sequence
from itertools import islice

import structlog

from baton.core import Incarnation, WorkerRef
from baton.errors import LedgerError
from baton.ledger.background_writer import BackgroundWriter
from baton.ledger.prefix_index import NAME_BYTES, Change, Holder, PrefixIndex
from baton.ledger.redis_client import Connection, Script
from baton.ledger.registry import Ledger

log = structlog.get_logger(__name__)

TTL_S = 60.0
EVENTS = 4096  # in the stream, up to 16 KiB each; a replica that lags further reads the hashes again

# KEYS: blocks, events, place. ARGV: worker id, incarnation, seq, reset | delta | touch, TTL ms, added, removed, name
# bytes, events. Idempotent: a change that is already there is not applied again.
_PUBLISH = Script("""
local place = redis.call('GET', KEYS[3])
if place and place ~= ARGV[2] then return 0 end
local now, seq = redis.call('HMGET', KEYS[1], 'incarnation', 'seq'), tonumber(ARGV[3])
local last = now[1] == ARGV[2] and tonumber(now[2])
if last ~= seq then
  if ARGV[4] == 'reset' then redis.call('DEL', KEYS[1])
  elseif ARGV[4] == 'touch' or last ~= seq - 1 then return -1 end
  local size = tonumber(ARGV[8])
  for at = 1, #ARGV[6], size do redis.call('HSET', KEYS[1], string.sub(ARGV[6], at, at + size - 1), '') end
  for at = 1, #ARGV[7], size do redis.call('HDEL', KEYS[1], string.sub(ARGV[7], at, at + size - 1)) end
  redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'seq', ARGV[3])
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[9], '*', 'worker', ARGV[1], 'incarnation', ARGV[2], 'seq', ARGV[3],
    'reset', ARGV[4] == 'reset' and 1 or 0, 'added', ARGV[6], 'removed', ARGV[7])
end
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('PEXPIRE', KEYS[2], ARGV[5])
return 1
""")

# KEYS: workers, events. ARGV: prefix of block keys. Returns the last event's id, and (id, incarnation, seq) each.
_LIST = Script("""
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
local rows = {last and last[1] or '0-0'}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local row = redis.pcall('HMGET', ARGV[1] .. id, 'incarnation', 'seq')
  if row[1] and row[2] then rows[#rows + 1] = {id, row[1], row[2]} end
end
return rows
""")

_SET = Script("return {redis.call('HMGET', KEYS[1], 'incarnation', 'seq'), redis.call('HKEYS', KEYS[1])}")


DONE, REFUSED, GAP = 1, 0, -1  # results of `publish`


class DirectoryStore:
    """Writes and reads the directory, one round trip per call. Every method raises LedgerError."""

    def __init__(self, connection: Connection, *, ttl_s: float = TTL_S) -> None:
        self._connection = connection
        self._ttl_ms = round(ttl_s * 1000)
        self._events = connection.key("block-events")

    async def publish(self, change: Change) -> object:
        """Write the next change of a holder; one without content confirms the last. Returns DONE; REFUSED if the place
        belongs to another incarnation; or GAP if the change before is missing, so that all must be written, as a reset.
        """
        worker_id, incarnation = change.holder
        kind = "reset" if change.reset else "delta" if change.added or change.removed else "touch"
        content = (b"".join(change.added), b"".join(change.removed))
        key = self._connection.key
        keys = (key("blocks", worker_id), self._events, key("place", worker_id))
        args = (worker_id, str(incarnation), change.seq, kind, self._ttl_ms, *content, NAME_BYTES, EVENTS)
        return await self._connection.run(_PUBLISH, keys, args)

    async def listed(self) -> tuple[str, dict[Holder, int]]:
        """Return the id of the last event, and the last change number of each worker that may be alive."""
        key = self._connection.key
        answer = await self._connection.run(_LIST, (key("workers"), self._events), (key("blocks", ""),))
        assert isinstance(answer, list)
        last, *rows = answer
        found: dict[Holder, int] = {}
        for name, incarnation, seq in rows:
            with _damage(name):
                found[_holder(name, incarnation)] = int(seq)
        return last.decode(), found

    async def read(self, worker_id: str) -> Change | None:
        """Return all blocks of this worker as one reset. None if there are none or they are unreadable."""
        answer = await self._connection.run(_SET, (self._connection.key("blocks", worker_id),), ())
        assert isinstance(answer, list)
        (incarnation, seq), fields = answer
        names = [field for field in fields if len(field) == NAME_BYTES]
        if incarnation is not None and seq is not None:
            with _damage(worker_id):
                return Change(_holder(worker_id.encode(), incarnation), int(seq), True, names)
        return None

    async def events(self, after: str, wait_ms: int = 0) -> list[tuple[str, Change | None]]:
        """Return up to 64 (id, change) after an id; waits up to `wait_ms` ms. A damaged or foreign change is None."""
        block = ("BLOCK", wait_ms) if wait_ms else ()
        answer = await self._connection.call("XREAD", "COUNT", 64, *block, "STREAMS", self._events, after)
        assert isinstance(answer, list)
        return [(event_id.decode(), _change(fields)) for _, events in answer for event_id, fields in events]


def _change(fields: dict[bytes, bytes]) -> Change | None:
    with _damage(fields.get(b"worker", b"?")):
        holder, seq = _holder(fields[b"worker"], fields[b"incarnation"]), int(fields[b"seq"])
        return Change(holder, seq, fields[b"reset"] == b"1", _split(fields[b"added"]), _split(fields[b"removed"]))
    return None


def _split(names: bytes) -> list[bytes]:
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


def _holder(worker_id: bytes, incarnation: bytes) -> Holder:
    return Holder(worker_id.decode(), Incarnation.parse(incarnation.decode()))


@contextlib.contextmanager
def _damage(worker_id: bytes | str) -> Iterator[None]:
    try:
        yield
    except (KeyError, ValueError) as error:
        log.warning("directory_damaged", worker=str(worker_id), error=repr(error))


BATCH = 1024  # block hashes per event
INTERVAL_S = 0.05  # between two round trips, to batch notes


class PrefixPublisher(BackgroundWriter):
    """Keeps the set of block hashes that this worker has cached, and its copy in Redis. Create it on the event loop.

    A block that was added and removed between two writes is not written. So the queue never exceeds the blocks of now
    and of the last write. The whole set is written at the start, after data loss, and when the key has expired.
    """

    def __init__(self, ledger: Ledger, owner: WorkerRef, *, ttl_s: float = TTL_S) -> None:
        self._store = DirectoryStore(ledger.connection, ttl_s=ttl_s)
        self._holder = Holder(owner.worker_id, owner.incarnation)
        self._names: set[bytes] = set()
        self._unsent: dict[bytes, bool] = {}  # unsent changes: block hash to cached or not
        self._seq = 0
        self._reset = True  # the next write replaces everything
        self._touch = False  # write even without a change
        self._in_flight: Change | None = None
        super().__init__(ledger, "prefix blocks", ttl_s / 3)

    def note(self, added: Sequence[bytes] = (), removed: Sequence[bytes] = ()) -> None:
        """Record cached blocks, after `removed` ones. From any thread; never blocks, never raises."""
        with self._lock:
            if self._closed:
                return
            for digest in removed:
                self._record(digest[:NAME_BYTES], False)
            for digest in added:
                self._record(digest[:NAME_BYTES], True)
            if self._unsent:
                self._signal()

    def _record(self, name: bytes, here: bool) -> None:
        if (name in self._names) is here:
            return
        if here:
            self._names.add(name)
        else:
            self._names.remove(name)
        if self._unsent.pop(name, None) is None:
            self._unsent[name] = here

    def _repeat(self) -> None:
        self._touch = True

    def _left(self) -> int:
        return len(self._unsent) + self._touch + (self._in_flight is not None)

    async def _write(self) -> LedgerError | None:
        try:
            answer = await self._store.publish(self._take())
        except LedgerError as error:
            return error
        with self._lock:
            self._in_flight = None
            if answer != DONE:
                self._unsent = dict.fromkeys(self._names, True)
                self._reset = self._touch = True
        if answer == REFUSED:
            return LedgerError(f"the worker id {self._holder.worker_id} belongs to another incarnation")
        if answer == DONE and len(self._unsent) < BATCH:
            await asyncio.sleep(INTERVAL_S)
        return None

    def _take(self) -> Change:
        """Return the next change, or the last one again if its result is unknown."""
        with self._lock:
            if self._in_flight is None:
                changes = {name: self._unsent.pop(name) for name in list(islice(self._unsent, BATCH))}
                self._seq += self._reset or bool(changes)
                added = [name for name, here in changes.items() if here]
                removed = [name for name, here in changes.items() if not here]
                self._in_flight = Change(self._holder, self._seq, self._reset, added, removed)
                self._reset = self._touch = False
            return self._in_flight


WAIT_MS = 1000  # for an event; shorter than the socket timeout
COMPARE_S = 5.0
RETRY_S = 1.0


class PrefixReplica:
    """A copy of the directory in memory, `prefixes`. `run` updates it; while Redis is away it keeps its last state.
    Every `compare_s` it compares change numbers with the store. That also finds events dropped by the stream, a Redis
    that lost its data, and workers that are gone.
    """

    def __init__(self, connection: Connection, *, compare_s: float = COMPARE_S) -> None:
        self._store = DirectoryStore(connection)
        self._compare_s = compare_s
        self.prefixes = PrefixIndex()
        self._last = ""  # id of the last event applied

    async def run(self) -> None:
        """Follow the stream until cancelled."""
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
        """Read everything that the store has and this copy missed. Raises LedgerError."""
        last, listed = await self._store.listed()
        if not self._last or _order(last) < _order(self._last):
            self._last = last  # first call, or the store lost its data
        while _order(self._last) < _order(last) and await self._advance():
            pass
        for holder in self.prefixes.behind(listed):
            await self._read(holder)

    async def _advance(self, wait_ms: int = 0) -> bool:
        """Apply the next events. Returns False if there were none."""
        events = await self._store.events(self._last, wait_ms)
        for self._last, change in events:
            if change is not None and not self.prefixes.apply(change):
                await self._read(change.holder)  # on failure, the next `compare` finds it
        return bool(events)

    async def _read(self, holder: Holder) -> None:
        everything = await self._store.read(holder.worker_id)
        if everything is not None:
            self.prefixes.apply(everything)


def _order(event_id: str) -> tuple[int, int]:
    ms, _, number = event_id.partition("-")
    return int(ms), int(number)
