"""Who is alive: incarnations, minted once per process, and leases, which a live worker renews.

    PREFIX:epoch, PREFIX:counter     the store's epoch; how many incarnations were minted
    PREFIX:workers                   set of worker ids that may be alive
    PREFIX:worker:ID                 hash {incarnation, info (JSON), progress}; it expires with the lease
    PREFIX:place:ID                  the incarnation last registered at that place, remembered for days

Incarnations are compared for equality only, with one exception, which is here: of two that want one place, the one
minted later gets it. A store that lost its data starts an epoch above all that it is told of, so the order outlives it.
"""

from __future__ import annotations

from operator import itemgetter

import structlog

from baton.clock import Clock
from baton.core import Incarnation, WorkerInfo, WorkerRef
from baton.ledger.connection import Connection, Script
from baton.ledger.records import worker_from_json, worker_to_json

log = structlog.get_logger(__name__)

PLACE_TTL_S = 7 * 86400

# Epochs are about 2e15, so tostring() would round them: format with %.0f.
_EPOCH = """
local function epoch_of(key, known, clock_us)
  local epoch = tonumber(redis.call('GET', key) or '') or 0
  if epoch == 0 or epoch < known then
    local now = redis.call('TIME')
    epoch = math.max(known + 1, clock_us, now[1] * 1000000 + now[2])
    redis.call('SET', key, string.format('%.0f', epoch))
  end
  return epoch
end
"""

# KEYS: epoch, counter. ARGV: highest epoch that the caller knows of, its wall clock in microseconds.
_MINT = Script(
    _EPOCH
    + """
local epoch = epoch_of(KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]))
return {epoch, redis.call('INCR', KEYS[2])}
"""
)

# KEYS: worker, place, workers, epoch. ARGV: epoch, counter, worker id, info, lease ms, place TTL ms, known, clock us.
_REGISTER = Script(
    _EPOCH
    + """
local epoch, counter = tonumber(ARGV[1]), tonumber(ARGV[2])
local mine = ARGV[1] .. '.' .. ARGV[2]
local e, c = string.match(redis.call('GET', KEYS[2]) or '', '^(%d+)%.(%d+)$')
e, c = tonumber(e or 0), tonumber(c or 0)
if e > epoch or (e == epoch and c > counter) then return 0 end
epoch_of(KEYS[4], tonumber(ARGV[7]), tonumber(ARGV[8]))
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'incarnation', mine, 'info', ARGV[4], 'progress', 0)
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('SET', KEYS[2], mine, 'PX', ARGV[6])
redis.call('SADD', KEYS[3], ARGV[3])
return 1
"""
)

# KEYS: worker, place. ARGV: incarnation, progress, lease ms, place TTL ms.
_RENEW = Script("""
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'progress', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 1
""")

# KEYS: worker, workers. ARGV: incarnation, worker id.
_DEREGISTER = Script("""
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then return 0 end
redis.call('SREM', KEYS[2], ARGV[2])
return redis.call('DEL', KEYS[1])
""")

# KEYS: workers. ARGV: the prefix of the workers' keys. An id without a key is forgotten, in the same moment.
_WORKERS = Script("""
local rows = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local row = redis.pcall('HMGET', ARGV[1] .. id, 'incarnation', 'info')
  if row.err then row = {false, false} end
  if redis.call('EXISTS', ARGV[1] .. id) == 0 then redis.call('SREM', KEYS[1], id)
  else rows[#rows + 1] = {id, row[1], row[2]} end
end
return rows
""")


class Ledger:
    """One process's view of the cluster's ledger. Every method raises LedgerError when Redis cannot be used."""

    def __init__(self, connection: Connection, lease_s: float, clock: Clock) -> None:
        self.connection = connection
        self._lease_ms = max(1, round(lease_s * 1000))
        self._clock = clock
        self._known_epoch = 0
        self._read: dict[str, tuple[str, WorkerInfo | None]] = {}  # what `workers` saw last: the row, and what it says

    @classmethod
    async def connect(cls, url: str, prefix: str, lease_s: float, clock: Clock) -> Ledger:
        """`prefix` is `baton:NAME`. Raises LedgerError (host, port, cause) within 5 s, ConfigError for a bad URL."""
        return cls(await Connection.open(url, prefix), lease_s, clock)

    async def mint(self) -> Incarnation:
        """A new incarnation: never given before, and above all given before, even by a store that lost its data."""
        keys = (self.connection.key("epoch"), self.connection.key("counter"))
        answer = await self.connection.run(_MINT, keys, (self._known_epoch, self._clock_us()))
        assert isinstance(answer, list)
        minted = Incarnation(*answer)
        self._learn(minted)
        return minted

    async def register(self, info: WorkerInfo) -> bool:
        """Take the place `info.ref.worker_id` and a lease on it. An older incarnation there is replaced.

        False: a newer incarnation was registered there. This one is fenced; it must drop what it holds and mint anew.
        Raises ValueError when a field of `info` is out of range.
        """
        ref, key = info.ref, self.connection.key
        self._learn(ref.incarnation)
        args = (
            *(ref.incarnation.epoch, ref.incarnation.counter, ref.worker_id, worker_to_json(info)),
            *(self._lease_ms, self._place_ms, self._known_epoch, self._clock_us()),
        )
        keys = (key("worker", ref.worker_id), key("place", ref.worker_id), key("workers"), key("epoch"))
        return bool(await self.connection.run(_REGISTER, keys, args))

    async def renew(self, ref: WorkerRef, progress: int) -> bool:
        """Extend the lease by `lease_s` from now. `progress` is a step count, for operators.

        False: the lease has lapsed, or another incarnation holds the place. A worker that was only slow is then fenced
        and must come back as a new incarnation. One that saw Redis fail in between, so that nobody could take its
        place, keeps its incarnation and registers again; `register` says whether somebody could.
        """
        key = self.connection.key
        keys = (key("worker", ref.worker_id), key("place", ref.worker_id))
        args = (str(ref.incarnation), progress, self._lease_ms, self._place_ms)
        return bool(await self.connection.run(_RENEW, keys, args))

    async def deregister(self, ref: WorkerRef) -> bool:
        """Give the lease back. False: it was not this incarnation's any more, and nothing was changed."""
        keys = (self.connection.key("worker", ref.worker_id), self.connection.key("workers"))
        return bool(await self.connection.run(_DEREGISTER, keys, (str(ref.incarnation), ref.worker_id)))

    async def workers(self) -> list[WorkerInfo]:
        """Those whose lease is live, by worker id. A damaged or foreign record is logged once and left out."""
        key = self.connection.key
        rows = await self.connection.run(_WORKERS, (key("workers"),), (key("worker", ""),))
        assert isinstance(rows, list)
        live = {row[0].decode(errors="replace"): row[1:] for row in sorted(rows, key=itemgetter(0))}
        self._read = {worker_id: (str(row), self._parse(worker_id, row)) for worker_id, row in live.items()}
        return [info for _, info in self._read.values() if info is not None]

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
        self._known_epoch = max(self._known_epoch, incarnation.epoch)

    def _clock_us(self) -> int:
        return int(self._clock.wall() * 1e6)

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
