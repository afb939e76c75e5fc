"""The ledger's Redis of a cluster: an embedded server that is kept running, or a check of another one."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import structlog

from baton.clock import Clock, SystemClock
from baton.errors import LedgerError
from baton.ledger.embedded_redis import EmbeddedRedis
from baton.ledger.registry import Ledger

log = structlog.get_logger(__name__)
RETRY_S = 1.0
HOPELESS_S = 60.0  # then restarts are hopeless: another process may have taken the port


class KeptRedis:
    """An embedded Redis that is restarted at the same address when it dies. Its data is lost then."""

    def __init__(self, folder: Path, clock: Clock | None = None) -> None:
        self._folder = folder
        self._clock = clock or SystemClock()
        self._died_at: float | None = None
        self._retry_at = 0.0
        self._password = secrets.token_urlsafe(24)
        self._server = self._start()

    def _start(self, port: int = 0) -> EmbeddedRedis:
        try:
            return EmbeddedRedis.start(self._folder, port=port, password=self._password)
        except OSError as error:  # no memory or too many processes
            raise LedgerError(f"embedded Redis was not started: {error}") from None

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server.alive else None

    def poll(self) -> None:
        """Restart the server if it died. Raises LedgerError if that has failed for `HOPELESS_S`."""
        if self._server.alive:
            self._died_at = None
            return
        now = self._clock.monotonic()
        if self._died_at is None:
            self._died_at = self._retry_at = now
            log.warning("redis_died", url=self._server.redacted)
        if now < self._retry_at:
            return
        try:
            self._server = self._start(self._server.port)
        except LedgerError as error:
            if now - self._died_at > HOPELESS_S:
                raise
            self._retry_at = now + RETRY_S
            log.warning("redis_not_back", error=str(error))

    def stop(self) -> None:
        self._server.stop()


def check_redis(url: str, name: str) -> None:
    """Check that the Redis at `url` can be used for cluster `name`. Raises LedgerError with host, port and cause."""

    async def check() -> None:
        ledger = await Ledger.connect(url, f"baton:{name}", 1.0, SystemClock())
        try:
            await ledger.workers()
        finally:
            await ledger.close()

    asyncio.run(check())
