"""Spans as a trace file for Perfetto (ui.perfetto.dev) and chrome://tracing: the trace event format, in JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from baton.tracing.trace import ROLES, Span, lanes, processes, typed

Event = dict[str, Any]
_LANES = 100  # lane numbers per choice and attempt
_row = attrgetter("choice", "attempt")


def chrome_trace(spans: Sequence[Span], request_id: str = "", trace_id: str = "") -> dict[str, Any]:
    """Return one process per row, with a lane for each choice and attempt. Times are in microseconds since the first
    span. An arrow connects the push of a prefill worker with the receipt at the decode worker.
    """
    began = min((span.start_s for span in spans), default=0.0)
    named = {"request_id": request_id, "trace_id": trace_id, "began_unix_s": began}
    return {"traceEvents": list(_events(spans, began)), "displayTimeUnit": "ms", "otherData": named}


def _events(spans: Sequence[Span], began: float) -> Iterator[Event]:
    ends: dict[tuple[str, int, int], Event] = {}  # last event by (name, choice, attempt), for arrows
    for pid, (role, process) in enumerate(processes(spans), start=1):
        yield _named("process_name", pid, 0, process if process.startswith(role) else f"{role} {process}")
        yield _named("process_sort_index", pid, 0, ROLES.index(role) if role in ROLES else pid, "sort_index")
        mine = [span for span in spans if (span.role, span.process) == (role, process)]
        for tid, title, lane in _threads(mine):
            yield _named("thread_name", pid, tid, title)
            over = 0.0  # an overlap by rounding must not look nested
            for span in lane:
                event = ends[span.name, span.choice, span.attempt] = _complete(span, pid, tid, began)
                event["ts"] = max(event["ts"], over)
                over = round(event["ts"] + event["dur"], 3)
                yield event
    for (name, choice, attempt), push in ends.items():
        receive = ends.get(("receive", choice, attempt))
        if name == "push" and receive is not None:
            yield from _arrow(push, receive, choice * 1000 + attempt)


def _threads(spans: Sequence[Span]) -> Iterator[tuple[int, str, list[Span]]]:
    """Yield (number, title, spans without overlaps) for the lanes of one process."""
    for (choice, attempt), some in groupby(sorted(spans, key=_row), key=_row):
        title = f"attempt {attempt}" if attempt else "queue"
        for number, lane in enumerate(lanes(some), start=1):
            yield (choice * 1000 + attempt) * _LANES + number, f"choice {choice}, {title}" if choice else title, lane


def _named(what: str, pid: int, tid: int, value: object, key: str = "name") -> Event:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {key: value}}


def _complete(span: Span, pid: int, tid: int, began: float) -> Event:
    args = {**typed(span.attributes), "attempt": span.attempt, "choice": span.choice}
    times = {"ts": round((span.start_s - began) * 1e6, 3), "dur": round(span.duration_s * 1e6, 3)}
    return {"name": span.name, "cat": span.role, "ph": "X", **times, "pid": pid, "tid": tid, "args": args}


def _arrow(push: Event, receive: Event, number: int) -> Iterator[Event]:
    common = {"name": "KV", "cat": "handoff", "id": number}
    yield {**common, "ph": "s", "ts": push["ts"], "pid": push["pid"], "tid": push["tid"]}
    # An arrow must not end before it begins, although the times are of two clocks.
    ts = max(push["ts"], receive["ts"])
    yield {**common, "ph": "f", "bp": "e", "ts": ts, "pid": receive["pid"], "tid": receive["tid"]}
