"""Candidates of a deterministic request: what the ordinary batch drew, until a verify pass has drawn it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.engine.choice import Choice


class Draft:
    """`tokens` are prompt, verified output and candidates. `ended`: by what is known here, nothing follows the last,
    since the next one ends the request by its id, or is none (`stopped`), or since there is no room for more.

    Stop strings are left to the choice itself: candidates behind one are drawn in vain, and text is made once.
    """

    def __init__(self, choice: Choice) -> None:
        self.tokens = list(choice.tokens)
        self.row = choice.row.copy()
        self._choice = choice
        self.stopped = False

    @property
    def ended(self) -> bool:
        guide = self.row.guide
        full = self.row.produced >= self._choice.max_output or (guide is not None and (guide.complete or guide.broken))
        return self.stopped or full

    def push(self, token_id: int | None) -> None:
        """One more candidate; None, or one that ends the request by its id, is for the verify pass to find out."""
        if token_id is None or self._choice.ends_by_id(token_id) is not None:
            self.stopped = True
            return
        self.stopped = False  # a verify pass knows better
        self.tokens.append(token_id)
        self.row.advance(token_id)
