"""Traces of requests across all processes. The last ones are kept in memory, and sampled ones are exported.

Workers attach their spans to events that they send anyway. Spans of stages are made when a trace is read.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from baton.clock import Clock
from baton.core import Role
from baton.rpc.convert import span_from_pb
from baton.rpc.v1 import admin_pb2, common_pb2, worker_pb2
from baton.stages import Passage, Stage, StageClock
from baton.tracing.trace import Ended, TraceContext
from router.workers.stream import Late

_NS = 1e9
_MOST_SPANS = 256  # per choice, of stages and of workers each
_MOST_BYTES = 32 * 2**20  # of all kept traces
_PASSAGE_BYTES = 300
_REPORT_S = 2.0  # a prefill worker reports the result of its push between two steps, which may be long
_POLL_S = 0.005


class Track:
    """The timing of one choice of a request: its stages in this router, and the spans that workers reported."""

    def __init__(self, router_id: str, choice: int, clock: Clock, arrived: tuple[float, float] | None = None) -> None:
        self.stages = StageClock(clock, arrived)
        self.outstanding = 0  # ended attempts with a prefill worker's report outstanding
        self.received_at = math.inf  # when the newest event came from a worker
        self._router_id, self._choice, self._clock = router_id, choice, clock
        self._reported = admin_pb2.TraceReply()

    def add(self, role: Role, worker_id: str, event: worker_pb2.WorkerEvent, attempt: int = 0) -> None:
        """Add the spans of an event. `attempt` 0 means the current one. Invalid spans are dropped."""
        if not event.spans and not event.finish.verify_s:
            return
        verify_s = event.finish.verify_s or sum(span.duration_s for span in event.spans if span.name == Stage.VERIFY)
        self.stages.verified(verify_s)
        for span in event.spans:
            if len(self._reported.spans) < _MOST_SPANS and _is_time(span.start_s) and _is_time(span.duration_s):
                kept = common_pb2.Span()
                kept.CopyFrom(span)  # a reference would keep the whole message alive
                kept.role, kept.process, kept.choice = role.value, worker_id, self._choice
                kept.attempt = attempt or self.stages.attempt
                self._reported.spans.append(kept)  # last, because the exporter reads from its own thread

    def received(self, ago_s: float) -> None:
        """Record when the newest event came. A client that reads slowly delays only what follows."""
        self.received_at = self._clock.monotonic() - ago_s

    def expect_report(self) -> Late:
        """End this attempt and return the callback for the prefill worker's last report of it."""
        self.outstanding += 1
        return partial(self._late, self.stages.attempt)

    def _late(self, attempt: int, role: Role, worker_id: str, event: worker_pb2.WorkerEvent) -> None:
        self.outstanding -= 1
        self.add(role, worker_id, event, attempt)

    @property
    def size(self) -> int:
        return _PASSAGE_BYTES * len(self.stages.passages) + 4 * self._reported.ByteSize()

    def spans(self) -> Iterator[common_pb2.Span]:
        yield from map(self._stage, self.stages.so_far()[:_MOST_SPANS])
        yield from self._reported.spans

    def _stage(self, passage: Passage) -> common_pb2.Span:
        return common_pb2.Span(
            name=passage.stage.value,
            process=self._router_id,
            role="router",
            start_s=self.stages.arrived_s + passage.start / _NS,
            duration_s=passage.duration / _NS,
            attributes=passage.notes,
            attempt=passage.attempt,
            choice=self._choice,
        )


@dataclass(slots=True, eq=False)
class Trace:
    """The trace of one request: its name, and the tracks of its choices. It contains no prompt or answer."""

    request_id: str
    context: TraceContext
    router_id: str
    began_s: float
    tracks: list[Track] = field(default_factory=list)
    outcome: str = "running"
    error: str = ""
    ended_s: float = 0.0

    def spans(self) -> list[common_pb2.Span]:
        """Return the spans, sorted by start. Spans of a running request end now."""
        found = (span for track in self.tracks for span in track.spans())
        return sorted(found, key=lambda span: span.start_s)

    def reply(self) -> admin_pb2.TraceReply:
        named = {"request_id": self.request_id, "trace_id": self.context.trace_id, "outcome": self.outcome}
        return admin_pb2.TraceReply(**named, spans=self.spans())

    async def settled(self, left_s: float) -> None:
        """Wait for outstanding reports: at most 2 s, and at most half of `left_s`, the seconds until the deadline."""
        for _ in range(round(min(_REPORT_S, left_s / 2) / _POLL_S)):
            if not any(track.outstanding for track in self.tracks):
                return
            await asyncio.sleep(_POLL_S)


class Traces:
    """The last `keep` ended requests, or fewer if they are large. The share `sample` of them is passed to `export`."""

    def __init__(self, keep: int, sample: float, clock: Clock, export: Callable[[Ended], None] | None) -> None:
        self._keep, self._sample, self._clock, self._export = keep, sample, clock, export
        self._kept: dict[str, tuple[Trace, int]] = {}  # the oldest first
        self._bytes = 0

    def ended(self, trace: Trace, outcome: str, error: str) -> None:
        """Store an ended trace. `error` is the name of the error's class, or "" if there was none."""
        trace.outcome, trace.error = outcome, error
        for track in trace.tracks:
            if error:
                track.stages.note(error=error)
            track.stages.end()
        # Not before the end of its stages, even if the wall clock was set back.
        ends = (track.stages.arrived_s + track.stages.age_s for track in trace.tracks)
        trace.ended_s = max(self._clock.wall(), trace.began_s, *ends)
        self._drop(trace.request_id)
        self._kept[trace.request_id] = trace, (size := sum(track.size for track in trace.tracks))
        self._bytes += size
        while len(self._kept) > self._keep or (self._bytes > _MOST_BYTES and self._kept):
            self._drop(next(iter(self._kept)))
        if self._export is not None and trace.context.exported(self._sample):
            ended = Ended(
                request_id=trace.request_id, router_id=trace.router_id, context=trace.context, began_s=trace.began_s,
                ended_s=trace.ended_s, outcome=outcome, error=error,
                spans=lambda: [span_from_pb(span) for span in trace.spans()],
            )  # fmt: skip
            self._export(ended)

    def find(self, request_id: str) -> Trace | None:
        """Return a kept trace, or None. An empty id finds the trace that ended last."""
        name = request_id or next(reversed(self._kept), "")
        return self._kept[name][0] if name in self._kept else None

    def _drop(self, name: str) -> None:
        self._bytes -= self._kept.pop(name, (None, 0))[1]


def _is_time(seconds: float) -> bool:
    return 0 <= seconds < math.inf
