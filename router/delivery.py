"""What a client has been sent of one choice. Pure.

Token 0 has two witnesses: the prefill worker says it first, the decode worker's first message repeats it. Every later
attempt repeats one token in the same way. Whatever order that arrives in, a client sees each index once and in order,
and what it has seen never changes.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.core import Token
from baton.errors import EngineFault


class Delivery:
    """Merges tokens of any number of witnesses by index. `ids` are those delivered, and grow only at the end."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._early: dict[int, Token] = {}  # later indices, held back until the earlier ones are there

    def take(self, tokens: Iterable[Token]) -> list[Token]:
        """Those that the client gets now, in order. Raises EngineFault when two witnesses contradict each other."""
        for token in tokens:
            self._hear(token)
        ready: list[Token] = []
        while len(self.ids) in self._early:
            token = self._early.pop(len(self.ids))
            self.ids.append(token.token_id)
            ready.append(token)
        return ready

    def _hear(self, token: Token) -> None:
        known = self._early.get(token.index)
        said = self.ids[token.index] if token.index < len(self.ids) else known.token_id if known else token.token_id
        if said != token.token_id:
            raise EngineFault(f"workers contradict each other on token {token.index}: {said} and {token.token_id}")
        if token.index >= len(self.ids):
            self._early[token.index] = token

    def complete(self) -> None:
        """The stream is said to have ended here. Raises EngineFault when an earlier token never came."""
        if self._early:
            raise EngineFault(f"token {len(self.ids)} never came, token {min(self._early)} did")

    def forget_early(self) -> None:
        """A new attempt begins: what was held back is computed again."""
        self._early.clear()
