"""One log file: its lines as events, its last ones without reading the rest, and what is written to it meanwhile."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path

CHUNK_BYTES = 2**18
MAX_LINE_BYTES = 2**20  # of a line that goes on, the rest is another line
# What others write into the same files, in local time: the moment, how bad it is, the text.
REDIS = re.compile(r"\d+:\w (\d+ \w+ \d{4} \d\d:\d\d:\d\d\.\d+) ([.\-*#]) (.*)")
RAY = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+) ([DIWEC]) \d+ \d+\] (.*)")
OTHERS = ((REDIS, "%d %b %Y %H:%M:%S.%f"), (RAY, "%Y-%m-%d %H:%M:%S,%f"))
MARKS = {".": "debug", "-": "debug", "*": "info", "#": "warning"}
MARKS |= {"D": "debug", "I": "info", "W": "warning", "E": "error", "C": "critical"}


@dataclass(frozen=True, slots=True)
class Line:
    """`at`: Unix time, of a neighbour for what is no event (`event` None), such as the traceback of an interpreter."""

    at: float
    process: str
    text: str
    event: dict[str, object] | None = None

    @property
    def level(self) -> str:
        return str((self.event or {}).get("level", ""))

    def facts(self, *keys: str) -> list[str]:
        """What the event says under these keys, singly or as a list."""
        said = [(self.event or {}).get(key) for key in keys]
        return [str(value) for each in said for value in (each if isinstance(each, list) else [each])]

    def as_json(self) -> str:
        """As it was written, if that is JSON."""
        if self.event is not None and self.text.startswith("{"):
            return self.text
        said = self.event or {"event": "output", "text": self.text}
        stamp = datetime.fromtimestamp(self.at).astimezone().isoformat()
        return json.dumps({"process": self.process, **said, "timestamp": stamp})


def parse(text: str, process: str, neighbour: float) -> Line:
    """A line of ours, of Redis or Ray, or of whoever wrote it: that is as old as `neighbour`."""
    if text.startswith("{"):
        try:
            event = json.loads(text)
            at = datetime.fromisoformat(event["timestamp"]).timestamp()
            return Line(at, str(event.get("process") or process), text, event)
        except (ValueError, KeyError, TypeError):
            pass
    for pattern, form in OTHERS:
        if found := pattern.fullmatch(text):
            at = datetime.strptime(found[1], form).timestamp()  # it says no zone
            return Line(at, process, text, {"level": MARKS[found[2]], "event": found[3]})
    return Line(neighbour, process, text)


class LogFile:
    """FILE.log, and FILE.log.1 with what was in it before (`StateFolder.bound_logs`)."""

    def __init__(self, path: Path) -> None:
        self.process = path.stem
        self._path = path
        self._before = path.with_suffix(".log.1")
        self._place = 0  # up to which all was read
        self._inode = 0
        self._partial = b""
        self._at = 0.0  # of the last line

    def last(self, takes: Callable[[Line], bool], since: float, most: int | None) -> list[Line]:
        """The last `most` (None: all) that `takes` wants, read from the end, to where they are older than `since`.

        `more` goes on after them.
        """
        found: deque[Line] = deque()
        pending: list[str] = []  # no events, newest first: as old as the event before them
        newest = True
        for text in self._backwards():
            line = parse(text, self.process, -1.0)
            if line.at < 0:
                pending.append(text)
                continue
            if newest:
                self._at, newest = max(self._at, line.at), False
            _put(found, [Line(line.at, self.process, each) for each in pending], takes)
            pending.clear()
            _put(found, [line], takes)
            if line.at < since or (most is not None and len(found) >= most):
                break
        else:
            first = found[0].at if found else self._written()
            _put(found, [Line(first, self.process, each) for each in pending], takes)
        lines = list(found)
        return lines if most is None else lines[len(lines) - min(most, len(lines)) :]

    def more(self) -> Iterator[Line]:
        """What was written since the last look; half a line waits for its end. A file begun anew is read from there."""
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
        """All lines, from the first on, that have this in them."""
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
        """What was not read yet of what has been cut off."""
        if not self._before.exists():
            return []
        with self._before.open("rb") as file:
            file.seek(self._place)
            return self._split(file.read())

    def _written(self) -> float:
        return self._path.stat().st_mtime if self._path.exists() else 0.0

    def _backwards(self) -> Iterator[str]:
        """Whole lines from the last one on, of both files; what follows the last newline is left for `more`."""
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
    """What is between newlines, from the end on: the first one is what follows the last newline."""
    rest: list[bytes] = []  # of a line whose beginning is not read yet, last piece first
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


def _put(found: deque[Line], lines: list[Line], takes: Callable[[Line], bool]) -> None:
    """Before all that are there; `lines` are the newest first."""
    found.extendleft(line for line in lines if takes(line))


def _decode(line: bytes) -> str:
    return line.decode("utf-8", errors="replace").rstrip("\r\n")
