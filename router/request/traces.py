"""Where the time of each request went, in all processes: the last ones are kept, and those to be exported handed on.

Workers say their spans with events that they send anyway. Spans are made of stages when somebody asks for them.
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
_MOST_SPANS = 256  # of one choice, of its stages and of its workers each
_MOST_BYTES = 32 * 2**20  # of all traces that are kept
_PASSAGE_BYTES = 300  # about
_OWED_S = 0.5  # a prefill worker says what became of its push between two steps
_LOOK_S = 0.005


class Track:
    """The time of one choice of a request: its stages here, and what workers said of it."""

    def __init__(self, router_id: str, choice: int, clock: Clock, arrived: tuple[float, float] | None = None) -> None:
        self.stages = StageClock(clock, arrived)
        self.owed = 0  # attempts that are over, and of which a prefill worker is still to speak
        self._router_id, self._choice = router_id, choice
        self._heard = admin_pb2.TraceReply()

    def heard(self, role: Role, worker_id: str, event: worker_pb2.WorkerEvent, attempt: int = 0) -> None:
        """What a worker said of an attempt (0: of this one). What cannot be is left out: no request fails for it."""
        if not event.spans and not event.finish.verify_s:
            return
        verify_s = event.finish.verify_s or sum(span.duration_s for span in event.spans if span.name == Stage.VERIFY)
        self.stages.verified(verify_s)
        for span in event.spans:
            if len(self._heard.spans) < _MOST_SPANS and _is_time(span.start_s) and _is_time(span.duration_s):
                kept = common_pb2.Span()
                kept.CopyFrom(span)  # it would keep the whole message of its step alive
                kept.role, kept.process, kept.choice = role.value, worker_id, self._choice
                kept.attempt = attempt or self.stages.attempt
                self._heard.spans.append(kept)  # whole: the exporter reads them in its thread

    def owe(self) -> Late:
        """This attempt is over, and a prefill worker will say more of it: to be called with that."""
        self.owed += 1
        return partial(self._late, self.stages.attempt)

    def _late(self, attempt: int, role: Role, worker_id: str, event: worker_pb2.WorkerEvent) -> None:
        self.owed -= 1
        self.heard(role, worker_id, event, attempt)

    @property
    def size(self) -> int:
        """Bytes, about."""
        return _PASSAGE_BYTES * len(self.stages.passages) + 4 * self._heard.ByteSize()

    def spans(self) -> Iterator[common_pb2.Span]:
        yield from map(self._stage, self.stages.so_far()[:_MOST_SPANS])
        yield from self._heard.spans

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
    """One request: its name, and the tracks of its choices. Nothing of what was asked or answered."""

    request_id: str
    context: TraceContext
    router_id: str
    began_s: float
    tracks: list[Track] = field(default_factory=list)
    outcome: str = "running"
    error: str = ""
    ended_s: float = 0.0

    def spans(self) -> list[common_pb2.Span]:
        """By their start. Of one that runs: until now."""
        found = (span for track in self.tracks for span in track.spans())
        return sorted(found, key=lambda span: span.start_s)

    def reply(self) -> admin_pb2.TraceReply:
        named = {"request_id": self.request_id, "trace_id": self.context.trace_id, "outcome": self.outcome}
        return admin_pb2.TraceReply(**named, spans=self.spans())

    async def settled(self, left_s: float) -> None:
        """Until workers have said all, but not for long: `left_s` are left until its deadline, and it is answered."""
        for _ in range(round(min(_OWED_S, left_s / 2) / _LOOK_S)):
            if not any(track.owed for track in self.tracks):
                return
            await asyncio.sleep(_LOOK_S)


class Traces:
    """The last `keep` requests that ended here, and fewer if they are large. `export` takes the share `sample`."""

    def __init__(self, keep: int, sample: float, clock: Clock, export: Callable[[Ended], None] | None) -> None:
        self._keep, self._sample, self._clock, self._export = keep, sample, clock, export
        self._kept: dict[str, tuple[Trace, int]] = {}  # the oldest first
        self._bytes = 0

    def ended(self, trace: Trace, outcome: str, error: str) -> None:
        """It ended; `error` is the name of the error's class, "": there was none."""
        trace.outcome, trace.error = outcome, error
        for track in trace.tracks:
            if error:
                track.stages.note(error=error)
            track.stages.end()
        # Not before its stages, which the wall clock does not lead, though that was set back meanwhile.
        ends = (track.stages.arrived_s + track.stages.age_s for track in trace.tracks)
        trace.ended_s = max(self._clock.wall(), trace.began_s, *ends)
        self._drop(trace.request_id)
        self._kept[trace.request_id] = trace, (size := sum(track.size for track in trace.tracks))
        self._bytes += size
        while len(self._kept) > self._keep or (self._bytes > _MOST_BYTES and self._kept):
            self._drop(next(iter(self._kept)))
        if self._export is not None and trace.context.exported(self._sample):
            self._export(_ended(trace))

    def find(self, request_id: str) -> Trace | None:
        """None: it is not kept. Without a name, the one that ended last."""
        name = request_id or next(reversed(self._kept), "")
        return self._kept[name][0] if name in self._kept else None

    def _drop(self, name: str) -> None:
        self._bytes -= self._kept.pop(name, (None, 0))[1]


def _ended(trace: Trace) -> Ended:
    return Ended(
        trace.request_id,
        trace.router_id,
        trace.context,
        trace.began_s,
        trace.ended_s,
        trace.outcome,
        trace.error,
        lambda: [span_from_pb(span) for span in trace.spans()],
    )


def _is_time(seconds: float) -> bool:
    return 0 <= seconds < math.inf
