"""What a prefill worker knows of one handoff."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.worker.census import Holding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from baton.core import HandoffId, SequenceSpec
    from baton.engine.outcome import Output
    from baton.history import Blocks
    from baton.worker.session import Session


@dataclass(slots=True)
class Work:
    """One handoff here. `streams`: its KV leaves layer by layer, it is long. `first`: what was sampled, once it was.

    `waits`: its push failed, and its KV waits for a Repush or a Release.
    """

    session: Session
    spec: SequenceSpec
    deadline: float | None
    streams: bool
    first: Output | None = None
    waits: bool = False

    @property
    def state(self) -> str:
        """Of one that has blocks."""
        if self.waits:
            return "waiting"
        return "prefilling" if self.first is None else "pushing"


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
