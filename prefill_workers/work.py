"""What a prefill worker knows of one handoff."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from baton.worker import events
from baton.worker.census import Holding
from baton.worker.thoughts import Thoughts
from kvtransfer.handoff import PushEnd

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from baton.core import HandoffId, SequenceSpec, ThinkingState
    from baton.engine.outcome import Output
    from baton.engine.sequence import Work as StepWork
    from baton.history import Blocks
    from baton.rpc.v1 import worker_pb2
    from baton.worker.session import Session
    from baton.worker.times import PrefillTimes


@dataclass(slots=True)
class Work:
    """One handoff here. `streams`: its KV leaves layer by layer, it is long. `first`: what was sampled, once it was.

    `waits`: its push failed, and its KV waits for a Repush or a Release.
    """

    session: Session
    spec: SequenceSpec
    deadline: float | None
    streams: bool
    times: PrefillTimes
    first: Output | None = None
    waits: bool = False
    thoughts: Thoughts = field(default_factory=Thoughts)

    def said(self, handoff: HandoffId) -> list[worker_pb2.WorkerEvent]:
        """All that its router was told of what came of it, under this name: nobody may listen to the older one."""
        first = events.output(replace(self.first, key=handoff)) if self.first is not None else []
        return self.thoughts.said(handoff) + first

    def end(self, thinking: ThinkingState | None) -> PushEnd:
        """What its push ends with, once its first token was sampled."""
        tokens = self.first.tokens if self.first is not None else ()
        known = (*self.spec.known, *(token.token_id for token in tokens))
        return PushEnd(replace(self.spec, known=known), tokens, thinking)

    @property
    def state(self) -> str:
        """Of one that has blocks."""
        if self.waits:
            return "waiting"
        return "prefilling" if self.first is None else "pushing"


def final(item: StepWork, layer: int, layers: int) -> Iterator[tuple[int, int]]:
    """KV that may leave now that `layer` is written: (so many of `layers`, the first so many positions).

    What was computed before the step is final, in all layers. So is what the step writes, but of a sequence that is not
    settled: its end may be rolled back when the step ends.
    """
    sequence = item.sequence
    if layer == 0 and sequence.computed:
        yield layers, sequence.computed
    if sequence.settled:
        yield layer + 1, sequence.computed + item.count


def overdue(works: Mapping[HandoffId, Work], now: float) -> list[tuple[HandoffId, Work]]:
    """Whose deadline passed before they were computed, or while their KV waited for a Repush."""
    late = [(handoff, work) for handoff, work in works.items() if work.deadline is not None and work.deadline <= now]
    return [(handoff, work) for handoff, work in late if work.first is None or work.waits]


def spare(works: Mapping[HandoffId, Work]) -> HandoffId | None:
    """Whose KV to give up if prompts find no room: the oldest that waits for a Repush, unless a push is under way.

    That one will free blocks by itself. KV that waits may do so for ever: who is to take it may have no room before one
    of these prompts is computed.
    """
    computed = [(handoff, work.waits) for handoff, work in works.items() if work.first is not None]
    return computed[0][0] if computed and all(waits for _, waits in computed) else None


def holdings(
    works: Mapping[HandoffId, Work],
    fetched: Mapping[HandoffId, Blocks],
    computed: Iterable[tuple[HandoffId, Blocks | None]],
) -> Iterator[Holding]:
    """Of each handoff what it holds, and by whose wish."""
    for handoff, fetch in fetched.items():
        yield _holding(works.get(handoff), handoff, "fetching", fetch)
    for handoff, allocation in computed:
        yield _holding(works.get(handoff), handoff, "", allocation)


def _holding(work: Work | None, handoff: HandoffId, state: str, held: Blocks | None) -> Holding:
    blocks = held.blocks if held else []
    state = state or (work.state if work and blocks else "queued")
    return Holding(handoff, state, blocks, work.session.router_id if work else "")
