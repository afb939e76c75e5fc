"""The transformer engine that both roles use."""

from baton.logs import log_to_stderr_by_default

log_to_stderr_by_default()
