"""Reader of the histories that `baton/event_journal.py` writes: one journal per file, with its events in order."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Handoff = tuple[str, int]
"""Request and attempt."""

ENDS = ("stopped", "died")
_COMMON = {"monotonic": (int, float), "wall": (int, float), "process": (str,), "incarnation": (str,), "event": (str,)}
_INCARNATION = re.compile(r"(\d+\.\d+)?")
_NUMBERS = ("attempt", "first", "count", "held")


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule and the line that shows it."""

    rule: str
    at: str
    text: str

    def __str__(self) -> str:
        return f"{self.at}: {self.rule}: {self.text}"


@dataclass(frozen=True, slots=True)
class Event:
    """One line. `at` is its file and line; `facts` are all its values."""

    at: str
    name: str
    time_s: float
    facts: dict[str, Any]

    @property
    def request(self) -> str:
        return str(self.facts.get("request", ""))

    @property
    def handoff(self) -> Handoff:
        return self.request, int(self.facts.get("attempt", 0))

    @property
    def tokens(self) -> range:
        """The token indices of the event."""
        first = int(self.facts.get("first", 0))
        return range(first, first + int(self.facts.get("count", 0)))

    def blocks(self, name: str) -> list[tuple[int, int]]:
        """Return pairs of index and generation."""
        return [(index, generation) for index, generation in self.facts.get(name, [])]


@dataclass(slots=True)
class Journal:
    """The events of one process. `faults` are invalid lines."""

    path: Path
    events: list[Event] = field(default_factory=list)
    faults: list[Violation] = field(default_factory=list)

    @property
    def process(self) -> str:
        return str(self.events[0].facts["process"])

    @property
    def incarnation(self) -> str:
        return str(self.events[0].facts["incarnation"])

    @property
    def life(self) -> tuple[int, ...]:
        """The incarnation as a sort key."""
        return tuple(int(part) for part in self.incarnation.split(".") if part)

    @property
    def role(self) -> str:
        """Router, prefill or decode, from the first event."""
        return str(self.events[0].facts.get("role", ""))

    @property
    def last(self) -> Event:
        return self.events[-1]

    @property
    def end(self) -> str:
        """Event that ended the process: stopped or died. Empty if it was killed or still runs."""
        return self.last.name if self.last.name in ENDS else ""


def read(path: Path, clock: str = "wall") -> Journal:
    """Read one file, with the times of one clock. An unterminated last line is left out, because its process was killed
    while writing it.
    """
    journal = Journal(path)
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        at = f"{path}:{number}"
        try:
            facts = json.loads(line)
            _check(facts)
        except ValueError as error:  # includes bytes that are not text
            journal.faults.append(Violation("readable", at, str(error)))
            continue
        journal.events.append(Event(at, facts["event"], facts[clock], facts))
    return journal


def _check(facts: Any) -> None:
    """Raise ValueError if `facts` is not an event."""
    if not isinstance(facts, dict):
        raise ValueError("not an object")
    for name, kinds in _COMMON.items():
        if not isinstance(facts.get(name), kinds):
            raise ValueError(f"{name} is missing, or not one")
    if not _INCARNATION.fullmatch(facts["incarnation"]):
        raise ValueError("incarnation is not one")
    for name in _NUMBERS:
        if not isinstance(facts.get(name, 0), int):
            raise ValueError(f"{name} is not a number")
    for name in ("own", "shared"):
        pairs = facts.get(name, [])
        if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
            raise ValueError(f"{name} is not pairs of numbers")


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and [type(number) for number in value] == [int, int]


def read_all(paths: Sequence[Path], clock: str = "wall") -> Iterator[Journal]:
    """Yield the journals of these files, and of the *.jsonl files in these folders."""
    for path in paths:
        yield from (read(file, clock) for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path]))
