"""The log lines of a cluster's processes in time order. `LogFile` reads and follows a file, `LogFilter` selects."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from baton.cluster.state_dir import StateFolder, running_clusters
from baton.errors import InvalidRequest, NoWorker
from baton.home import baton_home
from baton.logs import HARMLESS, LEVELS

CHUNK_BYTES = 2**18
MAX_LINE_BYTES = 2**20  # the rest of a longer line is another line
# Lines of Redis and Ray in the same files: local time, severity, text.
REDIS = re.compile(r"\d+:\w (\d+ \w+ \d{4} \d\d:\d\d:\d\d\.\d+) ([.\-*#]) (.*)")
RAY = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+) ([DIWEC]) \d+ \d+\] (.*)")
OTHERS = ((REDIS, "%d %b %Y %H:%M:%S.%f"), (RAY, "%Y-%m-%d %H:%M:%S,%f"))
MARKS = {".": "debug", "-": "debug", "*": "info", "#": "warning"}
MARKS |= {"D": "debug", "I": "info", "W": "warning", "E": "error", "C": "critical"}
LINES = 100  # default number of lines, without --lines and --since
FOLLOW_S = 0.2
STYLES = {"debug": "dim", "info": "green", "warning": "yellow", "error": "red", "critical": "bold red"}
SHOWN_FIRST = ("timestamp", "level", "process", "event", "exception")  # shown in their own places


@dataclass(frozen=True, slots=True)
class Line:
    """One log line. `at` is a Unix time. A line without `event`, such as a traceback, has the time of a neighbour."""

    at: float
    process: str
    text: str
    event: dict[str, object] | None = None

    @property
    def level(self) -> str:
        return str((self.event or {}).get("level", ""))

    def facts(self, *keys: str) -> list[str]:
        """Return the event's values of these keys, with lists flattened."""
        values = [(self.event or {}).get(key) for key in keys]
        return [str(value) for each in values for value in (each if isinstance(each, list) else [each])]

    def as_json(self) -> str:
        if self.event is not None and self.text.startswith("{"):
            return self.text
        fields = self.event or {"event": "output", "text": self.text}
        stamp = datetime.fromtimestamp(self.at).astimezone().isoformat()
        return json.dumps({"process": self.process, **fields, "timestamp": stamp})


def parse(text: str, process: str, neighbour: float) -> Line:
    """Parse a line of Baton, Redis or Ray. Any other line gets the time `neighbour`."""
    with suppress(ValueError, KeyError, TypeError, RecursionError, OverflowError):
        if text.startswith("{"):
            event = json.loads(text)
            at = datetime.fromisoformat(event["timestamp"]).timestamp()
            return Line(at, str(event.get("process") or process), text, event)
        for pattern, form in OTHERS:
            if found := pattern.fullmatch(text):
                at = datetime.strptime(found[1], form).timestamp()  # without a time zone
                return Line(at, process, text, {"level": MARKS[found[2]], "event": found[3]})
    return Line(neighbour, process, text)


