"""A router's own listener for the gateway in its process: the public API, of this router and no other at its port."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import grpc

from baton.errors import ConfigError
from baton.rpc import channel


class Inner:
    """A Unix socket in a folder that only this user may enter; so it needs no TLS. Tokens are asked for as elsewhere.

    `server` takes the services, then `bind`.
    """

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> None:
        self.server = channel.aio_server(link=channel.PUBLIC, interceptors=interceptors)
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def bind(self) -> str:
        """The target for a client. Raises ConfigError where there is no place for it."""
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="baton-router-", ignore_cleanup_errors=True)
        except OSError as error:
            raise ConfigError(f"router.http: no folder for a socket, set TMPDIR: {error}") from error
        try:
            return channel.bind_path(self.server, f"{self._folder.name}/router")
        except ConfigError as error:
            raise ConfigError(f"router.http: {error}; TMPDIR may name another folder") from error

    async def stop(self, grace_s: float | None) -> None:
        """Calls may end by themselves for `grace_s`. Leaves nothing behind, whatever was begun."""
        await self.server.stop(grace_s)
        if self._folder is not None:
            self._folder.cleanup()
