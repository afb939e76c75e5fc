"""The phases of a start, shown by `baton up` on stderr. They are read from the logs of the started processes."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from baton.clock import Clock, SystemClock

SHOWN_S = 1.0
FILE_CLOCK_S = 0.1  # because file times come from a clock that is late by up to a tick
CLEAR = "\r\x1b[K"
BAR = 10  # characters of a bar
WORKERS = ("prefill-", "decode-")


class StartDisplay:
    """Writes phases with the seconds since the start: to one line of a terminal (`live`), else a line for each."""

    def __init__(self, stream: TextIO, clock: Clock, *, live: bool) -> None:
        self._stream, self._clock, self._live = stream, clock, live
        self._began, self._last = clock.monotonic(), ""

    def show(self, phase: str, details: str = "") -> None:
        """Show the phase that the start is in now. A line for each phase has no details."""
        line = f"{self._clock.monotonic() - self._began:6.1f} s  {phase}"
        if self._live:
            whole = f"{line}{': ' * bool(details)}{details}"
            self._stream.write(CLEAR + whole[: shutil.get_terminal_size().columns - 1])  # CLEAR ends one line only
        elif phase != self._last:
            self._stream.write(f"{line}\n")
        self._last = phase
        self._stream.flush()

    def clear(self) -> None:
        """End the line of a terminal."""
        if self._live:
            self._stream.write(CLEAR)

    def ready(self) -> None:
        """Show the end of the start. On a terminal, the cluster's addresses show it."""
        if not self._live:
            self.show("ready")


@contextmanager
def shown_phases(logs: Path, workers: int, *, shows: bool = True) -> Iterator[Callable[[], None]]:
    """Show the phases of a start with so many workers, until the block ends or calls the given function: it is ready.
    Logs of earlier starts are ignored. Shows nothing unless `shows`.
    """
    if not shows:
        yield lambda: None
        return
    display = StartDisplay(sys.stderr, SystemClock(), live=sys.stderr.isatty())
    done, since = threading.Event(), time.time() - FILE_CLOCK_S

    def follow() -> None:
        while not done.is_set():
            display.show(*phase(logs, since, workers))
            done.wait(SHOWN_S)

    def end() -> None:
        if not done.is_set():
            done.set()
            thread.join()
            display.clear()

    def ready() -> None:
        end()
        display.ready()

    thread = threading.Thread(target=follow, name="phases", daemon=True)
    thread.start()
    try:
        yield ready
    finally:
        end()


def phase(logs: Path, since: float, workers: int) -> tuple[str, str]:
    """Return the phase of a start, and the progress of workers that load, by logs written after `since` (Unix time)."""
    texts = dict(_texts(logs, since))
    ready = sum("worker_ready" in text for text in texts.values())
    if not texts:
        return "starting Redis, the router and the workers", ""
    if ready < workers:
        loads = [f"{name} {share}" for name, text in texts.items() if (share := _share(text))]
        return f"{ready} of {workers} workers are ready", ", ".join(loads)
    return "the router connects to the workers", ""


def _texts(logs: Path, since: float) -> Iterator[tuple[str, str]]:
    for path in sorted(logs.glob("*.log")):
        try:
            if path.stem.startswith(WORKERS) and path.stat().st_mtime >= since:
                yield path.stem, path.read_text(encoding="utf-8", errors="replace")
        except OSError:  # removed since then
            continue


def _share(text: str) -> str:
    """Return how much of a model is loaded by the last line of a log. "" if it is about something else."""
    try:
        line = json.loads((text.strip().splitlines() or [""])[-1])
    except ValueError:  # another format, or an incomplete line
        return ""
    if not isinstance(line, dict) or line.get("event") not in {"model_loading", "model_loaded"}:
        return ""
    size = f" of {line['of_gb']:g} GB" if "of_gb" in line else ""
    percent = line.get("percent", 100)
    done = percent * BAR // 100 if isinstance(percent, int) else 0
    return f"[{'#' * done:{BAR}}] {percent} %{size}"
