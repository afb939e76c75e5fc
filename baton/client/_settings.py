"""What a client was made with, turned into what gRPC wants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import grpc

from baton.client._core import Attempts, RetryPolicy
from baton.clock import Clock, SystemClock
from baton.errors import BatonError, ConfigError
from baton.rpc.status import from_rpc_error

Tls: TypeAlias = str | Path | bytes | bool | None
"""CA certificates (PEM) as a path or as bytes; True: those of the system; None: no TLS."""

_LOOPBACK = ("127.", "localhost:", "[::1]", "unix:")


@dataclass(frozen=True, slots=True)
class Settings:
    """Raises ConfigError when made: an unreadable CA file, a token that no header can carry, a negative number."""

    target: str
    token: str | None = field(default=None, repr=False)
    tls: Tls = field(default=None, repr=False)
    timeout: float | None = None
    max_retries: int = 2
    admin: str | None = None
    draw: Callable[[], float] | None = field(default=None, repr=False)
    clock: Clock = field(default_factory=SystemClock, repr=False)

    def __post_init__(self) -> None:
        if not self.target:
            raise ConfigError("target: must be host:port, got ''")
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError("token: must be printable ASCII without line breaks")
        if self.max_retries < 0:
            raise ConfigError(f"max_retries: must be at least 0, got {self.max_retries}")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    @property
    def proxy(self) -> bool:
        """Whether http_proxy of the environment counts: not on the way to this very machine."""
        return not self.target.startswith(_LOOPBACK)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None without TLS. Raises ConfigError for an unreadable file."""
        if self.tls is None or self.tls is False:
            return None
        if self.tls is True:
            return grpc.ssl_channel_credentials()
        return grpc.ssl_channel_credentials(_read(self.tls))

    def attempts(self, timeout: float | None) -> Attempts:
        """The tries of one call; `timeout` in seconds, None: the client's own."""
        policy = RetryPolicy(self.max_retries)
        if self.draw is not None:
            policy = RetryPolicy(self.max_retries, draw=self.draw)
        return Attempts(policy, self.timeout if timeout is None else timeout, self.clock)

    def error(self, failure: grpc.RpcError, *, connected: bool = False) -> BatonError:
        """The typed error behind a failed call to the target."""
        return from_rpc_error(failure, self.target, connected=connected)

    def admin_target(self) -> str:
        """Raises ConfigError when the client was made without one."""
        if self.admin is None:
            raise ConfigError("admin: not known; make the client with admin='host:port' to see the cluster")
        return self.admin


def _read(tls: str | Path | bytes) -> bytes:
    if isinstance(tls, bytes):
        return tls
    try:
        return Path(tls).read_bytes()
    except OSError as error:
        raise ConfigError(f"tls: cannot read the CA file {tls}: {error.strerror}") from error
