"""The prefix directory in Redis: which worker incarnation holds which published prefix blocks, and what changed.

    PREFIX:blocks:ID      hash {incarnation, seq, and one field without a value for each block}: all that worker ID has
    PREFIX:block-events   stream {worker, incarnation, seq, reset, added, removed}: the last changes of all workers

Blocks are 16-byte names (`prefix_map`); in an event they are joined. One script writes both, so change number `seq` is
in the stream if and only if the hash says `seq` or more. Both expire `ttl_s` after the last write: a worker that lives
says so again in time. It is a help for routing and no authority: what it says may be late, or gone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import structlog

from baton.core import Incarnation
from baton.ledger.connection import Connection, Script
from baton.ledger.prefix_map import NAME_BYTES, Change, Holder

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
