"""The text of one choice, token by token, up to its stop string.

A pure function of the tokens: any worker that pushes the same ids is in the same state, so no text travels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.tokenizer import Detokenizer


class OutputText:
    """Detokenizes and looks for stop strings; gives out only text that later tokens cannot take back.

    The first character with which a stop string is complete decides; of several that are, the longest is meant.
    One that is complete before token number `min_tokens` (from 1) is ordinary text.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._pushed = 0
        self._held = ""  # the longest end of the text so far with which a stop string may begin

    def push(self, token_id: int) -> tuple[str, str | None]:
        """The next token: the text that became final with it, and the stop string if one is complete.

        The stop string and what follows it are not part of the text. Nothing may be pushed after a match.
        """
        self._pushed += 1
        piece = self._detokenizer.push(token_id)
        if not self._stop:
            return piece, None
        seen, text = len(self._held), self._held + piece
        match = self._find(text, seen) if self._pushed >= self._min_tokens else None
        if match is not None:
            begin, stop = match
            self._held = ""
            return text[:begin], stop
        final = len(text) - self._partial(text)
        self._held = text[final:]
        return text[:final], None

    def tail(self) -> str:
        """What is still held back, when no more tokens come: a begun stop string, an incomplete character."""
        tail, self._held = self._held + self._detokenizer.flush(), ""
        return tail

    def _find(self, text: str, seen: int) -> tuple[int, str] | None:
        """(begin, stop) of the match that ends first, and after `seen`; the longest of those."""
        found = []
        for stop in self._stop:
            begin = text.find(stop, max(0, seen - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        return min(found)[1:] if found else None

    def _partial(self, text: str) -> int:
        """How many characters at the end of `text` are a proper beginning of a stop string, at most."""
        return max((_overlap(text, stop) for stop in self._stop), default=0)


def _overlap(text: str, stop: str) -> int:
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
