"""The entry point, and the only place where errors become exit codes."""

from __future__ import annotations

import sys

from baton.cli.exit_codes import exit_code
from baton.cli.importing import uncollected
from baton.errors import BatonError, ConfigError, Unauthenticated


def main() -> None:
    """Run the command line. A `BatonError` becomes one message on stderr and an exit code, never a traceback."""
    try:
        with uncollected():
            from baton.cli.app import app

        app()
    except BatonError as error:
        advice = "; commands take it from --token or BATON_TOKEN" if isinstance(error, Unauthenticated) else ""
        sys.stderr.write(f"baton: {type(error).__name__}: {error}{advice}\n")
        sys.exit(exit_code(error))
    except PermissionError as error:  # of another user's cluster, for example
        sys.stderr.write(f"baton: ConfigError: {error.filename}: {error.strerror}\n")
        sys.exit(exit_code(ConfigError()))
    except ModuleNotFoundError as error:
        sys.exit(
            f"baton: {error.name} is not installed; the command line needs: pip install 'baton-serve[server,local]'"
        )
    except KeyboardInterrupt:
        sys.exit(130)
