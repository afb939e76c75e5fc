"""The registry of workers: incarnations, minted once per process, and leases, renewed by live workers.

    PREFIX:epoch, PREFIX:counter     the store's epoch; number of incarnations minted. They never expire
    PREFIX:grace                     exists for one lease time after an epoch began because the store lost data
    PREFIX:workers                   set of worker ids that may be alive; expires days after the last renewal
    PREFIX:worker:ID                 hash {incarnation, info (JSON), progress}; expires with the lease
    PREFIX:place:ID                  the incarnation last registered at that place, remembered for days

Incarnations are compared for equality only, with one exception: of two that register at one place, the one minted later
gets it. Each script is one decision in one round trip and returns {epoch, ...}.

**Data loss.** Every call sends the highest incarnation that its process has seen. If the store has a lower one (it is
empty, or an older copy), the script begins the next epoch. That epoch exceeds all known epochs and both clocks in
microseconds; scripts are atomic, so it begins once. A process that sees a new epoch writes its data again (`follow`).
During the grace, records may be missing, and a mint waits if its place has not registered again. First all live workers
register again, so that later incarnations exceed theirs.

**A first store** looks like one that lost everything, until a process calls that has seen a higher incarnation. In a
store without an epoch, a process that has seen none mints immediately, because a new cluster must not wait. If data was
lost after all, the first heartbeat or router call begins the grace. A worker that registers after the grace begins
another one. Incarnations minted in between are unique; one that is lower than the live holder of its place is rejected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from operator import itemgetter
from typing import Annotated, Any, Literal

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from baton.clock import Clock
from baton.core import Incarnation, KVLayout, Role, WorkerInfo, WorkerRef
from baton.ledger.redis_client import Arg, Connection, Script
from baton.limits import MAX_SYSTEM_FINGERPRINT_CHARS

MAX_EPOCH = 2**53 - 1  # Lua counts in doubles
MAX_REASON_CHARS = 1024  # of `WorkerInfo.nondeterminism`

_Count = Annotated[int, Field(ge=0, le=MAX_EPOCH)]
_Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
_Name = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class _Incarnation(_Model):
    epoch: Annotated[int, Field(ge=1, le=MAX_EPOCH)]
    counter: Annotated[int, Field(ge=1, le=MAX_EPOCH)]


class _Layout(_Model):
    layers: _Size
    kv_heads: _Size
    head_dim: _Size
    block_size: _Size
    dtype: Literal["float32", "bfloat16", "float16", "int8"]
    tensors: Annotated[tuple[_Name, ...], Field(min_length=1, max_length=8)]


class _Worker(_Model):
    worker_id: _Name
    incarnation: _Incarnation
    address: _Name
    role: Literal["prefill", "decode"]
    fingerprint: _Name
    model: Annotated[str, Field(min_length=1, max_length=4096)]
    max_model_len: _Size
    total_blocks: _Size
    layout: _Layout
    pid: _Count
    host: Annotated[str, Field(max_length=256)]
    protocol_version: _Size
    determinism: Annotated[str, Field(max_length=MAX_SYSTEM_FINGERPRINT_CHARS)] = ""  # missing from older workers
    nondeterminism: Annotated[str, Field(max_length=MAX_REASON_CHARS)] = ""
    thinking_chunk: _Count = 0
    metrics: Annotated[str, Field(max_length=256)] = ""
    cpu_level: Annotated[str, Field(max_length=256)] = ""
    quantize: Annotated[str, Field(max_length=256)] = ""
    backend: Annotated[str, Field(max_length=256)] = ""
    tokenizer: Annotated[str, Field(max_length=256)] = ""


def worker_to_json(info: WorkerInfo) -> bytes:
    """Serialize a worker's record. Raises ValueError naming each field that a reader would reject."""
    fields = asdict(info)
    try:
        record = _Worker.model_validate(fields | fields.pop("ref") | {"role": info.role.value})
    except ValidationError as error:
        raise ValueError(_fields(error)) from None
    return record.model_dump_json().encode()


def worker_from_json(raw: bytes) -> WorkerInfo:
    """Inverse of `worker_to_json`. Ignores unknown fields. Raises ValueError naming wrong fields, not their content."""
    try:
        record = _Worker.model_validate_json(raw)
    except ValidationError as error:
        raise ValueError(_fields(error)) from None
    fields = record.model_dump()
    who = (fields.pop("worker_id"), Incarnation(**fields.pop("incarnation")), fields.pop("address"))
    role, layout = Role(fields.pop("role")), KVLayout(**fields.pop("layout"))
    return WorkerInfo(ref=WorkerRef(*who), role=role, layout=layout, **fields)


