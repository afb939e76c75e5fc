"""Shared helpers of the ledger's tests against a real redis-server."""

import itertools
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import redis

from baton.clock import SystemClock
from baton.core import Incarnation, KVLayout, Role, WorkerInfo, WorkerRef
from baton.ledger.embedded_redis import EmbeddedRedis
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
