"""The prefix directory in Redis: which worker incarnation holds which published prefix blocks, and what changed.

    PREFIX:blocks:ID      hash {incarnation, seq, and one field without a value for each block}: all that worker ID has
    PREFIX:block-events   stream {worker, incarnation, seq, reset, added, removed}: the last changes of all workers

Blocks are 16-byte names (`prefix_map`); in an event they are joined. One script writes both, so change number `seq` is
in the stream if and only if the hash says `seq` or more. Both expire `ttl_s` after the last write: a worker that lives
says so again in time. It is a help for routing and no authority: what it says may be late, or gone.

A worker's writer of the prefix directory: what it publishes and forgets, beside the path.

A router's copy of the prefix directory: it starts from the sets, then follows the events.
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
EVENTS = 4096  # in the stream, of up to 16 KiB each; who was away for longer reads the sets again

# KEYS: blocks, events, place. ARGV: worker id, incarnation, seq, reset | delta | touch, TTL ms, added, removed, name
# bytes, events. A call may be repeated: a change that is there already is not made again.
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

# KEYS: workers, events. ARGV: prefix of the blocks' keys. Answers the last event's id, and (id, incarnation, seq) each.
_LIST = Script("""
local last = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
local rows = {last and last[1] or '0-0'}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local row = redis.pcall('HMGET', ARGV[1] .. id, 'incarnation', 'seq')
  if row[1] and row[2] then rows[#rows + 1] = {id, row[1], row[2]} end
end
return rows
""")

# KEYS: blocks.
_SET = Script("return {redis.call('HMGET', KEYS[1], 'incarnation', 'seq'), redis.call('HKEYS', KEYS[1])}")


DONE, REFUSED, GAP = 1, 0, -1  # what `publish` answers


class DirectoryStore:
    """Writes and reads the directory, one round trip a call. Every method raises LedgerError."""

    def __init__(self, connection: Connection, *, ttl_s: float = TTL_S) -> None:
        self._connection = connection
        self._ttl_ms = round(ttl_s * 1000)
        self._events = connection.key("block-events")

    async def publish(self, change: Change) -> object:
        """Make this change, the next of its holder. One without content says that the last one still holds.

        DONE; REFUSED: the place belongs to another incarnation; GAP: the change before this one is not there, and all
        must be written, as a reset.
        """
        worker_id, incarnation = change.holder
        kind = "reset" if change.reset else "delta" if change.added or change.removed else "touch"
        content = (b"".join(change.added), b"".join(change.removed))
        key = self._connection.key
        keys = (key("blocks", worker_id), self._events, key("place", worker_id))
        args = (worker_id, str(incarnation), change.seq, kind, self._ttl_ms, *content, NAME_BYTES, EVENTS)
        return await self._connection.run(_PUBLISH, keys, args)

    async def listed(self) -> tuple[str, dict[Holder, int]]:
        """The id of the last event, and the number of the last change of each worker that may be alive."""
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
        """All that this worker has, as one reset; None: nothing is known of it, or nothing that can be read."""
        answer = await self._connection.run(_SET, (self._connection.key("blocks", worker_id),), ())
        assert isinstance(answer, list)
        (incarnation, seq), fields = answer
        names = [field for field in fields if len(field) == NAME_BYTES]
        if incarnation is not None and seq is not None:
            with _damage(worker_id):
                return Change(_holder(worker_id.encode(), incarnation), int(seq), True, names)
        return None

    async def events(self, after: str, wait_ms: int = 0) -> list[tuple[str, Change | None]]:
        """Up to 64 events after that id, with theirs. `wait_ms`: how long to wait for one, on a connection of its own.

        None in the place of a change: a damaged or foreign event.
        """
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
    """What cannot be read inside is logged, and passed over."""
    try:
        yield
    except (KeyError, ValueError) as error:
        log.warning("directory_damaged", worker=str(worker_id), error=repr(error))


BATCH = 1024  # names in one event
INTERVAL_S = 0.05  # between two round trips: what is noted meanwhile goes together


class PrefixPublisher(BackgroundWriter):
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


WAIT_MS = 1000  # for an event; less than a socket's timeout
COMPARE_S = 5.0
RETRY_S = 1.0


class PrefixReplica:
    """Answers from memory, `prefixes`. `run` keeps it up to date; while Redis is away it answers what it knows.

    Every `compare_s` the numbers of the last changes are compared with the store's. That finds all that events cannot
    tell: some that the stream dropped, a Redis that came back empty, a worker that is gone.
    """

    def __init__(self, connection: Connection, *, compare_s: float = COMPARE_S) -> None:
        self._store = DirectoryStore(connection)
        self._compare_s = compare_s
        self.prefixes = PrefixIndex()
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
