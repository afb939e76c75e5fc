"""The client for Redis: timeouts, retries, TLS and credentials by URL, a prefix on every key, scripts by hash.

    redis://[user:password@]host:port/db     rediss://... (TLS)     unix:///path?db=0
    rediss://...?ssl_ca_certs=/path/ca.pem   a private authority

It needs one server, Redis 6.2 or later. This user (`ACL SETUSER`, or `user` in an ACL file) is sufficient; it may run
`COMMANDS`, on keys with its prefix:

    user baton on >PASSWORD resetchannels ~baton:NAME:* -@all +@connection +eval +evalsha +time +get +set +incr +del
        +exists +pexpire +pttl +hget +hset +hmget +hdel +hkeys +sadd +srem +smembers +xadd +xread
        +xrevrange

Keys must never be evicted: Redis must run with `maxmemory-policy noeviction` (its default).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import re
from collections.abc import AsyncIterator, Sequence
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import ConnectionError, ReadOnlyError, RedisError

from baton.errors import ConfigError, LedgerError
from baton.network import redacted

COMMANDS = (
    *("eval", "evalsha", "time", "get", "set", "incr", "del", "exists", "pexpire", "pttl"),
    *("hget", "hset", "hmget", "hdel", "hkeys", "sadd", "srem", "smembers", "xadd", "xread", "xrevrange"),
)
SOCKET_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 5.0
READ_S = 1.0  # the longest wait of a read, `prefix_directory.WAIT_MS`

# Allowed after the `?` of a URL. Other options would change the answers of calls, or are unknown to redis-py.
OPTIONS = ("db", "username", "password", "client_name", "socket_timeout", "socket_connect_timeout")
TLS_OPTIONS = tuple(
    f"ssl_{name}" for name in ("ca_certs", "ca_path", "certfile", "keyfile", "password", "check_hostname")
)

Arg = str | int | bytes
_PREFIX = re.compile(r"[A-Za-z0-9_.-]+(:[A-Za-z0-9_.-]+)*")


class Script:
    """A Lua script and its hash, for EVALSHA."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class Connection:
    """A pool of connections to one Redis. Belongs to the event loop that opened it."""

    def __init__(self, client: Redis, where: str, prefix: str) -> None:
        self.client = client
        self.where = where
        self._prefix = prefix

    @classmethod
    async def open(cls, url: str, prefix: str) -> Connection:
        """Connect and ping. Raises ConfigError (URL or prefix) or LedgerError (unreachable, refused) within 5 s."""
        if not _PREFIX.fullmatch(prefix):
            raise ConfigError(f"Redis key prefix {prefix!r}: letters, digits, '_', '.', '-', in parts joined by ':'")
        connection = cls(_client(url), address_of(url), prefix)
        try:
            async with connection._errors(), asyncio.timeout(CONNECT_TIMEOUT_S):
                await connection.call("PING")
        except BaseException:
            await connection.close()
            raise
        return connection

    def key(self, *parts: str) -> str:
        """Return `prefix:part:part`."""
        return ":".join((self._prefix, *parts))

    @contextlib.asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        """Turn any failure of Redis inside into a LedgerError with the address and the cause."""
        task, failure = asyncio.current_task(), None
        cancelled = task.cancelling() if task else 0
        try:
            yield
        except (RedisError, OSError, RuntimeError) as error:  # RuntimeError: see `_client`
            # Not chained, because the cause holds connection objects with the password.
            failure = LedgerError(f"Redis at {self.where}: {_cause(error)}")
            await self._leave_replica([error])
        if task and task.cancelling() > cancelled:  # redis-py's `wait_for` may swallow it before Python 3.12
            raise asyncio.CancelledError
        if failure is not None:
            raise failure

    async def call(self, *command: Arg) -> object:
        async with self._errors():
            answer: object = await self.client.execute_command(*command)  # type: ignore[no-untyped-call]  # its gap
        return answer

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Arg]) -> object:
        """Run one script in one round trip. Raises LedgerError."""
        return await self.call("EVAL", script.text, len(keys), *keys, *args)

    async def run_many(
        self, script: Script, calls: Sequence[tuple[Sequence[str], Sequence[Arg]]]
    ) -> list[int | LedgerError]:
        """Run many calls of one idempotent script in one round trip, not atomically together; answers in order. A
        failed call is a LedgerError in its place. Raises LedgerError if Redis cannot be reached; any of the calls may
        have been executed.
        """
        names = itertools.chain(
            [("EVAL", script.text)], itertools.repeat(("EVALSHA", script.sha))
        )  # the first loads it
        pipe = self.client.pipeline(transaction=False)
        for name, (keys, args) in zip(names, calls, strict=False):
            pipe.execute_command(*name, len(keys), *keys, *args)
        async with self._errors():
            answers: list[object] = await pipe.execute(raise_on_error=False)
            await self._leave_replica(answers)
        return [self._integer(answer) for answer in answers]

    async def _leave_replica(self, answers: Sequence[object]) -> None:
        """Close idle connections to a server that became a replica, so that the next ones reach its successor."""
        errors = [answer for answer in answers if isinstance(answer, RedisError)]
        # Redis 6.2 reports a write of a script as an error of the script.
        if any(isinstance(error, ReadOnlyError) or "-READONLY" in str(error) for error in errors):
            await self.client.connection_pool.disconnect(inuse_connections=False)

    def _integer(self, answer: object) -> int | LedgerError:
        if isinstance(answer, int):
            return answer
        cause = _cause(answer) if isinstance(answer, RedisError) else f"unexpected answer {type(answer).__name__}"
        return LedgerError(f"Redis at {self.where}: {cause}")

    async def close(self) -> None:
        """Close the sockets. Never raises if Redis is gone."""
        with contextlib.suppress(RedisError, OSError):
            await self.client.aclose()


