"""Streams that outlive their router: it dies, the decode worker goes on, and another router attaches to what comes.

    open ──begin──> with its router ──park──> parked ──attach──> with another one ── ...
                        └───────── drop ─────────┴── its time is up, or it says too much: drop

Of each such stream the last things said are remembered, from its commit here on, also when it has ended: its router may
die before the client has them. So are the last thoughts, with those that came with the commit. All of this is the
engine thread's. A stream that has ended holds no blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from baton.clock import Clock
from baton.core import HandoffId, SequenceSpec
from baton.rpc.convert import thoughts_from_pb
from baton.rpc.v1 import worker_pb2 as pb
from baton.worker.thought_log import Thoughts

MOST_BYTES = 2**20  # of what is remembered of one stream: some ten thousand tokens without logprobs; of thoughts again
_REPLAYED = frozenset({"tokens", "finish", "preempted", "failed"})  # what a router must know to go on


class NoRouter:
    """Stands in for a router that is gone: what it is told, nobody hears."""

    router_id = ""

    def __init__(self) -> None:
        self.handoffs: set[HandoffId] = set()  # none: what is parked has an end of its own

    def emit(self, events: Iterable[pb.WorkerEvent]) -> None:
        """To nobody."""


@dataclass(slots=True)
class _Stream:
    """`ids` are all output tokens known here; `said` the events since token `first`, of `size` bytes."""

    name: str
    resumable_s: float
    spec: SequenceSpec | None = None  # as decoding began here; None: it has not
    ids: list[int] = field(default_factory=list)
    said: deque[pb.WorkerEvent] = field(default_factory=deque)
    thoughts: Thoughts = field(default_factory=lambda: Thoughts(MOST_BYTES))
    first: int = 0
    size: int = 0
    until: float | None = None  # parked until then
    told: int = 0  # how many tokens its router was told before it died

    def add(self, event: pb.WorkerEvent) -> None:
        """Remember it, and forget the oldest that there is no room for."""
        if event.HasField("tokens"):
            begin = getattr(event.tokens, "from")  # a keyword here
            self.ids[begin:] = event.tokens.ids
        self.said.append(event)
        self.size += event.ByteSize()
        while self.size > MOST_BYTES and len(self.said) > 1:
            oldest = self.said.popleft()
            self.size -= oldest.ByteSize()
            self.first = getattr(oldest.tokens, "from") + len(oldest.tokens.ids)

    def is_of(self, asked: SequenceSpec) -> bool:
        """Is this what it asks for, and is all that comes after what it knows remembered?"""
        if self.spec is None or replace(self.spec, known=()) != replace(asked, known=()):
            return False
        known = len(asked.known)
        return self.first <= known <= len(self.ids) and tuple(self.ids[:known]) == asked.known

    def after(self, known: int) -> list[pb.WorkerEvent]:
        """What was said of all tokens but the first `known`."""
        return [event for event in self.said if not event.HasField("tokens") or _end(event) > known]


def _end(event: pb.WorkerEvent) -> int:
    return int(getattr(event.tokens, "from")) + len(event.tokens.ids)


class DetachedStreams:
    """By handoff. Streams that nobody opened here are none of its business: every method leaves them alone."""

    def __init__(self, clock: Clock) -> None:
        self.nobody = NoRouter()
        self._clock = clock
        self._streams: dict[HandoffId, _Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, handoff: HandoffId, name: str, resumable_s: float) -> None:
        """This reservation is for a stream that may be resumed for so long after its router's death; 0: it may not."""
        if resumable_s:
            self._streams[handoff] = _Stream(name, resumable_s)

    def name(self, handoff: HandoffId) -> str:
        """What its client calls it; "": it cannot be resumed."""
        stream = self._streams.get(handoff)
        return stream.name if stream is not None else ""

    def begin(self, handoff: HandoffId, spec: SequenceSpec) -> None:
        """Decoding begins, after `spec.known`, of which the last may still be said here."""
        if (stream := self._streams.get(handoff)) is not None:
            stream.spec, stream.ids, stream.first = spec, list(spec.known), len(spec.known)

    def record(self, handoff: HandoffId, events: Sequence[pb.WorkerEvent]) -> None:
        """These were said of it."""
        stream = self._streams.get(handoff)
        if stream is None or stream.spec is None:
            return
        for event in events:
            if event.HasField("thoughts"):
                stream.thoughts.add(thoughts_from_pb(event.thoughts))
            elif event.WhichOneof("event") in _REPLAYED:
                if not stream.said and event.HasField("tokens"):
                    stream.first = getattr(event.tokens, "from")  # the token of the commit, which is said again
                stream.add(event)

    def detach(self, handoff: HandoffId) -> bool:
        """Its router is gone: from now on its time counts. False: it ends with its router."""
        stream = self._streams.get(handoff)
        if stream is None or stream.spec is None:
            return False
        stream.until, stream.told = self._clock.monotonic() + stream.resumable_s, len(stream.ids)
        return True

    def attach(self, handoff: HandoffId, asked: SequenceSpec) -> list[pb.WorkerEvent] | None:
        """All thoughts, and what came after `asked.known`; None: it is not here, or not so much of it."""
        stream = self._streams.get(handoff)
        if stream is None or not stream.is_of(asked):
            return None
        stream.until = None
        return stream.thoughts.said(handoff) + stream.after(len(asked.known))

    def drop(self, handoff: HandoffId) -> None:
        """Nobody will resume it."""
        self._streams.pop(handoff, None)

    def expired(self) -> list[HandoffId]:
        """Parked for too long, or having said more since than is remembered: whoever came would not get all of it."""
        now = self._clock.monotonic()
        return [
            handoff
            for handoff, stream in self._streams.items()
            if stream.until is not None and (stream.until <= now or stream.first > stream.told)
        ]
