"""Logging: one event per line on stderr, as JSON unless stderr is a terminal or the config differs. Library logs,
warnings, and exceptions that end a thread or the process become such lines too. See `docs/how-to/logs.md`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import structlog

from baton.core import HandoffId, WorkerRef

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger

log = structlog.get_logger(__name__)
LEVELS = logging.getLevelNamesMapping()
# Escapes for control characters, because a line may contain text from a client.
HARMLESS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def configure_logging(level: str = "info", form: str = "auto", process: str = "", copy: Path | None = None) -> None:
    """Set up this process's logging. `form` is auto, json or console; `process` is on each line. `copy` is a file that
    gets each line as JSON, down to level info even if stderr has fewer.
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
        # Plain, because a traceback with locals reveals prompts and passwords.
        plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        end += [structlog.processors.format_exc_info, _harmless, plain]
    else:
        end += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    structlog.configure(
        processors=[*begin, *end],
        wrapper_class=structlog.make_filtering_bound_logger(lowest),
        logger_factory=partial(LineWriter, sys.stderr, Losses()),
    )
    _take_libraries(begin, end, max(logging.WARNING, LEVELS[level.upper()]))
    sys.excepthook = _process_failed
    threading.excepthook = _thread_failed


def log_to_stderr_by_default() -> None:
    """Log to stderr until `configure_logging` runs: stdout belongs to the program that imports Baton as a library."""
    if not structlog.is_configured():
        # A new writer per line, because a program may replace `sys.stderr` later.
        structlog.configure(logger_factory=lambda *_: LineWriter(sys.stderr))


@dataclass(slots=True)
class Losses:
    """Lines of this process that could not be written. `torn` means that the last one was written in part."""

    lines: int = 0
    torn: bool = False


class LineWriter:
    """The logger that structlog calls with each rendered line. A line that cannot be written is dropped. The number of
    dropped lines is logged when lines can be written again.

    A log line must not end what it reports on: on a full disk or a closed pipe the request goes on.
    """

    def __init__(self, file: TextIO | None, losses: Losses | None = None, *_: object) -> None:
        self._file = file  # None, which means stdout, in a process that was started with stderr closed
        self._losses = losses

    def msg(self, line: str) -> None:
        """Write one line in one call."""
        losses = self._losses or Losses()
        try:
            self._write(line, losses)
        except (OSError, ValueError):  # ValueError: the file was closed
            losses.lines += 1
            return
        if losses.lines:
            count, losses.lines = losses.lines, 0
            log.warning("log_lines_lost", count=count)

    def _write(self, line: str, losses: Losses) -> None:
        """Write around the buffer of the process's stderr, which would keep a failed line and write it later."""
        own = sys.__stderr__
        if own is None or self._file is not own:  # a program's own file
            print(line, file=self._file, flush=True)
            return
        data = f"{chr(10) * losses.torn}{line}\n".encode(errors="backslashreplace")
        written = os.write(own.fileno(), data)
        losses.torn = written < len(data)
        if losses.torn:
            raise OSError("the line was not written as a whole")

    debug = info = warning = error = critical = exception = msg


def _named(process: str, _: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Put `process` first, and expand a `handoff` to request and attempt and a `worker` to its name."""
    handoff = event.pop("handoff", None)
    if isinstance(handoff, HandoffId):
        event = {"request_id": handoff.request_id, "attempt": handoff.attempt, **event}
    if isinstance(event.get("worker"), WorkerRef):
        event["worker"] = str(event["worker"])
    return {"process": process, **event} if process else event


def _harmless(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {key: value.translate(HARMLESS) if isinstance(value, str) else value for key, value in event.items()}


class Copy:
    """A processor that appends each event to `file` if possible, then drops those below level `shown`."""

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
        except OSError:  # the folder may not exist yet or any more
            pass
        if LEVELS[event["level"].upper()] < self._shown:
            raise structlog.DropEvent
        return event


class Libraries(logging.StreamHandler[Any]):
    """Handler that logs library messages in our format."""


def _take_libraries(begin: Sequence[Processor], end: Sequence[Processor], level: int) -> None:
    """Install the handler for libraries. `level` is at least warning, because libraries are verbose below it."""
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
    """Append this process's stdout and stderr, also those of native libraries, to a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
