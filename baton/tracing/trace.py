"""Spans of a request, the trace it belongs to (W3C `traceparent`, or a new one), and the record for exporters."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

TRACEPARENT = "traceparent"
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")
_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A trace. `parent_id`: the caller's span, 16 hex digits or "". `sampled`: exported or not; None if undecided."""

    trace_id: str
    parent_id: str = ""
    sampled: bool | None = None

    @classmethod
    def new(cls) -> TraceContext:
        return cls(secrets.token_hex(16))

    @classmethod
    def parse(cls, header: str) -> TraceContext | None:
        """Parse a header. Returns None unless it is exactly in the format of version 00."""
        found = _FORM.fullmatch(header)
        if found is None or not int(found[1], 16) or not int(found[2], 16):
            return None
        return cls(found[1], found[2], bool(int(found[3], 16) & 1))

    def exported(self, sample: float) -> bool:
        """Whether the trace is in the share `sample`, unless the caller decided. Equal ids give equal results."""
        if self.sampled is not None:
            return self.sampled
        return int(self.trace_id[16:], 16) < sample * 2**64


ROLES = ("router", "prefill", "decode")
TIME_S = 1e-6  # exceeds the rounding error of a Unix time as a float


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the time of one request in one process. `start_s`: Unix time by the host's clock; `attempt` 0 means
    none.

    A router's spans are stages; those of one choice have no gaps between them. `attributes` hold no text of a request.
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


def typed(attributes: Mapping[str, str]) -> dict[str, object]:
    """Return attributes for JSON: those that are numbers as numbers, because the wire has text only."""
    return {name: json.loads(text) if _NUMBER.fullmatch(text) else text for name, text in attributes.items()}


def processes(spans: Iterable[Span]) -> list[tuple[str, str]]:
    """Return (role, process) of all spans, in the order of `ROLES`, then of their first span."""
    found = dict.fromkeys((span.role, span.process) for span in sorted(spans, key=lambda span: span.start_s))
    return sorted(found, key=lambda one: ROLES.index(one[0]) if one[0] in ROLES else len(ROLES))


def lanes(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Split spans into lanes without overlaps."""
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
    """A finished request. Times in Unix seconds. `error`: class name, or "". `spans` builds them when called."""

    request_id: str
    router_id: str
    context: TraceContext
    began_s: float
    ended_s: float
    outcome: str
    error: str
    spans: Callable[[], Sequence[Span]]
