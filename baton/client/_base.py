"""What both clients share: their arguments, and the decision on retries. No I/O."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import grpc

from baton.clock import Clock, SystemClock
from baton.errors import BatonError, ConfigError, Overloaded
from baton.rpc.status import from_rpc_error

Tls: TypeAlias = str | Path | bytes | bool | None
"""CA certificates (PEM) as a path or as bytes; True: those of the system; None: no TLS."""

RETRY_BASE_S = 0.25
RETRY_CAP_S = 5.0
_LOOPBACK = ("127.", "localhost:", "[::1]", "unix:")


class Attempts:
    """The tries of one call, all under one deadline. `draw` gives numbers from 0 to 1."""

    def __init__(self, max_retries: int, timeout: float | None, clock: Clock, draw: Callable[[], float]) -> None:
        self._max_retries = max_retries
        self._clock = clock
        self._draw = draw
        self._deadline = None if timeout is None else clock.monotonic() + timeout
        self._retries = 0

    def remaining(self) -> float | None:
        """Seconds left, never below 0; None without a deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock.monotonic())

    def wait_after(self, error: BatonError, *, started: bool = False) -> float:
        """Seconds to wait before the next try, or raises `error`: no retry helps, or none is left, or no time is.

        Never less than what the server asked for; on top of it full jitter, that is evenly between 0 and a bound that
        doubles. `started`: an event of the stream has arrived, so the request must not be sent again.
        """
        if started or not error.retryable or self._retries >= self._max_retries:
            raise error
        wait: float = self._draw() * min(RETRY_CAP_S, RETRY_BASE_S * 2**self._retries)
        wait += error.retry_after_s if isinstance(error, Overloaded) else 0.0
        left = self.remaining()
        if left is not None and wait >= left:
            raise error
        self._retries += 1
        return wait


class ClientBase:
    """Raises ConfigError when made: an unreadable CA file, a token that no header can carry, a negative number."""

    _draw: Callable[[], float] = random.SystemRandom().random  # a seeded program must not retry in step with others
    _clock: Clock = SystemClock()

    def __init__(
        self,
        target: str,
        *,
        token: str | None = None,
        tls: Tls = None,
        timeout: float | None = None,
        max_retries: int = 2,
        admin: str | None = None,
    ) -> None:
        if not target:
            raise ConfigError("target: must be host:port, got ''")
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ConfigError("token: must be printable ASCII without line breaks")
        if max_retries < 0:
            raise ConfigError(f"max_retries: must be at least 0, got {max_retries}")
        self._target = target
        self._admin = admin
        self._timeout = timeout
        self._max_retries = max_retries
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._credentials = _credentials(tls)
        self._proxy = not target.startswith(_LOOPBACK)  # of the environment: not on the way to this very machine
        self._opened()

    def _opened(self) -> None:
        """All arguments are good: what is still to be done."""

    def _attempts(self, timeout: float | None) -> Attempts:
        """The tries of one call; `timeout` in seconds, None: the client's own."""
        return Attempts(self._max_retries, self._timeout if timeout is None else timeout, self._clock, self._draw)

    def _wait_after(self, failure: grpc.RpcError, attempts: Attempts, target: str, *, started: bool = False) -> float:
        """Seconds to wait before the next try of a call to `target`, or raises the typed error behind the failure."""
        return attempts.wait_after(from_rpc_error(failure, target, connected=started), started=started)

    def _admin_target(self) -> str:
        if self._admin is None:
            raise ConfigError("admin: not known; make the client with admin='host:port' to see the cluster")
        return self._admin


def _credentials(tls: Tls) -> grpc.ChannelCredentials | None:
    if tls is None or isinstance(tls, bool):
        return grpc.ssl_channel_credentials() if tls else None
    if isinstance(tls, bytes):
        return grpc.ssl_channel_credentials(tls)
    try:
        return grpc.ssl_channel_credentials(Path(tls).read_bytes())
    except OSError as error:
        raise ConfigError(f"tls: cannot read the CA file {tls}: {error.strerror}") from error
