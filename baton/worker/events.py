"""Builders of the events that a worker sends to a router: one function per kind of `WorkerEvent`.

`Thoughts` keeps the thoughts of one sequence, to repeat them under another handoff id or to another router.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from baton.core import Finish, HandoffId, PromptPart, Thought, Token
from baton.engine.step_result import SequenceOutput
from baton.errors import BatonError
from baton.rpc import convert
from baton.rpc.convert import thoughts_to_pb
from baton.rpc.v1 import common_pb2, worker_pb2
from kvtransfer.handoff import CommitState, PushResult

Event = worker_pb2.WorkerEvent
Spans = Sequence[common_pb2.Span]


def refused(handoff: HandoffId, reason: worker_pb2.RefusalReason.ValueType, detail: str) -> Event:
    """Refuse a Reserve or a Prefill; no blocks are held."""
    return Event(handoff=convert.handoff_to_pb(handoff), refused=worker_pb2.Refused(reason=reason, detail=detail))


def no_room(handoff: HandoffId, tokens: int) -> Event:
    """Refuse a Reserve that may succeed later."""
    return refused(handoff, worker_pb2.REFUSAL_REASON_NO_ROOM, f"no capacity for {tokens} tokens now")


def stopping(handoff: HandoffId) -> Event:
    """Refuse a Reserve or Prefill, or give up its work: this worker is stopping. Another may take it."""
    return refused(handoff, worker_pb2.REFUSAL_REASON_DRAINING, "this worker is stopping")


def failed(handoff: HandoffId, error: BatonError, *, held: bool = False, spans: Spans = ()) -> Event:
    """Report a failed attempt. All its blocks are freed, unless `held`: the KV waits for a retransfer."""
    message = worker_pb2.Failed(kind=type(error).__name__, message=str(error), held=held)
    return Event(handoff=convert.handoff_to_pb(handoff), failed=message, spans=spans)


def tokens(handoff: HandoffId, items: Sequence[Token]) -> Event:
    """Send the output tokens of one step."""
    event = Event(handoff=convert.handoff_to_pb(handoff))
    convert.fill_tokens(event.tokens, items)
    return event


def thoughts(handoff: HandoffId, items: Sequence[Thought]) -> Event:
    """Send thoughts about consecutive chunks, at least one."""
    return Event(handoff=convert.handoff_to_pb(handoff), thoughts=thoughts_to_pb(items))


def prompt_part(handoff: HandoffId, part: PromptPart) -> Event:
    """Send log-probabilities of a part of the prompt."""
    return Event(handoff=convert.handoff_to_pb(handoff), prompt_logprobs=convert.prompt_part_to_pb(part))


def finished(handoff: HandoffId, finish: Finish) -> Event:
    """Report that no more tokens follow."""
    return Event(handoff=convert.handoff_to_pb(handoff), finish=convert.finish_to_pb(finish))


def output(item: SequenceOutput) -> list[Event]:
    """Return the events of one sequence's step: its tokens, and its finish if it ended."""
    events = [tokens(item.key, item.tokens)] if item.tokens else []
    if item.finish:
        events.append(finished(item.key, item.finish))
    for event in events:
        event.cached_tokens = item.cached_tokens
    return events


def reserved(handoff: HandoffId, cached_tokens: int) -> Event:
    """Report that blocks are reserved and the KV of the first `cached_tokens` is already here."""
    return Event(handoff=convert.handoff_to_pb(handoff), reserved=worker_pb2.Reserved(cached_tokens=cached_tokens))


def committed(handoff: HandoffId, commit: CommitState | None = None, spans: Spans = ()) -> Event:
    """Report that the one commit was accepted, with the figures of `commit` for the router."""
    message = worker_pb2.Committed()
    if commit is not None:
        message = worker_pb2.Committed(
            transfer_s=commit.transfer_s, commit_s=commit.commit_s, kv_bytes=commit.kv_bytes, transport=commit.transport
        )
    return Event(handoff=convert.handoff_to_pb(handoff), committed=message, spans=spans)


def fenced(handoff: HandoffId) -> Event:
    """Report that no commit of this attempt will be accepted."""
    return Event(handoff=convert.handoff_to_pb(handoff), fenced=worker_pb2.Fenced())


def attached(handoff: HandoffId, stream: worker_pb2.Attached) -> Event:
    """Report that the tokens of this stream go to this router from now on."""
    return Event(handoff=convert.handoff_to_pb(handoff), attached=stream)


def preempted(handoff: HandoffId, reason: str, spans: Spans = (), *, moves: int = 0) -> Event:
    """Report that the sequence is requeued, for `reason`, such as a full pool. The KV of `moves` tokens can move."""
    message = worker_pb2.Preempted(reason=reason, held=moves > 0, known_tokens=moves)
    return Event(handoff=convert.handoff_to_pb(handoff), preempted=message, spans=spans)


def pushed(handoff: HandoffId, push: PushResult) -> Event:
    """Report that the decode worker has acknowledged the commit."""
    message = worker_pb2.Pushed(
        kv_bytes=push.nbytes, exposed_s=push.exposed_s, round_trip_s=push.round_trip_s, frames=push.frames
    )
    return Event(handoff=convert.handoff_to_pb(handoff), pushed=message)


class Thoughts:
    """Thoughts about consecutive chunks. Beyond `most_bytes` (None: no limit) the oldest are dropped."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = most_bytes
        self._nbytes = 0
        self._kept: deque[Thought] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, thoughts: Iterable[Thought]) -> None:
        """Append thoughts. One about an earlier chunk replaces that chunk and all later ones: it was recomputed."""
        for thought in thoughts:
            while self._kept and self._kept[-1].chunk != thought.chunk - 1:
                self._forget(self._kept.pop())
            self._kept.append(thought)
            self._nbytes += _nbytes(thought)
        while self._most_bytes is not None and self._nbytes > self._most_bytes:
            self._forget(self._kept.popleft())

    def events(self, handoff: HandoffId) -> list[Event]:
        """Return all thoughts kept as one event, or no event."""
        return [thoughts(handoff, self._kept)] if self._kept else []

    def _forget(self, thought: Thought) -> None:
        self._nbytes -= _nbytes(thought)


def _nbytes(thought: Thought) -> int:
    """Return the approximate size in a message, in bytes."""
    return 4 + 4 * len(thought.token_ids)
