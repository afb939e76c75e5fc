"""The checker of a soak: each token, index and ending of each request, and the effect of each fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PATIENCE_S = 90.0  # a request that takes longer counts as hung
TYPED = frozenset({"WorkerLost", "NoWorker", "Overloaded", "EngineFault", "ConnectionLost"})
TYPED |= {
    f"HTTP {code}" for code in (429, 502, 503, "worker_lost", "no_worker", "overloaded")
}  # the last three in streams
THOUGHTS = -1
INTERNAL = "internal error"  # in the EngineFault of a request that met an unexpected exception
DEATHS = "workers were lost"  # in the only EngineFault of a request that may be the cause of deaths
SERVED = frozenset({"whole", "left", "deadline"})


@dataclass(frozen=True, slots=True)
class Answer:
    """The right answer of one choice."""

    tokens: tuple[int, ...]
    text: str
    finish: str


@dataclass(frozen=True, slots=True)
class Part:
    """One delta as a client received it. HTTP deltas have text and no tokens."""

    at: float
    choice: int
    start: int
    tokens: tuple[int, ...]
    text: str


@dataclass(slots=True)
class Record:
    """One request as its client saw it. `end` is whole, left, deadline, or the class of its error."""

    number: int
    feature: str
    api: str
    answers: Mapping[int, Answer]  # by choice; THOUGHTS has the thoughts
    began: float
    parts: list[Part] = field(default_factory=list)
    finishes: dict[int, str] = field(default_factory=dict)
    end: str = ""
    detail: str = ""
    ended: float = float("inf")


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken requirement: `wrong`, `lost_or_repeated`, `hung`, `untyped` (an unexpected error), or `unended`."""

    rule: str
    request: int
    text: str


@dataclass(frozen=True, slots=True)
class Window:
    """The time of one fault: struck, undone, and all processes at work again (inf: never)."""

    kind: str
    target: str
    struck: float
    undone: float
    healthy: float


def check(records: Sequence[Record]) -> list[Finding]:
    """Return all findings. Numbers of requests are 0, 1, 2, ..., and each must have one record with one end."""
    found = [finding for record in records for finding in _of_record(record)]
    counts = Counter(record.number for record in records)
    for number in range(max(counts, default=-1) + 1):
        if counts[number] != 1:
            found.append(Finding("unended", number, f"{counts[number]} records"))
    return found


def _of_record(record: Record) -> Iterator[Finding]:
    if not record.end or record.ended - record.began > PATIENCE_S:
        yield Finding("hung", record.number, f"{record.feature} over {record.api}: {record.end or 'no end'}")
    elif record.end not in SERVED | TYPED:
        yield Finding("untyped", record.number, f"{record.feature} over {record.api}: {record.end}: {record.detail}")
    if record.end == "EngineFault" and DEATHS not in record.detail:
        rule = "untyped" if INTERNAL in record.detail else "lost_or_repeated"
        yield Finding(rule, record.number, f"{record.feature} over {record.api}: {record.detail}")
    for choice, answer in record.answers.items():
        parts = [part for part in record.parts if part.choice == choice]
        yield from _of_tokens(record, answer, parts)
        yield from _of_text(record, choice, answer, parts)


def _of_tokens(record: Record, answer: Answer, parts: list[Part]) -> Iterator[Finding]:
    if record.api == "http":
        return
    came = 0
    for part in parts:
        if part.start != came:
            yield Finding("lost_or_repeated", record.number, f"token {part.start} came instead of {came}")
        if part.tokens != answer.tokens[part.start : part.start + len(part.tokens)]:
            yield Finding("wrong", record.number, f"{record.feature}: {part.tokens} from token {part.start} on")
        came = part.start + len(part.tokens)
    if record.end == "whole" and came != len(answer.tokens):
        yield Finding("lost_or_repeated", record.number, f"{came} of {len(answer.tokens)} tokens came")


def _of_text(record: Record, choice: int, answer: Answer, parts: list[Part]) -> Iterator[Finding]:
    text = "".join(part.text for part in parts)
    finish = record.finishes.get(choice, "")
    if not answer.text.startswith(text):
        yield Finding("wrong", record.number, f"{record.feature} over {record.api}: text {text[-40:]!r}")
    elif record.end == "whole" and text != answer.text:
        yield Finding("lost_or_repeated", record.number, f"{len(text)} of {len(answer.text)} characters came")
    if record.end == "whole" and finish != answer.finish:
        yield Finding("wrong", record.number, f"finish reason {finish!r} instead of {answer.finish!r}")


def effect(window: Window, records: Iterable[Record], findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the effect of a fault on the requests that were running between its strike and its end."""
    touched = [one for one in records if one.began < window.undone and one.ended > window.struck]
    numbers = {one.number for one in touched}
    rules = Counter(one.rule for one in findings if one.request in numbers)
    return {
        "kind": window.kind,
        "target": window.target,
        "touched": len(touched),
        "recovered": sum(one.end in SERVED for one in touched),
        "errors": dict(Counter(one.end for one in touched if one.end not in SERVED)),
        **{rule: rules[rule] for rule in ("wrong", "lost_or_repeated", "hung", "untyped")},
        "stall_s": round(max((_stall(one, window) for one in touched), default=0.0), 3),
        "next_token_s": [round(delay, 4) for one in touched if (delay := _next_token(one, window)) is not None],
        "healthy_s": round(window.healthy - window.struck, 3),
    }


def _next_token(record: Record, window: Window) -> float | None:
    """Return the longest wait for a token from the fault on, or None. Only streams that it interrupted have one."""
    gaps = [gap for gap in _gaps(record) if gap[1] > window.struck and gap[0] < window.undone]
    if record.began >= window.struck or not gaps:
        return None
    return max(after - max(before, window.struck) for before, after in gaps)


def _stall(record: Record, window: Window) -> float:
    """Return the longest gap that began before the end of the fault."""
    return max(
        (after - before for before, after in _gaps(record) if after > window.struck and before < window.undone),
        default=0.0,
    )


def _gaps(record: Record) -> list[tuple[float, float]]:
    """Return begin and end of each wait for a token."""
    return list(pairwise([record.began, *(part.at for part in record.parts)]))


def leaks(census: Mapping[str, Any]) -> tuple[int, list[str]]:
    """Return the leaked blocks of an idle cluster and the problems of its census (`baton status --census --json`)."""
    blocks = sum(
        held["counted"] for worker in census["workers"] for held in worker["held"] if held["state"] != "parked"
    )
    for worker in census["workers"]:
        counts = worker["blocks"]
        blocks += abs(counts["reserved"] + counts["owned"] - sum(held["counted"] for held in worker["held"]))
    return blocks, list(census["problems"])
