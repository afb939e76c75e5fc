"""Logs: one event per line on stderr, as JSON unless that is a terminal (or the config says otherwise); `docs/logs.md`.

What libraries say through `logging`, warnings, and exceptions that end a thread or the process are such lines, too.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import structlog

from baton.core import HandoffId, WorkerRef

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger

log = structlog.get_logger(__name__)
LEVELS = logging.getLevelNamesMapping()
# What a terminal would obey, as text: a line may repeat what a client has called its request.
HARMLESS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def configure_logging(level: str = "info", form: str = "auto", process: str = "", copy: Path | None = None) -> None:
    """Set up this process's logging. `form` is auto, json or console; `process` is on each line.

    `copy`: a file that gets each line as JSON, also those of level info that stderr does not.
    """
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    lowest = min(LEVELS[level.upper()], logging.INFO if copy else logging.CRITICAL)
    begin: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        partial(_named, process),
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    end: list[Processor] = [] if copy is None else [Copy(copy, LEVELS[level.upper()])]
    if console:
        # Plainly: a traceback that shows locals shows prompts and passwords.
        plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        end += [structlog.processors.format_exc_info, _harmless, plain]
    else:
        end += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    structlog.configure(
        processors=[*begin, *end],
        wrapper_class=structlog.make_filtering_bound_logger(lowest),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    _take_libraries(begin, end, max(logging.WARNING, LEVELS[level.upper()]))
    sys.excepthook = _process_failed
    threading.excepthook = _thread_failed


def log_to_stderr_by_default() -> None:
    """Send log lines to stderr until `configure_logging` runs, unless the program has configured structlog.

    structlog's own default is stdout, which belongs to the program that imports Baton as a library.
    """
    if not structlog.is_configured():
        structlog.configure(logger_factory=_to_stderr)


def _to_stderr(*_: object) -> structlog.PrintLogger:
    """One logger a line, because a program may replace `sys.stderr` later."""
    return structlog.PrintLogger(sys.stderr)


def _named(process: str, _: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Who says it first; a `handoff` is its request and attempt, and a `worker` its name, wherever they are said."""
    handoff = event.pop("handoff", None)
    if isinstance(handoff, HandoffId):
        event = {"request_id": handoff.request_id, "attempt": handoff.attempt, **event}
    if isinstance(event.get("worker"), WorkerRef):
        event["worker"] = str(event["worker"])
    return {"process": process, **event} if process else event


def _harmless(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {key: value.translate(HARMLESS) if isinstance(value, str) else value for key, value in event.items()}


class Copy:
    """A processor that writes each event to the end of `file`, and lets those pass that are of level `shown` or above.

    A file that cannot be written is none: its folder may not be there yet, or no more.
    """

    def __init__(self, file: Path, shown: int) -> None:
        self._file = file
        self._shown = shown
        self._render = structlog.processors.JSONRenderer(default=str)

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        copied = structlog.processors.format_exc_info(logger, method, dict(event))
        copied = {key: value for key, value in copied.items() if not key.startswith("_")}
        line = self._render(logger, method, copied)
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"{line!s}\n")
        except OSError:
            pass
        if LEVELS[event["level"].upper()] < self._shown:
            raise structlog.DropEvent
        return event


class Libraries(logging.StreamHandler[Any]):
    """What libraries say, as lines like ours."""


def _take_libraries(begin: Sequence[Processor], end: Sequence[Processor], level: int) -> None:
    """`level` is warning or above: below it they talk about themselves."""
    handler, root = Libraries(sys.stderr), logging.getLogger()
    for old in [each for each in root.handlers if isinstance(each, Libraries)]:
        root.removeHandler(old)
    handler.setLevel(level)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*begin, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *end],
        )
    )
    root.addHandler(handler)
    logging.captureWarnings(capture=True)


def _process_failed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    else:
        log.critical("process_failed", exc_info=(kind, error, trace))


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit):
        name = failed.thread.name if failed.thread else "?"
        log.critical("thread_failed", thread=name, exc_info=(failed.exc_type, failed.exc_value, failed.exc_traceback))


def redirect_output(path: str) -> None:
    """Send this process's stdout and stderr to the end of a file, the interpreter's and every library's alike."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
