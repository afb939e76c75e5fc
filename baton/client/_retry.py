"""Common parts of both clients: arguments, router addresses, and decisions on retries and resumes. No I/O."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from baton import errors
from baton.clock import Clock, SystemClock
from baton.errors import BatonError, ConfigError
from baton.rpc.channel import Wire

# CA certificates (PEM) as a path or bytes, True for those of the system, or None for no TLS. A folder of `baton certs`,
# or a `Wire`, also has the cluster's own certificate, which `cluster` needs.
Tls: TypeAlias = str | Path | bytes | bool | Wire | None

RESUMABLE = "baton-resumable"  # key in a stream's initial metadata; "1" means that `Resume` can continue the stream.
# Key in a call's metadata: the caller cancels the call when it has the whole answer, of which the call is one part.
KEEPS = "baton-keep"
RESUMABLE_S = 30.0  # default time that a stream outlives its router, so that the client finds another one.
# From a router that cannot resume, or not this request
REFUSALS = (errors.Unsupported, errors.UnknownModel, errors.InvalidRequest)
# The NoWorker of `from_rpc_error` for a router that got nothing: gRPC found no connection, or no address
UNREACHABLE = re.compile(r"cannot reach .*(failed to connect|resol)", re.DOTALL)
RETRY_BASE_S = 0.25
RETRY_CAP_S = 5.0
MOST_TIMEOUT_S = 1e9  # gRPC's clock overflows at a few times as much
_LOOPBACK = ("127.", "localhost:", "[::1]", "unix:")
_LISTS = ("ipv4:", "ipv6:")  # gRPC's syntax for several addresses of one router


class Attempts:
    """Retries of one call under one deadline. `draw` returns random numbers from 0 to 1. `spare` is the number of other
    routers: so many times an unreachable one costs neither a retry nor a wait.
    """

    def __init__(
        self, max_retries: int, timeout: float | None, clock: Clock, draw: Callable[[], float], spare: int = 0
    ) -> None:
        self._max_retries = max_retries
        self._spare = spare
        self._clock = clock
        self._draw = draw
        self._deadline = None if timeout is None else clock.monotonic() + timeout
        self._retries = 0

    def remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._clock.monotonic())

    def wait_after(self, error: BatonError, *, started: bool = False) -> float:
        """Return the seconds until the next try: the server's delay plus jitter, uniform up to a limit that doubles.
        Raises `error` if no retry can help, is left, or fits the deadline. `started` means that an event of the stream
        has arrived, so the request must not be sent again.
        """
        if self._spare and not started and isinstance(error, errors.NoWorker) and UNREACHABLE.match(str(error)):
            self._spare -= 1
            return 0.0
        if started or not error.retryable or self._retries >= self._max_retries:
            raise error
        wait: float = self._draw() * min(RETRY_CAP_S, RETRY_BASE_S * 2**self._retries)
        wait += error.retry_after_s if isinstance(error, errors.Overloaded) else 0.0
        left = self.remaining()
        if left is not None and wait >= left:
            raise error
        self._retries += 1
        return wait

    def progressed(self) -> None:
        self._retries = 0


class ClientBase:
    """Arguments and routers of a client. Raises ConfigError for a bad target, CA file or token, or a bad number."""

    _draw: Callable[[], float] = random.SystemRandom().random  # seeded programs must not retry in step
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
        self._targets = targets_of(target)
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ConfigError("token: must be printable ASCII without line breaks")
        if type(max_retries) is not int or max_retries < 0:
            raise ConfigError(f"max_retries: must be a whole number of at least 0, got {max_retries!r}")
        self._target = self._targets[0]  # first router to try
        self._admin = admin
        self._timeout = seconds(timeout)
        self._max_retries = max_retries
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._credentials = _credentials(tls)
        self._name = tls.name if isinstance(tls, Wire) else ""
        self._proxy = not all(here(each) for each in self._targets)  # of the environment
        self._opened()

    def _opened(self) -> None:
        """Finish the construction after all arguments were checked."""

    def _attempts(self, timeout: float | None, only: str = "") -> Attempts:
        spare = 0 if only else len(self._targets) - 1
        left = self._timeout if timeout is None else seconds(timeout)
        return Attempts(self._max_retries, left, self._clock, self._draw, spare)

    def _after(self, target: str) -> str:
        """Return the router to try after `target` failed; later calls start there too."""
        self._target = self._targets[(self._targets.index(target) + 1) % len(self._targets)]
        return self._target


def seconds(timeout: Any) -> float | None:
    """Return the timeout, None for an infinite one. Raises ConfigError."""
    if timeout is None or timeout == math.inf:
        return None
    if not isinstance(timeout, int | float) or not 0 < timeout <= MOST_TIMEOUT_S:
        allowed = f"seconds above 0, at most {MOST_TIMEOUT_S:g}, or None"
        raise ConfigError(f"timeout: must be {allowed}, got {timeout!r}")
    return timeout


def targets_of(target: str) -> tuple[str, ...]:
    """Return the addresses of the routers. Raises ConfigError."""
    targets = (target,) if target.startswith(_LISTS) else tuple(part.strip() for part in target.split(","))
    if not all(targets):
        raise ConfigError(f"target: must be host:port, or several separated by commas, got {target!r}")
    return targets


def here(target: str) -> bool:
    """Return True for an address of this machine, which needs no proxy."""
    return target.startswith(_LOOPBACK)


def _credentials(tls: Tls) -> grpc.ChannelCredentials | None:
    if tls is None or isinstance(tls, bool):
        return grpc.ssl_channel_credentials() if tls else None
    if isinstance(tls, Wire):
        return tls.credentials
    if isinstance(tls, bytes):
        return grpc.ssl_channel_credentials(tls)
    return Wire.of_path(tls).credentials


class Recovery:
    """Breaks of one started stream, which is lost with its connection or worker; any other failure ends it. The caller
    finally gets the loss as the error, and not a router's rejection of the Resume.
    """

    def __init__(self, targets: int) -> None:
        self.resumable = False
        self._targets = targets  # routers that may resume the stream
        self._refused = 0
        self._lost: BatonError | None = None

    def progressed(self) -> None:
        self._refused, self._lost = 0, None

    def wait_after(self, error: BatonError, attempts: Attempts, *, answered: bool) -> float:
        """Return the seconds until a Resume. Raises the final error. `answered` means that the stream had events."""
        if self._lost is not None and not answered:
            return self._wait_after_resume(self._lost, error, attempts)
        lost = self.resumable and isinstance(error, errors.WorkerLost | errors.NoWorker)
        if lost:
            self._lost = error
        return attempts.wait_after(error, started=not lost)

    def _wait_after_resume(self, lost: BatonError, error: BatonError, attempts: Attempts) -> float:
        if not isinstance(error, REFUSALS):
            return attempts.wait_after(error)
        self._refused += 1
        if self._refused >= self._targets:
            raise lost from error
        return 0.0
