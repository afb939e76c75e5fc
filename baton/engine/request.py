"""A request as the engine holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.engine.draft import Draft

if TYPE_CHECKING:
    from baton.engine.choice import Choice
    from baton.engine.sampler import Row
    from baton.engine.sequence import Sequence


@dataclass(slots=True)
class Request:
    """Its progress, and its output. `draft`: of a deterministic one, whose `choice` has verified tokens alone."""

    sequence: Sequence
    choice: Choice
    hold: bool = False
    held: bool = False
    draft: Draft | None = None

    @property
    def tokens(self) -> list[int]:
        """All that the ordinary batch goes on from."""
        return self.choice.tokens if self.draft is None else self.draft.tokens

    @property
    def row(self) -> Row:
        """For its next draw."""
        return self.choice.row if self.draft is None else self.draft.row

    def confirm(self) -> None:
        """Its choice has one more token, of an exact step."""
        sequence, fixed = self.sequence, self.sequence.fixed
        if self.draft is not None and fixed is not None:
            self.draft.push(self.choice.tokens[-1])
            fixed.verified, fixed.final, fixed.ended = sequence.known, sequence.computed, self.draft.ended

    def push_candidate(self, token_id: int | None) -> None:
        """What the ordinary batch drew, or that it could not."""
        assert self.draft is not None
        assert self.sequence.fixed is not None
        self.draft.push(token_id)
        self.sequence.known, self.sequence.fixed.ended = len(self.draft.tokens), self.draft.ended

    def start_over(self) -> None:
        """Its KV is gone: candidates are, too."""
        if self.draft is not None:
            self.draft = Draft(self.choice)
