"""Proposals from a sequence's own prompt and output: the tokens behind an earlier place with the same last tokens.

The method is prompt lookup (Saxena, 2023) with the longest match instead of a fixed one.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.sampling.logits import Row
from baton.engine.speculation.proposer import Proposer, Source

ORDER = 3  # tokens of the shortest match
PLACES = 8  # latest places that are compared for the longest match
LONGEST = 32  # tokens of a match; a longer one is no better
SLICE = 512  # tokens that one step indexes, because a long prompt must not delay a step


class SuffixIndex(Source):
    """Places of each run of `ORDER` tokens in `tokens`, which may grow, but not change."""

    __slots__ = ("_earlier", "_found", "_last", "_tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self._last: dict[tuple[int, ...], int] = {}  # position behind the last run of each kind
        self._earlier = [0] * ORDER  # by position behind a run: that of the same run before, or 0
        self._found = 0

    def available(self, limit: int) -> int:
        self._found = self._place()
        return limit if self._found else 0

    def continuation(self, count: int) -> list[int]:
        """Return `count` tokens behind the best earlier place. At the end of all tokens it continues with itself,
        because the text then repeats.
        """
        tokens, place = self._tokens, self._found
        period = len(tokens) - place
        return [tokens[place + number % period] for number in range(count)] if place else []

    def _place(self) -> int:
        """Return the position behind the earlier place with the longest match, or 0."""
        end, earlier = len(self._tokens), self._earlier
        self._extend(min(end, len(earlier) - 1 + SLICE))
        place, best, longest = earlier[end] if end < len(earlier) else 0, 0, 0
        for _ in range(PLACES):
            if not place or longest >= LONGEST:
                break
            if (length := self._match(place, end)) > longest:
                best, longest = place, length
            place = earlier[place]
        return best

    def _match(self, place: int, end: int) -> int:
        """Return the number of equal tokens before both positions."""
        tokens, length, most = self._tokens, ORDER, min(place, LONGEST)
        while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length

    def _extend(self, end: int) -> None:
        tokens, last, earlier = self._tokens, self._last, self._earlier
        for position in range(len(earlier), end + 1):
            run = tuple(tokens[position - ORDER : position])
            earlier.append(last.get(run, 0))
            last[run] = position


class NgramProposer(Proposer):
    """Proposals from a `SuffixIndex` of each sequence."""

    name = "ngram"

    def begin(self, tokens: Sequence[int], row: Row) -> Source:
        del row
        return SuffixIndex(tokens)

    def propose(self, sources: Sequence[Source], counts: Sequence[int]) -> list[list[int]]:
        return [source.continuation(count) for source, count in zip(sources, counts, strict=True)]