def _client(url: str) -> Redis:
    try:
        kept_alive = _checked(url)
        return Redis.from_url(
            url,
            protocol=2,  # RESP2 needs no HELLO: one round trip less, allowed by every ACL
            driver_info=None,  # CLIENT SETINFO is unknown to Redis 6.2
            socket_connect_timeout=SOCKET_TIMEOUT_S,
            socket_timeout=SOCKET_TIMEOUT_S,
            **kept_alive,
            health_check_interval=15,
            # Retry a lost connection, but not a timeout, so that one call takes at most 2 s.
            # uvloop raises RuntimeError for a write to an aborted connection, before anything was sent.
            retry=Retry(
                ExponentialWithJitterBackoff(base=0.02, cap=0.2),
                2,
                supported_errors=(ConnectionError, RuntimeError),  # type: ignore[arg-type]  # only caught, like others
            ),
        )
    except (ValueError, TypeError):
        raise ConfigError(
            f"redis.url {redacted(url)}: expected redis://, rediss:// or unix:///path, with a numeric port and "
            "database; a password with / ? # or @ must be percent-encoded"
        ) from None


def _checked(url: str) -> dict[str, bool]:
    """Return the socket options for this kind of URL. Raises ValueError (address) or ConfigError (unknown option)."""
    parts = urlsplit(url)
    if parts.scheme != "unix" and parts.path.strip("/"):
        int(parts.path.strip("/"))  # redis-py would take database 0
    allowed = OPTIONS + TLS_OPTIONS * (parts.scheme == "rediss")
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in allowed and "@" in parts.query:
            raise ValueError("a password with a question mark: its rest is no option, and must not be shown")
        if name not in allowed:
            raise ConfigError(f"redis.url {redacted(url)}: unknown option {name!r}; valid are {', '.join(allowed)}")
        if name == "socket_timeout" and not float(value) > READ_S:
            raise ConfigError(f"redis.url {redacted(url)}: socket_timeout must be above {READ_S:g} s, got {value}")
    return {} if parts.scheme == "unix" else {"socket_keepalive": True}


def address_of(url: str) -> str:
    """Return `host:port`, or the path of a Unix socket."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return unquote(parts.path)
    return f"{parts.hostname or 'localhost'}:{parts.port or 6379}"


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__}: no answer in time"
