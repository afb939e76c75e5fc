"""The lease of the `baton up` that runs a cluster in Ray. Two of them with different files would replace each other's
controller without end, and the end of one would end the workers of both.

    PREFIX:up                the host and its folder of state; expires with the lease
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType

from baton.errors import Cancelled, ConfigError, LedgerError
from baton.home import baton_home
from baton.ledger.redis_client import Connection, Script

LEASE_S = 15.0
_RETRY_S = 0.5

# KEYS: lease. ARGV: holder, TTL ms. Returns the holder. Renewing needs no memory, so a full Redis allows it.
_TAKE = Script("""
local holder = redis.call('GET', KEYS[1])
if not holder then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
elseif holder ~= ARGV[1] then return holder
else redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return ARGV[1]
""")

# KEYS: lease. ARGV: holder.
_LEAVE = Script("if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end return 0")


class FollowerLease:
    """The lease of cluster `name` for this host and state folder. As a context, it waits for a lease that expires, and
    is given back at an orderly end; after an error it expires, so that a restart has it. Methods raise ConfigError if
    another one has it, and LedgerError. `pause` waits for so many seconds and returns whether to stop.
    """

    def __init__(
        self,
        redis_url: str,
        name: str,
        holder: str = "",
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._url, self._name, self._pause = redis_url, name, pause
        self._holder = holder or f"{socket.gethostname()} {baton_home()}"

    def take(self) -> None:
        """Take the lease, or renew it."""

        async def taken(connection: Connection, key: str) -> object:
            return await connection.run(_TAKE, [key], [self._holder, round(LEASE_S * 1000)])

        if (holder := self._call(taken)) != self._holder.encode():
            raise self._taken(holder)

    def check(self) -> None:
        """Wait until no `baton up` runs the cluster, not even here, at most for the time of a lease."""

        async def read(connection: Connection, key: str) -> object:
            return await connection.call("GET", key)

        def checked() -> None:
            if (holder := self._call(read)) is not None:
                raise self._taken(holder)

        self._patiently(checked)

    def leave(self) -> None:
        """Give the lease back. Without Redis, it expires."""

        async def left(connection: Connection, key: str) -> object:
            return await connection.run(_LEAVE, [key], [self._holder])

        with suppress(LedgerError):
            self._call(left)

    def __enter__(self) -> None:
        self._patiently(self.take)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, Cancelled):
            self.leave()

    def _patiently(self, call: Callable[[], None]) -> None:
        """Call again until a lease without a holder has expired: a host may have lost power."""
        deadline = time.monotonic() + LEASE_S + _RETRY_S
        while True:
            try:
                return call()
            except ConfigError:
                if time.monotonic() > deadline or self._pause(_RETRY_S):
                    raise

    def _call(self, call: Callable[[Connection, str], Awaitable[object]]) -> object:
        async def once() -> object:
            connection = await Connection.open(self._url, f"baton:{self._name}")
            try:
                return await call(connection, connection.key("up"))
            finally:
                await connection.close()

        return asyncio.run(once())

    def _taken(self, holder: object) -> ConfigError:
        host = holder.decode(errors="replace").partition(" ")[0] if isinstance(holder, bytes) else repr(holder)
        text = f"`baton up` on {host} runs cluster {self._name!r} with this Redis"
        return ConfigError(f"name: {text}; stop it there, change its file, or use another name")
