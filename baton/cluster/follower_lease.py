"""The lease of the host whose `baton up` runs a cluster in Ray. Two of them with different files would replace each
other's controller without end, and the end of one would end the workers of both.

    PREFIX:up                the host; expires with the lease
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

from baton.errors import ConfigError, LedgerError
from baton.ledger.redis_client import Connection, Script

LEASE_S = 15.0

# KEYS: lease. ARGV: host, TTL ms. Returns the host that has the lease.
_TAKE = Script("""
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return holder end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
""")

# KEYS: lease. ARGV: host.
_LEAVE = Script("if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end return 0")


class FollowerLease:
    """The lease of cluster `name` for this host, held as a context. A second `baton up` of the same host is rejected by
    its state folder. Methods raise ConfigError if another host has the lease, and LedgerError.
    """

    def __init__(self, redis_url: str, name: str, host: str = "") -> None:
        self._url, self._name, self._host = redis_url, name, host or socket.gethostname()

    def take(self) -> None:
        """Take the lease, or renew it."""

        async def taken(connection: Connection, key: str) -> object:
            return await connection.run(_TAKE, [key], [self._host, round(LEASE_S * 1000)])

        self._check(self._call(taken))

    def check(self) -> None:
        """Check that no `baton up` runs the cluster, not even on this host."""

        async def read(connection: Connection, key: str) -> object:
            return await connection.call("GET", key)

        if (holder := self._call(read)) is not None:
            raise self._taken(holder)

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        """Give the lease back. Without Redis, it expires."""

        async def left(connection: Connection, key: str) -> object:
            return await connection.run(_LEAVE, [key], [self._host])

        with suppress(LedgerError):
            self._call(left)

    def _call(self, call: Callable[[Connection, str], Awaitable[object]]) -> object:
        async def once() -> object:
            connection = await Connection.open(self._url, f"baton:{self._name}")
            try:
                return await call(connection, connection.key("up"))
            finally:
                await connection.close()

        return asyncio.run(once())

    def _check(self, holder: object) -> None:
        if holder != self._host.encode():
            raise self._taken(holder)

    def _taken(self, holder: object) -> ConfigError:
        host = holder.decode(errors="replace") if isinstance(holder, bytes) else repr(holder)
        text = f"`baton up` on {host} runs cluster {self._name!r} with this Redis"
        return ConfigError(f"name: {text}; stop it there, change its file, or use another name")
