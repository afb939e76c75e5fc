"""Exit codes: 0 ok, 1 other error, 2 usage, 3 config, 4 unreachable, 5 overloaded, 130 stopped."""

from __future__ import annotations

from baton.errors import (
    BatonError,
    Cancelled,
    CheckpointError,
    ConfigError,
    InvalidRequest,
    LedgerError,
    NoWorker,
    Overloaded,
    UnknownModel,
)

EXIT_CODES: tuple[tuple[type[BatonError], int], ...] = (
    (InvalidRequest, 2),
    (UnknownModel, 2),
    (ConfigError, 3),
    (CheckpointError, 3),
    (LedgerError, 4),
    (NoWorker, 4),
    (Overloaded, 5),
    (Cancelled, 130),
)


def exit_code(error: BatonError) -> int:
    """Return the exit code of an error, or 1 if the table has none."""
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), 1)
