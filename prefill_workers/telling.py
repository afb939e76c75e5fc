"""What a prefill worker tells routers of each step and of each push: events, with the time that it took."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.worker import events
from kvtransfer.handoff import PushResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from baton.core import HandoffId
    from baton.engine.outcome import Output, StepResult
    from baton.engine.sequence import Work as StepWork
    from baton.errors import HandoffError
    from baton.rpc.v1 import worker_pb2
    from prefill_workers.work import Work

    Event = worker_pb2.WorkerEvent


def in_step(step: Iterable[StepWork], works: Mapping[HandoffId, Work], began: float) -> None:
    """The first layer of a step that began then is there."""
    for item in step:
        if (work := works.get(item.sequence.key)) is not None:
            work.times.in_step(began, streams=work.streams)


def stepped(result: StepResult, works: Mapping[HandoffId, Work]) -> Iterator[tuple[Work, list[worker_pb2.WorkerEvent]]]:
    """In the order in which each router is to hear it. Those that failed are not forgotten yet."""
    for key, thoughts in result.thoughts:
        if (work := works.get(key)) is not None:
            work.thoughts.add(thoughts)
            yield work, [events.thoughts(key, thoughts)]
    for item in result.outputs:
        if (work := works.get(item.key)) is not None:
            yield work, _output(item, work)
    for key, error in result.failed:
        if (work := works.get(key)) is not None:
            yield work, [events.failed(key, error, spans=work.times.said())]


def _output(item: Output, work: Work) -> list[worker_pb2.WorkerEvent]:
    said = events.output(item)
    work.times.computed(len(work.spec), item.cached_tokens)
    if item.finish is not None:
        said[-1].spans.extend(work.times.said())
    return said


def pushed(handoff: HandoffId, outcome: PushResult | HandoffError, work: Work) -> Event:
    """A push ended."""
    if isinstance(outcome, PushResult):
        said = events.pushed(
            handoff,
            kv_bytes=outcome.nbytes,
            exposed_s=outcome.exposed_s,
            round_trip_s=outcome.round_trip_s,
            frames=outcome.frames,
        )
        figures = {"kv_bytes": outcome.nbytes, "frames": outcome.frames, "exposed_s": f"{outcome.exposed_s:.6f}"}
        work.times.pushed(**figures, transport=outcome.transport)
    else:
        said = events.failed(handoff, outcome, held=work.waits)
        work.times.pushed(error=type(outcome).__name__)
    said.spans.extend(work.times.said())
    return said