def _fields(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(f"{'.'.join(str(part) for part in item['loc']) or 'record'}: {item['msg']}" for item in found)


# First part of every script. KEYS 1-3: epoch, counter, grace. ARGV 1-4: highest epoch and counter seen by the caller,
# its wall clock in microseconds, lease ms. Epochs are about 2e15: %.0f, because tostring() would round them.
_EPOCH = """
local epoch = tonumber(redis.call('GET', KEYS[1]) or '') or 0
local counter = tonumber(redis.call('GET', KEYS[2]) or '') or 0
local known, counted = tonumber(ARGV[1]), tonumber(ARGV[2])
local function begin()
  local now = redis.call('TIME')
  epoch = math.max(known + 1, epoch + 1, tonumber(ARGV[3]), now[1] * 1000000 + now[2])
  redis.call('SET', KEYS[1], string.format('%.0f', epoch))
end
if epoch < known or (epoch == known and counter < counted) then
  begin()
  redis.call('SET', KEYS[3], 1, 'PX', ARGV[4])
end
"""


# KEYS 4: place (of an empty id if the caller has none). Returns the ms to wait, or 0 and the counter.
MINT = Script(
    _EPOCH
    + """
if epoch == 0 then begin() end
local wait = redis.call('PTTL', KEYS[3])
if wait > 0 and redis.call('EXISTS', KEYS[4]) == 0 then return {epoch, wait, 0} end
return {epoch, 0, redis.call('INCR', KEYS[2])}
"""
)

# KEYS 4-6: place, worker, workers. ARGV 5-9: epoch, counter, worker id, info, place TTL ms.
REGISTER = Script(
    _EPOCH
    + """
local place = redis.call('GET', KEYS[4])
local e, c = string.match(place or '', '^(%d+)%.(%d+)$')
local mine, my_epoch = ARGV[5] .. '.' .. ARGV[6], tonumber(ARGV[5])
e, c = tonumber(e or 0), tonumber(c or 0)
if e > my_epoch or (e == my_epoch and c > tonumber(ARGV[6])) then return {epoch, 0} end
if not place and my_epoch < epoch then redis.call('SET', KEYS[3], 1, 'PX', ARGV[4], 'NX') end
redis.call('DEL', KEYS[5])
redis.call('HSET', KEYS[5], 'incarnation', mine, 'info', ARGV[8], 'progress', 0)
redis.call('PEXPIRE', KEYS[5], ARGV[4])
redis.call('SET', KEYS[4], mine, 'PX', ARGV[9])
redis.call('SADD', KEYS[6], ARGV[7])
redis.call('PEXPIRE', KEYS[6], ARGV[9])
return {epoch, 1}
"""
)

# KEYS 4-6: place, worker, workers. ARGV 5-7: incarnation, progress, place TTL ms.
RENEW = Script(
    _EPOCH
    + """
if redis.call('HGET', KEYS[5], 'incarnation') ~= ARGV[5] then return {epoch, 0} end
redis.call('PEXPIRE', KEYS[5], ARGV[4]) -- first: a full Redis rejects HSET as the first write of a script
redis.call('PEXPIRE', KEYS[4], ARGV[7])
redis.call('PEXPIRE', KEYS[6], ARGV[7])
redis.call('HSET', KEYS[5], 'progress', ARGV[6])
return {epoch, 1}
"""
)

# KEYS 4-6: place, worker, workers. ARGV 5-6: incarnation, worker id.
DEREGISTER = Script(
    _EPOCH
    + """
if redis.call('HGET', KEYS[5], 'incarnation') ~= ARGV[5] then return {epoch, 0} end
redis.call('SREM', KEYS[6], ARGV[6])
return {epoch, redis.call('DEL', KEYS[5])}
"""
)

# KEYS 4: workers. ARGV 5: the prefix of the workers' keys. Ids without a key are removed.
WORKERS = Script(
    _EPOCH
    + """
local rows = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[4])) do
  local row = redis.pcall('HMGET', ARGV[5] .. id, 'incarnation', 'info')
  if row.err then row = {false, false} end
  if redis.call('EXISTS', ARGV[5] .. id) == 0 then redis.call('SREM', KEYS[4], id)
  else rows[#rows + 1] = {id, row[1], row[2]} end
end
return {epoch, rows}
"""
)


log = structlog.get_logger(__name__)

PLACE_TTL_S = 7 * 86400


class Ledger:
    """One process's client of the registry. Every method raises LedgerError if Redis cannot be used."""

    def __init__(self, connection: Connection, lease_s: float, clock: Clock) -> None:
        self.connection = connection
        self._lease_ms = max(1, round(lease_s * 1000))
        self._clock = clock
        self._known = (0, 0)  # the highest incarnation seen anywhere
        self._epoch = 0  # the store's, as last seen
        self._followers: set[Callable[[], None]] = set()
        self._read: dict[str, tuple[str, WorkerInfo | None]] = {}  # last rows of `workers`, parsed

    @classmethod
    async def connect(cls, url: str, prefix: str, lease_s: float, clock: Clock) -> Ledger:
        """Connect. `prefix`: `baton:NAME`. Raises LedgerError (host, port, cause) within 5 s, or ConfigError (URL)."""
        return cls(await Connection.open(url, prefix), lease_s, clock)

    def follow(self, forgotten: Callable[[], None]) -> Callable[[], None]:
        """Call `forgotten` on the event loop whenever the store has lost data. Returns a function that ends this."""
        self._followers.add(forgotten)
        return partial(self._followers.discard, forgotten)

    async def mint(self, worker_id: str = "") -> Incarnation:
        """Mint a new incarnation. It is unique and exceeds all earlier ones, even if the store lost its data. Waits
        while the store's grace lasts, unless `worker_id`, the place it is for, was registered in this epoch.
        """
        while True:
            epoch, wait_ms, counter = await self._decide(MINT, [self.connection.key("place", worker_id)])
            if counter:
                minted = Incarnation(epoch, counter)
                self._learn(minted)
                return minted
            log.info("mint_waits", wait_s=wait_ms / 1000)
            await asyncio.sleep(wait_ms / 1000)

    async def register(self, info: WorkerInfo) -> bool:
        """Take the place `info.ref.worker_id` and a lease on it; an older incarnation there is replaced. Returns False
        if a newer one was registered: the caller must drop its work and mint anew. Raises ValueError if a field is out
        of range.
        """
        mine = info.ref.incarnation
        self._learn(mine)
        args = (mine.epoch, mine.counter, info.ref.worker_id, worker_to_json(info), self._place_ms)
        return bool((await self._decide(REGISTER, self._keys(info.ref), *args))[1])

    async def renew(self, ref: WorkerRef, progress: int) -> bool:
        """Extend the lease by `lease_s` from now. `progress` is a step count, for operators. Returns False if the lease
        has lapsed or another incarnation holds the place: a slow worker is then fenced and must mint anew. A worker
        that saw Redis fail keeps its incarnation; `register` finds out whether the place was taken.
        """
        args = (str(ref.incarnation), progress, self._place_ms)
        return bool((await self._decide(RENEW, self._keys(ref), *args))[1])

    async def deregister(self, ref: WorkerRef) -> bool:
        """Give the lease back. Returns False, without a change, if this incarnation no longer has it."""
        args = (str(ref.incarnation), ref.worker_id)
        return bool((await self._decide(DEREGISTER, self._keys(ref), *args))[1])

    async def workers(self) -> list[WorkerInfo]:
        """Return workers with a live lease, by worker id. A damaged or foreign record is logged once and left out."""
        key = self.connection.key
        rows = (await self._decide(WORKERS, [key("workers")], key("worker", "")))[1]
        live = {row[0].decode(errors="replace"): row[1:] for row in sorted(rows, key=itemgetter(0))}
        self._read = {worker_id: (str(row), self._parse(worker_id, row)) for worker_id, row in live.items()}
        return [info for _, info in self._read.values() if info is not None]

    async def _decide(self, script: Script, keys: Sequence[str], *args: Arg) -> list[Any]:
        """Run a script that compares epochs first. Returns its answer, which begins with the epoch."""
        key = self.connection.key
        caller = (*self._known, int(self._clock.wall() * 1e6), self._lease_ms)
        names = (key("epoch"), key("counter"), key("grace"), *keys)
        answer = await self.connection.run(script, names, (*caller, *args))
        assert isinstance(answer, list)
        self._saw(answer[0])
        return answer

    def _saw(self, epoch: int) -> None:
        """Record the epoch. It only grows, because answers may arrive out of order."""
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
        await self.connection.close()


def _row_to_info(worker_id: str, row: object) -> WorkerInfo:
    """Parse a row. Raises ValueError also if it has no fields, as from a key of another type."""
    match row:
        case [bytes() as incarnation, bytes() as raw]:
            info = worker_from_json(raw)
        case _:
            raise ValueError("not a worker record")
    if info.ref.worker_id != worker_id or str(info.ref.incarnation).encode() != incarnation:
        raise ValueError("the record names another worker or incarnation than its key")
    return info
