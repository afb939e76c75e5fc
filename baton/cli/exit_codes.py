"""Exit codes: 0 ok, 1 other error, 2 usage, 3 config, 4 unreachable, 5 overloaded, 130 stopped."""

from __future__ import annotations

from baton import errors

EXIT_CODES: dict[int, tuple[type[errors.BatonError], ...]] = {
    2: (errors.InvalidRequest, errors.UnknownModel),
    3: (errors.ConfigError, errors.CheckpointError),
    4: (errors.LedgerError, errors.NoWorker),
    5: (errors.Overloaded,),
    130: (errors.Cancelled,),
}


def exit_code(error: errors.BatonError) -> int:
    """Return the exit code of an error, or 1 if the table has none."""
    return next((code for code, kinds in EXIT_CODES.items() if isinstance(error, kinds)), 1)
