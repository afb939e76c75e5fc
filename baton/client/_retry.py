"""What both clients share: their arguments, the routers to ask, and the decision on retries. No I/O.

Whether and when a broken stream goes on. No I/O.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import grpc

from baton.clock import Clock, SystemClock
from baton.errors import (
    BatonError,
    ConfigError,
    InvalidRequest,
    NoWorker,
    Overloaded,
    UnknownModel,
    Unsupported,
    WorkerLost,
)
from baton.rpc.channel import Wire

Tls: TypeAlias = str | Path | bytes | bool | Wire | None
"""CA certificates (PEM) as a path or as bytes; True: those of the system; None: no TLS.

A folder as `baton certs` leaves it, or a `Wire`: a certificate of the cluster's own is shown too, for `cluster`.
"""

RETRY_BASE_S = 0.25
RETRY_CAP_S = 5.0
_LOOPBACK = ("127.", "localhost:", "[::1]", "unix:")
_LISTS = ("ipv4:", "ipv6:")  # of gRPC's own: several addresses of one router


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

    def progressed(self) -> None:
        """The call has got further: from here on its retries are counted anew."""
        self._retries = 0


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
        self._targets = _targets(target)
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ConfigError("token: must be printable ASCII without line breaks")
        if max_retries < 0:
            raise ConfigError(f"max_retries: must be at least 0, got {max_retries}")
        self._target = self._targets[0]  # the one to begin with
        self._admin = admin
        self._timeout = timeout
        self._max_retries = max_retries
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._credentials = _credentials(tls)
        self._name = tls.name if isinstance(tls, Wire) else ""
        self._proxy = not all(here(each) for each in self._targets)  # of the environment
        self._opened()

    def _opened(self) -> None:
        """All arguments are good: what is still to be done."""

    def _attempts(self, timeout: float | None) -> Attempts:
        """The tries of one call; `timeout` in seconds, None: the client's own."""
        return Attempts(self._max_retries, self._timeout if timeout is None else timeout, self._clock, self._draw)

    def _after(self, target: str) -> str:
        """Whom to ask after `target` has failed; calls to come begin there too."""
        self._target = self._targets[(self._targets.index(target) + 1) % len(self._targets)]
        return self._target

    def _admin_target(self) -> str:
        if self._admin is None:
            raise ConfigError("admin: not known; make the client with admin='host:port' to see the cluster")
        return self._admin


def _targets(target: str) -> tuple[str, ...]:
    targets = (target,) if target.startswith(_LISTS) else tuple(part.strip() for part in target.split(","))
    if not all(targets):
        raise ConfigError(f"target: must be host:port, or several with commas between them, got {target!r}")
    return targets


def here(target: str) -> bool:
    """Whether this is an address of this very machine: no proxy is on the way there."""
    return target.startswith(_LOOPBACK)


def _credentials(tls: Tls) -> grpc.ChannelCredentials | None:
    if tls is None or isinstance(tls, bool):
        return grpc.ssl_channel_credentials() if tls else None
    if isinstance(tls, Wire):
        return tls.credentials
    if isinstance(tls, bytes):
        return grpc.ssl_channel_credentials(tls)
    return Wire.of_path(tls).credentials


RESUMABLE = "baton-resumable"
"""Initial metadata of a stream: "1" when `Resume` can go on with it."""

RESUMABLE_S = 30.0
"""For how long a stream goes on without a router, unless its caller says otherwise: time to find another one."""

REFUSALS = (Unsupported, UnknownModel, InvalidRequest)  # by a router that cannot resume, or not this request


class Recovery:
    """The breaks of one stream that has begun. `targets`: how many routers may be asked to go on with it.

    Only a lost connection or worker is a break; every other failure is the answer. What the caller sees at last is the
    loss, not that some router knew nothing about the request.
    """

    def __init__(self, targets: int) -> None:
        self.resumable = False
        self._targets = targets
        self._refused = 0
        self._lost: BatonError | None = None

    def progressed(self) -> None:
        """The answer has got further: what was before is forgotten."""
        self._refused, self._lost = 0, None

    def wait_after(self, error: BatonError, attempts: Attempts, *, answered: bool) -> float:
        """Seconds to wait before a Resume, or raises what ends the stream. `answered`: the stream had events."""
        if self._lost is not None and not answered:
            return self._wait_after_resume(self._lost, error, attempts)
        lost = self.resumable and isinstance(error, WorkerLost | NoWorker)
        if lost:
            self._lost = error
        return attempts.wait_after(error, started=not lost)

    def _wait_after_resume(self, lost: BatonError, error: BatonError, attempts: Attempts) -> float:
        """As above, after a Resume that brought nothing."""
        if not isinstance(error, REFUSALS):
            return attempts.wait_after(error)
        self._refused += 1
        if self._refused >= self._targets:
            raise lost from error
        return 0.0
