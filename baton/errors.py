"""Every error that Baton raises on purpose, as one tree below `BatonError`.

`docs/reference/errors.md` lists each with its gRPC status (`baton.rpc.status`), HTTP status (`router.openai.errors`)
and exit code (`baton.cli.exit_codes`). A `HandoffError` and its subclasses are never shown to clients.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

_LACKS = {
    errno.EAGAIN: "threads",
    errno.EMFILE: "file descriptors",
    errno.ENFILE: "file descriptors",
    errno.ENOBUFS: "memory",
    errno.ENOMEM: "memory",
    errno.ENOSPC: "disk space",
}
_NO_THREAD = "can't start new thread"  # the RuntimeError of CPython's Modules/_threadmodule.c; it has no number


# How every error about a sequence that is too long begins. OpenAI's clients look for these words.
TOO_LONG = "this model's maximum context length is"


class BatonError(Exception):
    """Base of all errors below. `retryable` is True if the same call may succeed later."""

    retryable = False


@dataclass(frozen=True, slots=True)
class Violation:
    """One wrong field of a request or config, with a description for users."""

    field: str
    description: str

    def __str__(self) -> str:
        return f"{self.field}: {self.description}"


class InvalidRequest(BatonError):
    """The request is wrong; `violations` names every wrong field."""

    def __init__(self, *violations: Violation) -> None:
        super().__init__("; ".join(str(v) for v in violations))
        self.violations = violations

    @classmethod
    def of(cls, field: str, description: str) -> InvalidRequest:
        """Return the error for one field: `InvalidRequest.of("sampling.temperature", "must be finite, got nan")`."""
        return cls(Violation(field, description))


class UnknownModel(BatonError):
    """The named model is not served here."""


class Unauthenticated(BatonError):
    """No credential, or a wrong one."""


class PermissionDenied(BatonError):
    """The credential does not allow this."""


class Unsupported(BatonError):
    """A method of the protocol that this version does not offer."""


class Overloaded(BatonError):
    """No capacity now. Retry after `retry_after_s` seconds."""

    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded):
    """The caller's token has reached its own limit. Retry after `retry_after_s` seconds."""


class PromiseRefused(Overloaded):
    """The limits `ttft_ms` or `itl_ms` of the request cannot be promised now. Retry after `retry_after_s` seconds, or
    with `ttft_ms` or `itl_ms` of this error, the least in milliseconds that could be promised now. 0 means unknown.
    Clients do not retry it by themselves, because their caller has to choose.
    """

    retryable = False

    def __init__(self, message: str, retry_after_s: float = 1.0, *, ttft_ms: float = 0.0, itl_ms: float = 0.0) -> None:
        super().__init__(message, retry_after_s)
        self.ttft_ms, self.itl_ms = ttft_ms, itl_ms


def for_client(error: Exception) -> BatonError:
    """Return the error that a client gets for an exception at the boundary of a request: itself if it is a BatonError,
    Overloaded if the process lacks memory, threads, file descriptors or disk space, else EngineFault without its text.
    """
    if isinstance(error, BatonError):
        return error
    lacks = _LACKS.get(error.errno or 0) if isinstance(error, OSError) else None
    if isinstance(error, MemoryError):
        lacks = "memory"
    elif isinstance(error, RuntimeError) and str(error).startswith(_NO_THREAD):
        lacks = "threads"
    return (
        Overloaded(f"this process lacks {lacks} now") if lacks else EngineFault("internal error; see the server's log")
    )


class DeadlineExceeded(BatonError):
    """The caller's deadline passed."""


class Cancelled(BatonError):
    """The caller, or an operator, cancelled the request."""


class NoWorker(BatonError):
    """No live worker can take this request now."""

    retryable = True


class WorkerLost(BatonError):
    """A worker died or hung while it served this request."""

    retryable = True


class EngineFault(BatonError):
    """The engine failed on this request; the worker continues."""


class RankLost(EngineFault):
    """A rank of this worker died, failed or hangs, therefore the whole worker must stop."""


class ConfigError(BatonError):
    """The cluster file, a flag or the environment is wrong. The text has the key, the value and the allowed values."""


class CheckpointError(BatonError):
    """A model folder cannot be served; the text names the file or tensor."""


class LedgerError(BatonError):
    """Redis returned an error or cannot be reached."""

    retryable = True


class HandoffError(BatonError):
    """This handoff failed. Internal to workers and router: clients see WorkerLost or nothing."""

    retryable = True


class StaleAttempt(HandoffError):
    """A message from, or for, another attempt or incarnation."""


class OfferRefused(HandoffError):
    """The receiver cannot take this KV, because version, fingerprint, layout or length differ."""


class DigestMismatch(HandoffError):
    """The received bytes differ from the sent bytes."""


class ChannelBroken(HandoffError):
    """The channel failed. Channels are disposable: a new one gets a new generation."""
