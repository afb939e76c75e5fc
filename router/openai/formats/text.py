"""The text of an answer as it arrives, and the parts that were read from it.

A reader is a generator of `Source` primitives. A primitive yields while the text so far does not decide its result, so
a reader is written as if it had the whole text, and its parts do not depend on how the text is cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TypeAlias, TypeVar

from baton.limits import MAX_UNREAD_CHARS


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the model's reasoning, without its marks."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """The beginning of a call. `id` is the one that the model wrote, if its form has ids."""

    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments, which are JSON, of the last call."""

    text: str


T = TypeVar("T")
Part: TypeAlias = str | Reasoning | Call | Arguments
Steps: TypeAlias = Generator[None, None, T]
Emit: TypeAlias = Callable[[str], None]

_SPACES = re.compile(r"\s*+")
_JSON = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)  # an escape, perhaps cut, or a character that opens or closes
_SCALAR = re.compile(r"[^\s,}\]]*+")
_WORD = re.compile(r"[\w.-]*+")
_PYTHON = re.compile(r"""\\.?|["'(){}\[\],]""", re.DOTALL)


class Source:
    """The unread text, and the parts of the answer that are not yet delivered."""

    def __init__(self, read: Callable[[Source], Steps[None]]) -> None:
        self._text, self._at, self.ended = "", 0, False
        self.cut = False  # see `end`
        self._trial: list[str] | None = None  # text read since a trial began
        self._unread = 0  # characters that failed trials have read
        self._parts: list[Part] = []
        self.gap = ""  # white space before the mark that `until` found
        self.said = False  # content since the last call or reasoning
        self.thinking = False
        self._steps = read(self)

    def feed(self, text: str) -> list[Part]:
        """Return the parts that `text` completes. Adjacent texts of a kind are joined."""
        self._text, self._at = self._text[self._at :] + text, 0
        next(self._steps, None)
        found, self._parts = list(_joined(self._parts)), []
        return found

    def end(self, *, cut: bool = False) -> list[Part]:
        """Return the parts that waited for more text. A limit of tokens or a stop string `cut` it."""
        self.ended, self.cut = True, cut
        return self.feed("")

    def say(self, text: str) -> None:
        self.said = self.said or bool(text)
        self._parts.append(text)

    def reason(self, text: str) -> None:
        self._parts.append(Reasoning(text))

    def call(self, name: str, given_id: str = "") -> None:
        self._trial, self.said = None, False  # now it cannot be text any more
        self._parts.append(Call(name, given_id))

    def arguments(self, text: str) -> None:
        self._parts.append(Arguments(text))

    def take(self, size: int) -> str:
        """Read `size` characters that are there."""
        found = self._text[self._at : self._at + size]
        self._at += size
        if self._trial is not None:
            self._trial.append(found)
        return found

    def attempt(self, steps: Steps[bool]) -> Steps[bool]:
        """Run `steps`. If they return False, the text that they read is unread again. Return False without them once
        `MAX_UNREAD_CHARS` characters were unread: an answer may begin calls without end.
        """
        if self._unread > MAX_UNREAD_CHARS:
            return False
        outer, self._trial = self._trial, []
        done = yield from steps
        read, self._trial = self._trial, outer
        if not done and read is not None:
            again = "".join(read)
            self._text, self._at = again + self._text[self._at :], 0
            self._unread += len(again)
        elif outer is not None and read is not None:
            outer += read
        return done

    def ahead(self) -> Steps[str]:
        """Return the next character, or "" at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def spaces(self) -> Steps[str]:
        """Read white space up to another character or the end."""
        return (yield from self._run(_SPACES))

    def sees(self, *marks: str) -> Steps[str]:
        """Return the first of `marks` that the text begins with, or ""."""
        longest = max(map(len, marks), default=0)
        while True:
            rest = self._text[self._at : self._at + longest]
            found = next((mark for mark in marks if mark and rest.startswith(mark)), "")
            if found or self.ended or not any(mark.startswith(rest) for mark in marks):
                return found
            yield

    def took(self, *marks: str) -> Steps[str]:
        """Read the first of `marks` that the text begins with, or return ""."""
        return self.take(len((yield from self.sees(*marks))))

    def closed(self, *marks: str) -> Steps[None]:
        """Read white space and one of `marks`, if it follows. At the end of the answer a part of it is enough."""
        yield from self.spaces()
        if not (yield from self.took(*marks)):
            self.drops_part(*marks)

    def drops_part(self, *marks: str) -> bool:
        """At the end of the answer, drop the rest if it is the beginning of one of `marks`."""
        rest = self._text[self._at :]
        if not (self.ended and rest and any(mark.startswith(rest) for mark in marks)):
            return False
        self.take(len(rest))
        return True

    def until(self, marks: tuple[str, ...], emit: Emit, *, line: tuple[str, ...] = (), cut: bool = False) -> Steps[str]:
        """Emit text before the first of `marks`, and return this mark, or "" at the end. Marks of `line` count where a
        line or the answer begins. `gap` becomes the white space before the mark, which is not emitted. At the end a
        part of a mark is text unless it is `cut`; then white space is dropped, too.
        """
        stops, fresh = _stops(marks + line), not self.said
        while True:
            self.gap = yield from self.spaces()
            allowed = marks + line if fresh or "\n" in self.gap else marks
            if found := (yield from self.sees(*allowed)):
                return found
            if cut and self.drops_part(*allowed):
                return ""
            if not (yield from self.ahead()):
                emit("" if cut else self.gap)
                return ""
            emit(self.gap + self._match(stops))
            fresh = False

    def through(self, marks: tuple[str, ...], emit: Emit) -> Steps[str]:
        """Emit the text up to the first of `marks` unchanged, read this mark and return it, or "" at the end."""
        pattern = _any_of(marks)
        while True:
            if found := pattern.search(self._text, self._at):
                emit(self.take(found.start() - self._at))
                return self.take(len(found.group()))
            emit(self.take(len(self._text) - self._at - _partial(marks, self._text, self._at)))
            if self.ended:
                self.take(len(self._text) - self._at)
                return ""
            yield

    def before(self, *marks: str) -> Steps[str]:
        """Read the text up to one of `marks` and the mark. Return the text without white space around it."""
        found = list[str]()
        yield from self.through(marks, found.append)
        return "".join(found).strip()

    def word(self) -> Steps[str]:
        """Read letters, digits, `_`, `.` and `-`."""
        return (yield from self._run(_WORD))

    def _run(self, pattern: re.Pattern[str]) -> Steps[str]:
        found = list[str]()
        while True:
            found.append(self._match(pattern))
            if self._at < len(self._text) or self.ended:
                return "".join(found)
            yield

    def value(self, emit: Emit) -> Steps[None]:
        """Emit one JSON value as it is written, up to its last character or the end of the answer."""
        if (yield from self.ahead()) not in ("{", "[", '"'):
            emit((yield from self._run(_SCALAR)))
            return
        depth, quoted = 0, False
        while True:
            stop = len(self._text)
            for found in _JSON.finditer(self._text, self._at):
                depth, quoted = _nested(found.group(), depth, quoted)
                if found.group() == "\\" and not self.ended:
                    stop = found.start()  # the rest of the escape is to come
                elif not depth and not quoted:
                    emit(self.take(found.end() - self._at))
                    return
            emit(self.take(stop - self._at))
            if self.ended:
                return
            yield

    def string(self) -> Steps[str | None]:
        """Read a JSON string. Return its text, or None if there is none."""
        if (yield from self.ahead()) != '"':
            return None
        found = list[str]()
        yield from self.value(found.append)
        try:
            return str(json.loads("".join(found), strict=False))
        except ValueError:
            return None

    def argument(self) -> Steps[tuple[str, str]]:
        """Read an argument of Python. Return it after the `,` or `)` that ends it, or after "" at the end."""
        found, depth, quote = list[str](), 0, ""
        while True:
            stop = len(self._text)
            for each in _PYTHON.finditer(self._text, self._at):
                char = each.group()
                if char == "\\" and not self.ended:
                    stop = each.start()
                elif not quote and not depth and char in ",)":
                    found.append(self.take(each.start() - self._at))
                    return self.take(1), "".join(found)
                elif quote or char in "\"'":
                    quote = "" if char == quote else quote or char
                else:
                    depth += (char in "([{") - (char in ")]}")
            found.append(self.take(stop - self._at))
            if self.ended:
                return "", "".join(found)
            yield

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        return self.take(len(found.group())) if found else ""


def _nested(char: str, depth: int, quoted: bool) -> tuple[int, bool]:
    if char == '"':
        return depth, not quoted
    if quoted or char[0] == "\\":
        return depth, quoted
    return depth + (1 if char in "{[" else -1), quoted


@lru_cache
def _stops(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for a character and what follows it up to white space or the beginning of a mark."""
    return re.compile(rf"\S[^\s{''.join(re.escape(mark[0]) for mark in marks if mark)}]*+")


@lru_cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(mark) for mark in marks))


def _partial(marks: Iterable[str], text: str, start: int) -> int:
    """Return the length of the longest end of `text` from `start` on that is the beginning of a mark."""
    most = min(max(map(len, marks)) - 1, len(text) - start)
    return next((size for size in range(most, 0, -1) if any(mark.startswith(text[-size:]) for mark in marks)), 0)


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    for kind, group in groupby(parts, key=type):
        if kind is Call:
            yield from group
            continue
        text = "".join(part if isinstance(part, str) else part.text for part in group if not isinstance(part, Call))
        if text:
            yield text if kind is str else Reasoning(text) if kind is Reasoning else Arguments(text)
