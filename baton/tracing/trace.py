"""A part of the time of one request in one process, as clients and tools get it.

Which trace a request belongs to: W3C's `traceparent`, or a new one.

What an exporter is given: a request that is over.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

TRACEPARENT = "traceparent"
_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """`parent_id`: the caller's span, 16 hex digits; "": it said none. `sampled`: whether it is exported; None: the
    caller did not say.
    """

    trace_id: str
    parent_id: str = ""
    sampled: bool | None = None

    @classmethod
    def new(cls) -> TraceContext:
        return cls(secrets.token_hex(16))

    @classmethod
    def parse(cls, header: str) -> TraceContext | None:
        """None: it is not exactly what version 00 of the format says, and so is nobody's."""
        found = _FORM.fullmatch(header)
        if found is None or not int(found[1], 16) or not int(found[2], 16):
            return None
        return cls(found[1], found[2], bool(int(found[3], 16) & 1))

    def exported(self, sample: float) -> bool:
        """Whether it is among the share `sample` of all, unless the caller has decided. Equal ids have equal fates."""
        if self.sampled is not None:
            return self.sampled
        return int(self.trace_id[16:], 16) < sample * 2**64


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


@dataclass(frozen=True, slots=True)
class Ended:
    """Times in Unix seconds. `error`: the name of its class; "": none. `spans` are made when they are asked for."""

    request_id: str
    router_id: str
    context: TraceContext
    began_s: float
    ended_s: float
    outcome: str
    error: str
    spans: Callable[[], Sequence[Span]]
