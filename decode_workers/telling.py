"""What a decode worker tells routers of a commit, and of each step: events, and where the time of a handoff went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core import HandoffId, Thought
from baton.worker import events

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.clock import Clock
    from baton.engine.outcome import Counters, StepResult
    from baton.engine.windows import Verifying
    from baton.rpc.v1 import common_pb2, worker_pb2
    from kvtransfer.handoff import CommitState

    Told = tuple[HandoffId, list[worker_pb2.WorkerEvent]]


@dataclass(slots=True)
class _Decoding:
    """`tokens` are those of the sequence, and grow; from the `first` on they are made here."""

    began: float
    step: int
    tokens: Sequence[int]
    first: int
    alone: bool
    verifying: Verifying | None = None


class Times:
    """Since when which handoff is decoded here. Nothing is done for a token."""

    def __init__(self, clock: Clock, counters: Counters) -> None:
        self._clock, self._counters = clock, counters
        self._decoding: dict[HandoffId, _Decoding] = {}

    def begin(self, handoff: HandoffId, tokens: Sequence[int], *, alone: bool) -> None:
        """The engine has it, and adds to its `tokens`. `alone`: the prompt is computed here as well."""
        now, step = self._clock.monotonic(), self._counters.steps
        self._decoding[handoff] = _Decoding(now, step, tokens, len(tokens), alone)

    def verified(self, result: StepResult) -> None:
        """A step had a verify pass."""
        for key, verifying in result.verifying:
            if (one := self._decoding.get(key)) is not None:
                one.verifying = verifying

    def verify_s(self, handoff: HandoffId) -> float:
        """What verify passes took so far."""
        one = self._decoding.get(handoff)
        return one.verifying.seconds if one is not None and one.verifying is not None else 0.0

    def ended(self, handoff: HandoffId) -> list[common_pb2.Span]:
        """What was done, once: decoding, and at its end all verify passes as one, which lay within it."""
        one, now = self._decoding.pop(handoff, None), self._clock.monotonic()
        if one is None:
            return []
        figures = {"tokens": len(one.tokens) - one.first, "steps": self._counters.steps - one.step}
        if one.alone:
            figures["prompt_tokens"] = one.first
        spans = [events.span("decode", one.began, now, self._clock, **figures)]
        if (verified := one.verifying) is not None:
            passes = {"passes": verified.passes, "rollbacks": verified.rollbacks}
            spans.append(events.span("verify", now - verified.seconds, now, self._clock, **passes))
        return spans

    def taken_over(self, commit: CommitState) -> list[common_pb2.Span]:
        """What became of a commit until now."""
        figures = {"kv_bytes": commit.kv_bytes, "transport": commit.transport}
        return [
            events.span("receive", commit.began_at, commit.ended_at, self._clock, **figures),
            events.span("commit", commit.ended_at, self._clock.monotonic(), self._clock),
        ]


def taken_over(handoff: HandoffId, commit: CommitState, times: Times) -> list[worker_pb2.WorkerEvent]:
    """The commit counts; then the thoughts and the token, which the prefill worker may have died with."""
    committed = events.committed(
        handoff,
        transfer_s=commit.transfer_s,
        commit_s=commit.commit_s,
        kv_bytes=commit.kv_bytes,
        transport=commit.transport,
        spans=times.taken_over(commit),
    )
    made = commit.thinking.thoughts if commit.thinking is not None else ()
    thoughts = [Thought(chunk, token_ids) for chunk, token_ids in enumerate(made)]
    again = [events.thoughts(handoff, thoughts)] if thoughts else []
    return [committed, *again, events.tokens(handoff, commit.first)]


def stepped(result: StepResult, times: Times) -> Iterator[Told]:
    """In the order in which each router is to hear it: thoughts, tokens, ends."""
    times.verified(result)
    for key, thoughts in result.thoughts:
        yield key, [events.thoughts(key, thoughts)]
    for item in result.outputs:
        said = events.output(item)
        if item.finish is not None:
            said[-1].finish.verify_s = times.verify_s(item.key)
            said[-1].spans.extend(times.ended(item.key))
        yield item.key, said
    for key in result.preempted:
        yield key, [events.preempted(key, "the KV pool is full", times.ended(key))]
    for key, error in result.failed:
        yield key, [events.failed(key, error, spans=times.ended(key))]


def ended(result: StepResult) -> Iterator[tuple[HandoffId, str]]:
    """Of which nothing is held any more, and why."""
    yield from ((item.key, "finished") for item in result.outputs if item.finish)
    yield from ((key, "preempted") for key in result.preempted)
    yield from ((key, "failed") for key, _ in result.failed)
