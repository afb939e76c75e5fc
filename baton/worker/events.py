"""Builders of what a worker tells a router: one function per kind of `WorkerEvent`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.core import Finish, HandoffId, Thought, Token
from baton.errors import BatonError
from baton.rpc import convert
from baton.rpc.convert import thoughts_to_pb
from baton.rpc.v1 import common_pb2, worker_pb2

if TYPE_CHECKING:
    from baton.engine.step_result import SequenceOutput

Event = worker_pb2.WorkerEvent
Spans = Sequence[common_pb2.Span]


def refused(handoff: HandoffId, reason: worker_pb2.RefusalReason.ValueType, detail: str) -> Event:
    """A Reserve or a Prefill is refused; nothing is held."""
    return Event(handoff=convert.handoff_to_pb(handoff), refused=worker_pb2.Refused(reason=reason, detail=detail))


def no_room(handoff: HandoffId, tokens: int) -> Event:
    """A Reserve is refused that may succeed later."""
    return refused(handoff, worker_pb2.REFUSAL_REASON_NO_ROOM, f"no room for {tokens} tokens now")


def stopping(handoff: HandoffId) -> Event:
    """A Reserve or a Prefill is refused, or what came of it given up: it may succeed elsewhere."""
    return refused(handoff, worker_pb2.REFUSAL_REASON_DRAINING, "this worker is stopping")


def failed(handoff: HandoffId, error: BatonError, *, held: bool = False, spans: Spans = ()) -> Event:
    """This attempt failed; nothing is held any more, unless `held` says that the KV waits for a Repush."""
    message = worker_pb2.Failed(kind=type(error).__name__, message=str(error), held=held)
    return Event(handoff=convert.handoff_to_pb(handoff), failed=message, spans=spans)


def tokens(handoff: HandoffId, items: Sequence[Token]) -> Event:
    """Output tokens of one step."""
    event = Event(handoff=convert.handoff_to_pb(handoff))
    convert.fill_tokens(event.tokens, items)
    return event


def thoughts(handoff: HandoffId, items: Sequence[Thought]) -> Event:
    """What was thought about consecutive chunks, at least one."""
    return Event(handoff=convert.handoff_to_pb(handoff), thoughts=thoughts_to_pb(items))


def finished(handoff: HandoffId, finish: Finish) -> Event:
    """No more tokens come."""
    return Event(handoff=convert.handoff_to_pb(handoff), finish=convert.finish_to_pb(finish))


def output(item: SequenceOutput) -> list[Event]:
    """The events of one sequence's step: its tokens, and its end if it ended."""
    events = [tokens(item.key, item.tokens)] if item.tokens else []
    if item.finish:
        events.append(finished(item.key, item.finish))
    for event in events:
        event.cached_tokens = item.cached_tokens
    return events


def reserved(handoff: HandoffId, cached_tokens: int) -> Event:
    """Room is reserved; the KV of the first `cached_tokens` is here already."""
    return Event(handoff=convert.handoff_to_pb(handoff), reserved=worker_pb2.Reserved(cached_tokens=cached_tokens))


def committed(
    handoff: HandoffId,
    *,
    transfer_s: float = 0.0,
    commit_s: float = 0.0,
    kv_bytes: int = 0,
    transport: str = "",
    spans: Spans = (),
) -> Event:
    """The one commit was accepted; the figures are for the router that waits for it."""
    message = worker_pb2.Committed(transfer_s=transfer_s, commit_s=commit_s, kv_bytes=kv_bytes, transport=transport)
    return Event(handoff=convert.handoff_to_pb(handoff), committed=message, spans=spans)


def fenced(handoff: HandoffId) -> Event:
    """No commit of this attempt will be accepted."""
    return Event(handoff=convert.handoff_to_pb(handoff), fenced=worker_pb2.Fenced())


def attached(handoff: HandoffId) -> Event:
    """Its tokens go to this router from here on."""
    return Event(handoff=convert.handoff_to_pb(handoff), attached=worker_pb2.Attached())


def preempted(handoff: HandoffId, reason: str, spans: Spans = ()) -> Event:
    """Handed back: the pool is full."""
    return Event(handoff=convert.handoff_to_pb(handoff), preempted=worker_pb2.Preempted(reason=reason), spans=spans)


def pushed(
    handoff: HandoffId, *, kv_bytes: int, exposed_s: float = 0.0, round_trip_s: float = 0.0, frames: int = 0
) -> Event:
    """The decode worker has acknowledged the commit."""
    message = worker_pb2.Pushed(kv_bytes=kv_bytes, exposed_s=exposed_s, round_trip_s=round_trip_s, frames=frames)
    return Event(handoff=convert.handoff_to_pb(handoff), pushed=message)
