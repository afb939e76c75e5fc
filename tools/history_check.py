"""Invariants of the histories of all processes of a cluster, under any kills, freezes and network cuts.

readable     each line is an event; only the last line of a killed process may be torn
place        a file begins with `started`, has one process, and ends with its end; incarnations of a place rise, and an
             older one accepts no new work after the next has registered
clock        time never goes back within a file
order        events of a request, or of a handoff at a worker, follow the state machines in `history_order.py`: no
             commit after a fence, no second commit, no token without a commit
one_ending   each accepted request, and each handoff at a worker, ends exactly once
attempts     attempts of a request rise, by one at its router
one_commit   an attempt is committed at no more than one worker
tokens       indices are 0, 1, 2, ... once each, in order, for the client and from each decode worker
witness      each token sent to a client was sent by a worker of that attempt
one_owner    a block has one owner; sharers found it cached, in its current generation
let_go       exactly the held blocks are freed, after the last write, and all of them in the end

A process that died, was killed, or was replaced by its next incarnation need not have finished its work. A process
without an end and a successor may still run: its pending work counts only if it was due `grace_s` ago.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tools.history_events import Event, Handoff, Journal, Violation, read_all
from tools.history_order import NEW_WORK, Book, name_of


@dataclass(slots=True)
class Report:
    """Journals read, and violations found."""

    journals: list[Journal]
    violations: list[Violation]
    outcomes: Counter[str]  # of requests: number accepted, and number by outcome


def check(paths: Sequence[Path], *, grace_s: float = 5.0, one_host: bool = False) -> Report:
    """Check these files and folders. Required events may be late by `grace_s` seconds of wall time, or of the monotonic
    clock that all processes of `one_host` share, if the wall clock may have been stepped.
    """
    journals = list(read_all(paths, "monotonic" if one_host else "wall"))
    faults = [fault for journal in journals for fault in journal.faults]
    journals = [journal for journal in journals if journal.events]
    books = [Book(journal) for journal in journals]
    for book in books:
        book.read()
        faults += book.faults
    faults += _places(journals, grace_s)
    faults += _ends(books, grace_s)
    faults += _one_commit(journals)
    faults += _witnesses(books)
    return Report(journals, faults, _outcomes(journals))


def _registered(journal: Journal) -> Event | None:
    return next((event for event in journal.events if event.name == "registered"), None)


def _places(journals: Sequence[Journal], grace_s: float) -> Iterator[Violation]:
    """Check the order in which incarnations registered."""
    lives: dict[str, list[tuple[float, Journal, Event]]] = defaultdict(list)
    for journal in journals:
        if (event := _registered(journal)) is not None:
            lives[journal.process].append((event.time_s, journal, event))
    for place in lives.values():
        place.sort(key=lambda entry: entry[0])
        for (_, older, _), (_, newer, event) in pairwise(place):
            if newer.life <= older.life:
                yield Violation("place", event.at, f"{newer.incarnation} comes after {older.incarnation}")
            yield from _late(older, event, grace_s)


def _late(older: Journal, taken: Event, grace_s: float) -> Iterator[Violation]:
    for event in older.events:
        if event.name in NEW_WORK and event.time_s > taken.time_s + grace_s:
            yield Violation("place", event.at, f"{event.name} after another incarnation took the place: {taken.at}")


def _ends(books: Sequence[Book], grace_s: float) -> Iterator[Violation]:
    """Yield unended requests and handoffs, and unfreed blocks, of processes that lived on."""
    routed = [event for book in books if book.journal.role == "router" for event in book.journal.events]
    ended = {event.request: event.time_s for event in routed if event.name == "ended"}
    newest = {journal.process: journal.life for journal in sorted((b.journal for b in books), key=lambda j: j.life)}
    for book in books:
        journal, last = book.journal, book.journal.last.time_s
        lost = any(event.name in {"died", "lease_lost"} for event in journal.events)
        if lost or journal.life != newest[journal.process]:
            continue
        for event, text in _left(book):
            # A push of pinned blocks may still run in the end: it is cut after the engine has stopped.
            strict = journal.end == "stopped" and event.facts.get("part") != "pin"
            if strict or ended.get(event.request, last) + grace_s < last:
                yield Violation("let_go" if "holds" in text else "one_ending", event.at, f"{name_of(event)} {text}")


def _left(book: Book) -> Iterator[tuple[Event, str]]:
    """Yield the last event and the state of everything unfinished at the end of a journal."""
    for life in book.lives.values():
        if life.last is not None and life.state != "ended":
            yield life.last, f"is {life.state} in the end"
    for event, count in book.blocks.held():
        yield event, f"still holds {count} blocks in the end"


def _one_commit(journals: Sequence[Journal]) -> Iterator[Violation]:
    seen: dict[Handoff, Event] = {}
    for event in (event for journal in journals for event in journal.events if event.name == "committed"):
        if (first := seen.setdefault(event.handoff, event)) is not event:
            yield Violation("one_commit", event.at, f"{name_of(event)} was committed before, at {first.at}")


def _witnesses(books: Sequence[Book]) -> Iterator[Violation]:
    """Check attempts with both workers among the journals."""
    workers = {f"{book.journal.process}@{book.journal.incarnation}": book for book in books}
    for book in books:
        asked: dict[Handoff, list[Book]] = {}
        for event in book.journal.events:
            if event.name == "attempt":
                names = [str(event.facts.get(role)) for role in ("prefill", "decode")]
                asked[event.handoff] = [workers[name] for name in names if name in workers]
            said = [worker.said[event.handoff] for worker in asked.get(event.handoff, [])]
            missing = set(event.tokens).difference(*said) if event.name == "delivered" and len(said) == 2 else None
            if missing:
                yield Violation("witness", event.at, f"no worker of {name_of(event)} has said {sorted(missing)}")


def _outcomes(journals: Sequence[Journal]) -> Counter[str]:
    events = [event for journal in journals if journal.role == "router" for event in journal.events]
    ended = Counter(str(event.facts.get("outcome")) for event in events if event.name == "ended")
    ended["accepted"] = sum(event.name == "accepted" for event in events)
    return ended
