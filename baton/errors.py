"""Every error that Baton raises on purpose, as one tree.

    BatonError
    ├── InvalidRequest        the request itself is wrong; names each field      INVALID_ARGUMENT
    ├── UnknownModel          no such model is served here                      NOT_FOUND
    ├── Unauthenticated       no or wrong credential                            UNAUTHENTICATED
    ├── PermissionDenied      the credential does not allow this                PERMISSION_DENIED
    ├── Unsupported           a method that this version does not offer         UNIMPLEMENTED
    ├── Overloaded            queue full or waited too long; has retry_after_s  RESOURCE_EXHAUSTED
    ├── DeadlineExceeded      the caller's deadline passed                      DEADLINE_EXCEEDED
    ├── Cancelled             the caller, or an operator, gave up               CANCELLED
    ├── NoWorker              no live worker can take this now                  UNAVAILABLE
    ├── WorkerLost            a worker died with this request in hand           UNAVAILABLE
    ├── EngineFault           the engine failed on this request                 INTERNAL
    │   └── RankLost          a process of a tensor-parallel worker is gone     INTERNAL
    ├── ConfigError           cluster file, flag or environment is wrong        exit code 3
    ├── CheckpointError       a model folder cannot be served                   exit code 3
    ├── LedgerError           Redis refused or cannot be reached                exit code 4
    └── HandoffError          this handoff cannot go on (never shown to clients)
        ├── StaleAttempt      message of another attempt or incarnation
        ├── OfferRefused      receiver does not fit: version, fingerprint, layout, length
        ├── DigestMismatch    bytes that arrived are not the bytes that left
        └── ChannelBroken     the channel failed; it is disposable and is rebuilt

The one translation to gRPC status codes is in `baton.rpc.status`; the one to exit codes is in `baton.cli`.
"""

from __future__ import annotations

from dataclasses import dataclass


class BatonError(Exception):
    """Base of all errors below. `retryable` says whether trying the same again can help."""

    retryable = False


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request or config that is wrong, in the words a user needs."""

    field: str
    description: str

    def __str__(self) -> str:
        return f"{self.field}: {self.description}"


class InvalidRequest(BatonError):
    """The request is wrong; `violations` names every field that is."""

    def __init__(self, *violations: Violation) -> None:
        super().__init__("; ".join(str(v) for v in violations))
        self.violations = violations

    @classmethod
    def of(cls, field: str, description: str) -> InvalidRequest:
        """One violation: `InvalidRequest.of("sampling.temperature", "must be finite, got nan")`."""
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
    """No room now. `retry_after_s` is when to try again, in seconds."""

    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(BatonError):
    """The caller's deadline passed."""


class Cancelled(BatonError):
    """The caller, or an operator, gave the request up."""


class NoWorker(BatonError):
    """No live worker can take this request now."""

    retryable = True


class WorkerLost(BatonError):
    """A worker died, or stopped making progress, with this request in hand."""

    retryable = True


class EngineFault(BatonError):
    """The engine failed on this request; the worker lives on."""


class RankLost(EngineFault):
    """A rank of this worker died, failed or hangs: the worker as a whole cannot go on."""


class ConfigError(BatonError):
    """The cluster file, a flag or the environment is wrong; names the key, the value and what is allowed."""


class CheckpointError(BatonError):
    """A model folder cannot be served; names the file or tensor."""


class LedgerError(BatonError):
    """Redis refused a command or cannot be reached."""

    retryable = True


class HandoffError(BatonError):
    """This handoff cannot go on. Internal to workers and router: clients see WorkerLost or nothing at all."""

    retryable = True


class StaleAttempt(HandoffError):
    """A message of, or for, another attempt or incarnation."""


class OfferRefused(HandoffError):
    """The receiver cannot take this KV: version, fingerprint, layout or length differ."""


class DigestMismatch(HandoffError):
    """The bytes that arrived are not the bytes that left."""


class ChannelBroken(HandoffError):
    """The channel failed. Channels are disposable: a new one gets a new generation."""
