"""Logs: structlog, one event per line, to stderr. JSON unless stderr is a terminal (or the config says otherwise)."""

from __future__ import annotations

import logging
import os
import sys

import structlog


def configure_logging(level: str = "info", form: str = "auto") -> None:
    """Set up this process's logging. `form` is auto, json or console."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    renderer = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def redirect_output(path: str) -> None:
    """Send this process's stdout and stderr to the end of a file, the interpreter's and every library's alike."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
