"""Time spans of each handoff. They travel with events that workers send anyway, and cost nothing per token.

Times are noted in monotonic seconds and converted to Unix time when a span is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.clock import Clock, unix_time
from baton.core import HandoffId
from baton.engine.determinism.planner import Verifying
from baton.engine.sequence import Sequence as EngineSequence
from baton.engine.step_result import Counters, KvLengths, StepResult
from baton.rpc.v1 import common_pb2
from kvtransfer.handoff import CommitState


def span(name: str, begin: float, end: float, clock: Clock, **figures: object) -> common_pb2.Span:
    """Build a span from `begin` to `end`, in monotonic seconds of `clock`. The router adds worker and handoff."""
    return common_pb2.Span(
        name=name,
        start_s=unix_time(begin, clock),
        duration_s=max(0.0, end - begin),
        attributes={what: str(figure) for what, figure in figures.items()},
    )


def _listed(lengths: KvLengths | None) -> dict[str, str]:
    return {} if lengths is None else {"kv_lengths": str(lengths)}


class PrefillTimes:
    """Times of one handoff at a prefill worker, in monotonic seconds. Each span is returned once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = clock.monotonic()  # accepted; later, start of its first step
        self._leaves: float | None = None  # when its KV could first be sent
        self._chunks = 0
        self._kv_lengths: KvLengths | None = None
        self._spans: list[common_pb2.Span] = []

    def in_step(self, began: float, sequence: EngineSequence, *, streams: bool) -> None:
        """Record a step of `sequence` that began at `began`; its first layer is computed."""
        if not self._chunks:
            self._kv_lengths = sequence.policy(KvLengths)
            self._spans.append(span("wait", self._since, began, self._clock))
            self._since = began
            self._leaves = self._clock.monotonic() if streams else None
        self._chunks += 1

    def computed(self, tokens: int, cached: int) -> None:
        """Record that the first new token is there. `cached` of the `tokens` known ones were in the cache."""
        now, figures = self._clock.monotonic(), {"tokens": tokens - cached, "cached_tokens": cached}
        listed = _listed(self._kv_lengths)
        self._spans.append(span("compute", self._since, now, self._clock, **figures, chunks=self._chunks, **listed))
        self._leaves = now if self._leaves is None else self._leaves

    def repushed(self) -> None:
        self._leaves = None if self._leaves is None else self._clock.monotonic()

    def pushed(self, **figures: object) -> None:
        if self._leaves is not None:
            self._spans.append(span("push", self._leaves, self._clock.monotonic(), self._clock, **figures))

    def take_spans(self) -> list[common_pb2.Span]:
        spans, self._spans = self._spans, []
        return spans


@dataclass(slots=True)
class _Decoding:
    """A handoff that decodes here. `tokens` grows; those from index `first` on are generated here."""

    began: float
    step: int
    tokens: Sequence[int]
    first: int
    alone: bool
    verifying: Verifying | None = None
    kv_lengths: KvLengths | None = None


class DecodeTimes:
    """Times of the handoffs at a decode worker. Costs nothing per token."""

    def __init__(self, clock: Clock, counters: Counters) -> None:
        self._clock, self._counters = clock, counters
        self._decoding: dict[HandoffId, _Decoding] = {}

    def begin(self, handoff: HandoffId, tokens: Sequence[int], *, alone: bool) -> None:
        """Record that the engine has the sequence and appends to `tokens`. `alone`: it also computes the prompt."""
        now, step = self._clock.monotonic(), self._counters.steps
        self._decoding[handoff] = _Decoding(now, step, tokens, len(tokens), alone)

    def stepped(self, result: StepResult) -> None:
        """Record the verify pass of a step, and the KV lengths of sequences that have them."""
        for key, lengths in result.kv_lengths:
            if (one := self._decoding.get(key)) is not None:
                one.kv_lengths = lengths
        for key, verifying in result.verifying:
            if (one := self._decoding.get(key)) is not None:
                one.verifying = verifying

    def verify_s(self, handoff: HandoffId) -> float:
        one = self._decoding.get(handoff)
        return one.verifying.seconds if one is not None and one.verifying is not None else 0.0

    def ended(self, handoff: HandoffId) -> list[common_pb2.Span]:
        """Return the decode span, once. All verify passes are one span within it, placed at its end."""
        one, now = self._decoding.pop(handoff, None), self._clock.monotonic()
        if one is None:
            return []
        figures = {"tokens": len(one.tokens) - one.first, "steps": self._counters.steps - one.step}
        if one.alone:
            figures["prompt_tokens"] = one.first
        spans = [span("decode", one.began, now, self._clock, **figures, **_listed(one.kv_lengths))]
        if (verified := one.verifying) is not None:
            passes = {"passes": verified.passes, "rollbacks": verified.rollbacks}
            spans.append(span("verify", now - verified.seconds, now, self._clock, **passes))
        return spans

    def taken_over(self, commit: CommitState) -> list[common_pb2.Span]:
        """Return the spans of a commit: receiving it, and from its end until now."""
        figures = {"kv_bytes": commit.kv_bytes, "transport": commit.transport}
        return [
            span("receive", commit.began_at, commit.ended_at, self._clock, **figures),
            span("commit", commit.ended_at, self._clock.monotonic(), self._clock),
        ]
