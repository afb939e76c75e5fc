"""The command line. `main` is the one place where errors become exit codes.

0 ok   1 anything else   2 usage   3 config   4 unreachable   5 overloaded   130 stopped
"""

from __future__ import annotations

import sys

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
    """The exit code of an error; 1 for what the table does not name."""
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), 1)


def main() -> None:
    """Run the command line; a `BatonError` is one message on stderr and an exit code, never a traceback."""
    try:
        from baton.cli.app import app

        app()
    except BatonError as error:
        sys.stderr.write(f"baton: {type(error).__name__}: {error}\n")
        sys.exit(exit_code(error))
    except ModuleNotFoundError as error:
        sys.exit(
            f"baton: {error.name} is not installed; the command line needs: pip install 'baton-serve[server,local]'"
        )
    except KeyboardInterrupt:
        sys.exit(130)
