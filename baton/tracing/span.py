"""A part of the time of one request in one process, as clients and tools get it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

ROLES = ("router", "prefill", "decode")
TIME_S = 1e-6  # more than what a Unix time is off by, as a float


@dataclass(frozen=True, slots=True)
class Span:
    """Times in seconds, `start_s` of Unix time by the clock of its own host. `attempt` 0: of no attempt.

    Of the router: a stage; those of one choice follow each other without gap. `attributes` are figures, never text of
    a request.
    """

    name: str
    process: str  # router id or worker id
    role: str  # router | prefill | decode
    start_s: float
    duration_s: float
    attributes: Mapping[str, str] = field(default_factory=dict)
    attempt: int = 0
    choice: int = 0

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


def processes(spans: Iterable[Span]) -> list[tuple[str, str]]:
    """(role, process) of all, in the order of the request's way, then of their first span."""
    found = dict.fromkeys((span.role, span.process) for span in sorted(spans, key=lambda span: span.start_s))
    return sorted(found, key=lambda one: ROLES.index(one[0]) if one[0] in ROLES else len(ROLES))


def lanes(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Some of them each, so that those of one lane do not overlap."""
    found: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.duration_s)):
        free = next((lane for lane in found if lane[-1].end_s <= span.start_s + TIME_S), None)
        if free is None:
            found.append([span])
        else:
            free.append(span)
    yield from found
