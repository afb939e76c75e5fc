"""Streams that outlive their router: the decode worker continues, and another router attaches to the output.

    open ──begin──> with its router ──park──> parked ──attach──> with another router ── ...
                        └───────── drop ─────────┴── expired, or too much output: drop

A stream's last events and thoughts are remembered from the commit on. They stay after its end, because its router may
die before the client has them. A stream that has ended holds no blocks. A router that was only cut off begins another
attempt, so it releases the stream when it has connected again. Everything runs on the engine thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from baton.clock import Clock
from baton.core import HandoffId, SequenceSpec
from baton.limits import MAX_RECORD_BYTES
from baton.rpc.convert import thoughts_from_pb
from baton.rpc.v1 import worker_pb2 as pb
from baton.worker.events import Thoughts

_REPLAYED = frozenset({"tokens", "finish", "preempted", "failed"})  # events that a router needs to continue


class NoRouter:
    """Session of a lost router: drops all events."""

    router_id = ""

    def __init__(self) -> None:
        self.handoffs: set[HandoffId] = set()  # always empty: a parked stream has its own end

    def emit(self, events: Iterable[pb.WorkerEvent]) -> None:
        """Drop the events."""


@dataclass(slots=True)
class _Stream:
    """One stream. `ids` has all its output tokens, `events` its events from token `first` on, of `size` bytes. They are
    kept serialized, each with the number of tokens at its end, because message objects take 30 times as much memory.
    """

    router: str  # id of the last router that had it
    name: str
    resumable_s: float
    determinism: str  # fingerprint of both of its workers
    spec: SequenceSpec | None = None  # as decoding began here; None before that
    ids: list[int] = field(default_factory=list)
    events: deque[tuple[int, bytes]] = field(default_factory=deque)
    thoughts: Thoughts = field(default_factory=lambda: Thoughts(MAX_RECORD_BYTES))
    first: int = 0
    size: int = 0
    until: float | None = None  # end of the parking time, if parked
    sent: int = 0  # tokens sent to the router before it died

    def add(self, event: pb.WorkerEvent) -> None:
        """Remember an event, and forget the oldest ones beyond `MAX_RECORD_BYTES`."""
        if event.HasField("tokens"):
            begin = getattr(event.tokens, "from")  # `from` is a Python keyword
            self.ids[begin:] = event.tokens.ids
        end = len(self.ids) + (not event.HasField("tokens"))  # a last event comes after all tokens
        self.events.append((end, data := event.SerializeToString()))
        self.size += len(data)
        while self.size > MAX_RECORD_BYTES and len(self.events) > 1:
            self.first, oldest = self.events.popleft()
            self.size -= len(oldest)

    def matches(self, wanted: SequenceSpec) -> bool:
        """Whether this is the requested stream, and everything after the tokens known there is remembered."""
        other = replace(wanted, known=(), prompt_logprobs=None)  # those of the prompt came before
        if self.spec is None or replace(self.spec, known=(), prompt_logprobs=None) != other:
            return False
        known = len(wanted.known)
        return self.first <= known <= len(self.ids) and tuple(self.ids[:known]) == wanted.known

    def after(self, known: int) -> list[bytes]:
        """Return the events about all tokens except the first `known`."""
        return [data for end, data in self.events if end > known]


class DetachedStreams:
    """The resumable streams, by handoff. Every method ignores handoffs that were not opened here."""

    def __init__(self, clock: Clock) -> None:
        self.no_router = NoRouter()
        self._clock = clock
        self._streams: dict[HandoffId, _Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, handoff: HandoffId, message: pb.Reserve, router: str) -> None:
        """Register a reservation for a stream that may be resumed for `resumable_s` seconds; 0 means never."""
        if message.resumable_s:
            self._streams[handoff] = _Stream(router, message.stream, message.resumable_s, message.determinism)

    def router(self, handoff: HandoffId) -> str:
        """Return the id of the last router that had the stream, or an empty string if it cannot be resumed."""
        stream = self._streams.get(handoff)
        return stream.router if stream is not None else ""

    def superseded(self, handoff: HandoffId) -> list[HandoffId]:
        """Return the parked streams of earlier attempts: their router continues with the attempt of `handoff`."""
        parked = [old for old, stream in self._streams.items() if stream.until is not None]
        return [old for old in parked if old.request_id == handoff.request_id and old.attempt < handoff.attempt]

    def name(self, handoff: HandoffId) -> str:
        """Return the client's name of the stream, or an empty string if it cannot be resumed."""
        stream = self._streams.get(handoff)
        return stream.name if stream is not None else ""

    def names(self) -> dict[HandoffId, str]:
        return {handoff: stream.name for handoff, stream in self._streams.items()}

    def begin(self, handoff: HandoffId, spec: SequenceSpec) -> None:
        """Start recording after `spec.known`; the last of these tokens may still be repeated."""
        if (stream := self._streams.get(handoff)) is not None:
            stream.spec, stream.ids, stream.first = spec, list(spec.known), len(spec.known)

    def record(self, handoff: HandoffId, events: Sequence[pb.WorkerEvent]) -> None:
        stream = self._streams.get(handoff)
        if stream is None or stream.spec is None:
            return
        for event in events:
            if event.HasField("thoughts"):
                stream.thoughts.add(thoughts_from_pb(event.thoughts))
            elif event.WhichOneof("event") in _REPLAYED:
                if not stream.events and event.HasField("tokens"):
                    stream.first = getattr(event.tokens, "from")  # the commit repeats the first token
                stream.add(event)

    def detach(self, handoff: HandoffId) -> bool:
        """Start the parking time, because the router is gone. Return False if the stream must end with its router."""
        stream = self._streams.get(handoff)
        if stream is None or stream.spec is None:
            return False
        stream.until, stream.sent = self._clock.monotonic() + stream.resumable_s, len(stream.ids)
        return True

    def attach(self, handoff: HandoffId, wanted: SequenceSpec, router: str) -> list[pb.WorkerEvent] | None:
        """Return all thoughts, and the events after `wanted.known`; None if they are not all remembered here."""
        stream = self._streams.get(handoff)
        if stream is None or not stream.matches(wanted):
            return None
        stream.until, stream.router = None, router
        events = map(pb.WorkerEvent.FromString, stream.after(len(wanted.known)))
        return [*stream.thoughts.events(handoff), *events]

    def attached(self, handoff: HandoffId, known: int) -> pb.Attached:
        """Describe a stream to its new router. The room is counted from the first event after `known` tokens."""
        stream = self._streams[handoff]
        before = stream.size - sum(map(len, stream.after(known)))
        room = 0 if stream.first else max(0, MAX_RECORD_BYTES - before)
        return pb.Attached(room=room, determinism=stream.determinism)

    def drop(self, handoff: HandoffId) -> None:
        self._streams.pop(handoff, None)

    def expired(self) -> list[HandoffId]:
        """Return streams that are parked for too long, or can no longer be resumed completely."""
        now = self._clock.monotonic()
        return [
            handoff
            for handoff, stream in self._streams.items()
            if stream.until is not None and (stream.until <= now or stream.first > stream.sent)
        ]