class LogFile:
    """FILE.log, and the earlier FILE.log.1 (`StateFolder.bound_logs`)."""

    def __init__(self, path: Path) -> None:
        self.process = path.stem
        self._path = path
        self._before = path.with_suffix(".log.1")
        self._place = 0  # offset of the next unread byte
        self._inode = 0
        self._partial = b""
        self._at = 0.0  # time of the last line

    def last(self, takes: Callable[[Line], bool], since: float, most: int | None) -> list[Line]:
        """Return the last `most` lines (None for all) that `takes` accepts, back to `since`. `more` continues there."""
        found: list[Line] = []  # newest first, like `pending`
        pending: list[str] = []  # lines without events, which get the time of the event before them
        oldest: float | None = None
        for text in self._backwards():
            line = parse(text, self.process, -1.0)
            if line.at < 0:
                pending.append(text)
                continue
            self._at = self._at or line.at  # of the newest event, which is read first
            oldest = line.at
            found += filter(takes, [*(Line(line.at, self.process, each) for each in pending), line])
            pending.clear()
            if line.at < since or (most is not None and len(found) >= most):
                break
        else:
            first = self._written() if oldest is None else oldest
            found += filter(takes, [Line(first, self.process, each) for each in pending])
        return found[:most][::-1]

    def more(self) -> Iterator[Line]:
        """Yield new lines since the last call. An incomplete line waits. A restarted file is read from the start."""
        try:
            with self._path.open("rb") as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self._inode:
                    self._inode, self._place, self._partial = state.st_ino, 0, b""
                elif state.st_size < self._place:
                    yield from self._parsed(self._rest())
                    self._place, self._partial = 0, b""
                file.seek(self._place)
                for chunk in iter(lambda: file.read(CHUNK_BYTES), b""):
                    self._place += len(chunk)
                    yield from self._parsed(self._split(chunk))
        except FileNotFoundError:
            return

    def lines_with(self, text: str) -> Iterator[Line]:
        wanted = text.encode()
        for path in (path for path in (self._before, self._path) if path.exists()):
            with path.open("rb") as file:
                found = (_decode(line) for line in file if wanted in line)
                yield from (parse(line, self.process, self._at) for line in found)

    def _parsed(self, texts: Iterable[str]) -> Iterator[Line]:
        for text in texts:
            line = parse(text, self.process, self._at or self._written())
            self._at = line.at
            yield line

    def _split(self, chunk: bytes) -> list[str]:
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        if len(self._partial) > MAX_LINE_BYTES:
            whole, self._partial = [*whole, self._partial], b""
        return [_decode(line) for line in whole if line.strip()]

    def _rest(self) -> list[str]:
        """Return the unread lines of the part that was moved to FILE.log.1."""
        if not self._before.exists():
            return []
        with self._before.open("rb") as file:
            file.seek(self._place)
            return self._split(file.read())

    def _written(self) -> float:
        return self._path.stat().st_mtime if self._path.exists() else 0.0

    def _backwards(self) -> Iterator[str]:
        """Yield complete lines of both files, the last first. The text after the last newline is left for `more`."""
        try:
            with self._path.open("rb") as file:
                state = os.fstat(file.fileno())
                self._inode = state.st_ino
                pieces = _from_end(file.fileno(), state.st_size)
                tail = next(pieces, b"")
                self._place, self._partial = state.st_size, tail
                yield from (_decode(line) for line in pieces if line.strip())
            with self._before.open("rb") as file:
                yield from (_decode(line) for line in _from_end(file.fileno(), os.fstat(file.fileno()).st_size) if line)
        except FileNotFoundError:
            return


def _from_end(file: int, size: int) -> Iterator[bytes]:
    """Yield the pieces between newlines, the last first: the first one is the text after the last newline."""
    rest: list[bytes] = []  # pieces of a line with an unread start, last piece first
    while size > 0:
        begin = max(0, size - CHUNK_BYTES)
        first, *lines = os.pread(file, size - begin, begin).split(b"\n")
        size = begin
        if lines:
            yield b"".join(chain([lines.pop()], reversed(rest)))
            yield from reversed(lines)
            rest = [first]
        else:
            rest.append(first)
    yield b"".join(reversed(rest))


