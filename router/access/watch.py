"""A file of tokens that is read again when it changes. A broken one changes nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from baton.errors import ConfigError, Unauthenticated
from router.access.tokens import Grant, Tokens, read_tokens

log = structlog.get_logger(__name__)
LOOK_S = 2.0
_Version = tuple[int, int, int]


class TokenFile:
    """The tokens of a file as it is now, or was when it was last good. Raises ConfigError when made."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._version = self._look()  # before reading: what changes in between is read again
        self._tokens: Tokens = read_tokens(path)

    def grant(self, authorization: str | None) -> Grant:
        """See `Tokens.grant`."""
        return self._tokens.grant(authorization)

    def confirm(self, grant: Grant) -> None:
        """Raises Unauthenticated if its token was taken away, or is worth something else now."""
        if grant not in self._tokens:
            raise Unauthenticated("this token is not what it was any more")

    async def watch(self) -> None:
        """Look every few seconds, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Read the file if it has changed. A broken one is said in the log, once."""
        version = self._look()
        if version == self._version:
            return
        self._version = version
        try:
            self._tokens = await asyncio.to_thread(read_tokens, self._path)
        except ConfigError as error:
            log.error("tokens_not_read", error=str(error), kept=len(self._tokens))
        else:
            log.info("tokens_read", tokens=len(self._tokens))

    def _look(self) -> _Version | None:
        try:
            found = Path(self._path).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
