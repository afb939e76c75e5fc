"""What a prefill worker knows of one handoff."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.core import SequenceSpec
    from baton.engine.outcome import Output
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
