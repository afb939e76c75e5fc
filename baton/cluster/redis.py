"""The ledger's Redis for a cluster: an embedded one that is kept alive, or another that is checked first."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import structlog

from baton.clock import SystemClock
from baton.ledger.embedded import EmbeddedRedis
from baton.ledger.ledger import Ledger

log = structlog.get_logger(__name__)


class KeptRedis:
    """An embedded Redis that is started again, at the same address, when it dies. Its data is then gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._password = secrets.token_urlsafe(24)
        self._server = EmbeddedRedis.start(folder, password=self._password)

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server.alive else None

    def poll(self) -> None:
        """Start it again if it died. Raises LedgerError when that fails."""
        if not self._server.alive:
            log.warning("redis_died", url=self._server.redacted)
            self._server = EmbeddedRedis.start(self._folder, port=self._server.port, password=self._password)

    def stop(self) -> None:
        self._server.stop()


def check_redis(url: str, name: str) -> None:
    """Raises LedgerError, naming host, port and cause, if the Redis at `url` cannot be used for cluster `name`."""

    async def check() -> None:
        ledger = await Ledger.connect(url, f"baton:{name}", 1.0, SystemClock())
        try:
            await ledger.workers()
        finally:
            await ledger.close()

    asyncio.run(check())
