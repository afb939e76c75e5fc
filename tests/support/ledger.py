"""Helpers of the ledger's tests: against a real redis-server, in memory, and without a Redis."""

import asyncio
import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis

from baton.clock import SystemClock
from baton.core import HandoffId, Incarnation, KVLayout, Role, WorkerInfo, WorkerRef
from baton.errors import LedgerError
from baton.ledger.embedded_redis import EmbeddedRedis
from baton.ledger.ownership import OwnershipRecord, OwnershipStore, RecordState, Write
from baton.ledger.prefix_index import Holder, PrefixIndex
from baton.ledger.registry import Ledger

PREFIXES = (f"baton:t{n}" for n in itertools.count())
LONG_LEASE_S = 30.0
KNOWN_PLACES = ("/usr/bin", "/usr/sbin", "/usr/local/bin", "/opt/redis/bin")


def raw(server: EmbeddedRedis) -> redis.Redis:
    """Return a client with all permissions."""
    return redis.Redis.from_url(server.url, protocol=2, driver_info=None)


def password_of(server: EmbeddedRedis) -> str:
    return urlsplit(server.url).password or ""


def info_of(incarnation: Incarnation, worker_id: str = "decode-0") -> WorkerInfo:
    layout = KVLayout(layers=2, kv_heads=2, head_dim=16, block_size=16, dtype="float32")
    ref = WorkerRef(worker_id, incarnation, "127.0.0.1:4242")
    return WorkerInfo(ref, Role.DECODE, "f" * 64, "models/demo", 2048, 512, layout, pid=1, host="box")


async def opened(url: str) -> Ledger:
    """Open a ledger under a fixed prefix, for tests that have a Redis server of their own."""
    return await Ledger.connect(url, "baton:x", LONG_LEASE_S, SystemClock())


async def registered(ledger: Ledger, worker_id: str = "decode-0") -> WorkerInfo:
    info = info_of(await ledger.mint(worker_id), worker_id)
    assert await ledger.register(info)
    return info


def order(incarnation: Incarnation) -> tuple[int, int]:
    return incarnation.epoch, incarnation.counter


def killed_and_empty(server: EmbeddedRedis, folder: Path) -> EmbeddedRedis:
    """Kill the server with SIGKILL and start an empty one at the same address."""
    os.kill(server.pid, signal.SIGKILL)
    server.stop()
    return EmbeddedRedis.start(folder, port=server.port, password=password_of(server))


def version_of(binary: Path) -> tuple[int, ...]:
    shown = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v=(\d+)\.(\d+)\.(\d+)", shown)
    return tuple(int(part) for part in found.groups()) if found else ()


def newer_server() -> Path | None:
    """Return the path of an installed redis-server 7 or later, or None."""
    path = os.pathsep.join((os.environ.get("PATH", ""), *KNOWN_PLACES))
    found = shutil.which("redis-server", path=path)
    return Path(found) if found and version_of(Path(found)) >= (7,) else None


def owned_by(record: OwnershipRecord, owner: WorkerRef) -> bool:
    """Return whether this incarnation of the worker wrote the record."""
    return record.worker_id == owner.worker_id and record.incarnation == owner.incarnation


class OwnershipTable:
    """An in-memory store with the rules of the real one."""

    def __init__(self) -> None:
        self._records: dict[str, OwnershipRecord] = {}
        self._places: dict[str, Incarnation] = {}

    def register(self, owner: WorkerRef) -> bool:
        """Claim the worker id, as `Ledger.register` does: the most recently minted incarnation wins."""
        mine, last = owner.incarnation, self._places.get(owner.worker_id)
        if last is not None and (last.epoch, last.counter) > (mine.epoch, mine.counter):
            return False
        self._places[owner.worker_id] = mine
        return True

    def write(self, handoff: HandoffId, owner: WorkerRef, router_id: str, state: RecordState) -> bool:
        """Write a record. Returns False, without a change, if rejected."""
        if self._places.get(owner.worker_id, owner.incarnation) != owner.incarnation:
            return False
        now = self._records.get(handoff.request_id)
        if now is None or now.handoff.attempt < handoff.attempt:
            record = OwnershipRecord(handoff, state, owner.worker_id, owner.incarnation, router_id)
        elif now.handoff == handoff and owned_by(now, owner) and now.state <= state:
            record = replace(now, state=state)
        else:
            return False
        self._records[handoff.request_id] = record
        return True

    def read(self, request_id: str) -> OwnershipRecord | None:
        """Return the record, tombstones included."""
        return self._records.get(request_id)

    def expire(self, request_id: str) -> None:
        """Remove a record, as Redis does at the end of its TTL."""
        self._records.pop(request_id, None)


async def write_record(
    store: OwnershipStore, handoff: HandoffId, owner: WorkerRef, router_id: str, state: RecordState
) -> bool:
    """Write one record. Return whether it was accepted. Raises LedgerError if the store returned one."""
    answer = (await store.write_many([Write(handoff, owner, router_id, state)]))[0]
    if isinstance(answer, LedgerError):
        raise answer
    return answer


class StubConnection:
    """A connection whose `gate` delays calls. Each of `lose_next` loses one answer; False skips the call, too."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.lose_next: list[bool] = []

    def key(self, *parts: str) -> str:
        return ":".join(parts)

    async def answered(self, act: Callable[[], Any]) -> Any:
        """Return the result of `act`. Raises LedgerError if the answer is lost."""
        self.arrived.set()
        await self.gate.wait()
        lost = self.lose_next.pop(0) if self.lose_next else None
        answer = act() if lost is not False else None
        if lost is not None:
            raise LedgerError("away")
        return answer


def holders(index: PrefixIndex, digests: Iterable[bytes]) -> dict[Holder, int]:
    """Return the number of leading cached blocks of this chain per worker, without workers that have none."""
    levels = index.leading(digests)
    return {holder: count for bits, count in levels for holder in index._held if bits >> index.slot(holder) & 1}