def _decode(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").rstrip("\r\n")


@dataclass(slots=True)
class LogFilter:
    """Criteria of lines. `since` is a Unix time. A line without an event has no level, so it passes every level."""

    request: str = ""
    worker: str = ""
    level: int = 0
    since: float = 0.0
    _names: set[str] = field(default_factory=set)  # the request's ids

    def takes(self, line: Line) -> bool:
        of_request = not self.request or (line.event is not None and self._of_request(line.event))
        if line.at < self.since or (self.worker and not self._of_worker(line)):
            return False
        return of_request and (line.event is None or LEVELS.get(line.level.upper(), 0) >= self.level)

    def _of_worker(self, line: Line) -> bool:
        about = line.facts("worker", "workers")
        return self.worker == line.process or any(self.worker == name.partition("@")[0] for name in about)

    def _of_request(self, event: dict[str, object]) -> bool:
        """A resumed request has another id on workers. The router's event has both, and counts even if not shown."""
        name = str(event.get("request_id", ""))
        if _is_of(str(event.get("stream", "")), self.request) and name:
            self._names.add(name)
        return any(_is_of(name, wanted) for wanted in (self.request, *self._names))


def _is_of(name: str, request: str) -> bool:
    return name == request or name.startswith(f"{request}.")  # a choice of the request


def find_logs(name: str | None) -> Path:
    """Return a cluster's logs folder, by default of the only running or only cluster. Raises NoWorker with names."""
    home = baton_home()
    there = sorted(path.parent.name for path in home.glob("*/logs"))
    running = [state.name for state in running_clusters()]
    if name is None:
        among = running or there
        if len(among) == 1:
            return StateFolder(among[0]).logs
        problem = "no cluster has run here" if not among else "set --name to a cluster"
    elif name in there:
        return StateFolder(name).logs
    else:
        problem = f"no logs of a cluster named {name!r}"
    raise NoWorker(f"{problem}: {home} has {', '.join(there) or 'none'}")


def print_logs(name: str | None, wanted: LogFilter, lines: int | None, *, follow: bool, as_json: bool) -> None:
    """Show the last `lines` accepted lines, and with `follow` new ones until KeyboardInterrupt."""
    folder = find_logs(name)
    most = lines if lines is not None else (None if wanted.since else LINES)
    files: dict[Path, LogFile] = {}
    console = Console(highlight=False, soft_wrap=True)
    plain = as_json or not sys.stdout.isatty()

    def show(line: Line) -> None:
        if plain:
            typer.echo(line.as_json())
        else:
            console.print(pretty(line))

    _look(folder, files)
    if wanted.request:
        _learn_names(files.values(), wanted)
    found = merged([file.last(wanted.takes, wanted.since, most) for file in files.values()], most)
    if wanted.request and not follow and not any(_names(file, wanted.request) for file in files.values()):
        raise InvalidRequest.of("--request", f"no line of the logs in {folder} is about {wanted.request!r}")
    for line in found:
        show(line)
    while follow:
        time.sleep(FOLLOW_S)
        _look(folder, files)
        for line in merged([[line for line in file.more() if wanted.takes(line)] for file in files.values()]):
            show(line)


def _names(file: LogFile, request: str) -> bool:
    every = LogFilter(request)
    return any(every.takes(line) for line in file.lines_with(request))


def merged(parts: Iterable[Sequence[Line]], most: int | None = None) -> list[Line]:
    """Merge lines by time, at most the last `most`. Lines of one file keep their order."""
    lines = sorted((line for part in parts for line in part), key=lambda line: line.at)
    return lines if most is None else lines[max(0, len(lines) - most) :]


def _look(folder: Path, files: dict[Path, LogFile]) -> None:
    for path in sorted(folder.iterdir()):  # `glob` would hide that the folder is another user's
        if path.suffix == ".log" and path not in files:
            files[path] = LogFile(path)


def _learn_names(files: Iterable[LogFile], wanted: LogFilter) -> None:
    """Collect other ids of a resumed request from routers' logs, which have both ids where the request was accepted."""
    for file in files:
        if file.process.startswith("router"):
            for line in file.lines_with(wanted.request):
                wanted.takes(line)


def pretty(line: Line) -> Text:
    """Format a line for a terminal: local time, process, level, event and values."""
    moment = time.localtime(line.at)
    text = Text(f"{time.strftime('%H:%M:%S', moment)}.{int(line.at % 1 * 1000):03d} ", "dim")
    text.append(f"{line.process:<12} ", "cyan")
    if line.event is None:
        return text.append(line.text.translate(HARMLESS))
    text.append(f"{line.level:<8} ", STYLES.get(line.level, ""))
    text.append(str(line.event.get("event", "")).translate(HARMLESS), "bold")
    for key, value in _facts(line.event):
        text.append(f" {key}=", "dim").append(value)
    if exception := line.event.get("exception"):
        text.append(f"\n{exception}".translate(HARMLESS), "red")
    return text


def _facts(event: dict[str, object]) -> Iterator[tuple[str, str]]:
    for key, value in event.items():
        if key not in SHOWN_FIRST and value not in ("", None):
            plain = isinstance(value, str) and " " not in value
            text = str(value) if plain else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
            yield key, text.translate(HARMLESS)
