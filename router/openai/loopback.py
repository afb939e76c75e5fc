"""A private listener through which a router's own gateway reaches it, and not another router at the same port."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import grpc
import psutil

from baton.errors import ConfigError
from baton.rpc import channel

_NAME = re.compile(r"baton-router-(\d{1,9})-.+")  # folder name, with the process id


class LoopbackListener:
    """A Unix socket in a folder that only this user can enter, therefore without TLS. Tokens are required as usual.
    Register the services on `server`, then call `bind`, which also removes the folders of killed routers.
    """

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> None:
        self.server = channel.aio_server(link=channel.PUBLIC, interceptors=interceptors)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._lock: int | None = None  # lock on the folder while it is ours

    def bind(self) -> str:
        """Bind and return the target for clients. Raises ConfigError if no folder or socket can be created."""
        _sweep()
        prefix = f"baton-router-{os.getpid()}-"
        try:
            self._folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        except OSError as error:
            raise ConfigError(f"router.http: cannot create a folder for its socket, set TMPDIR: {error}") from error
        with suppress(OSError):  # some file systems have no locks
            self._lock = _locked(self._folder.name)
        try:
            return channel.bind_path(self.server, f"{self._folder.name}/router")
        except ConfigError as error:
            raise ConfigError(f"router.http: {error}; set TMPDIR to another folder") from error

    async def stop(self, grace_s: float | None) -> None:
        """Stop after at most `grace_s` seconds for running calls, and remove the folder. Safe after a partial start."""
        await self.server.stop(grace_s)
        if self._folder is not None:
            self._folder.cleanup()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _sweep() -> None:
    """Remove folders of this user's dead routers."""
    with suppress(OSError):  # folders that cannot be listed stay
        for path in Path(tempfile.gettempdir()).iterdir():
            if (name := _NAME.fullmatch(path.name)) is not None and not psutil.pid_exists(int(name[1])):
                _remove(path)


def _remove(path: Path) -> None:
    with suppress(OSError):  # not ours, in use, or already being removed
        lock = _locked(path)
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _locked(folder: str | Path) -> int:
    """Lock a folder until this process ends; a pid is not unique across containers. Raises OSError if locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != stat.S_IRWXU:
            raise PermissionError(f"{folder} must be accessible to this user only")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
