"""Interface of drafters: `Proposer`, one per engine, with a `Source` for each sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from baton.core import KVLayout
from baton.engine.sampling.logits import Row


class Source(ABC):
    """The drafter's view of one sequence. Its list of tokens grows, and never changes."""

    __slots__ = ()

    @abstractmethod
    def available(self, limit: int) -> int:
        """Return how many tokens can be proposed next, at most `limit`; 0 means none. Called before `continuation`."""

    def continuation(self, count: int) -> list[int]:
        """Return `count` token ids that may follow, or fewer. None for drafters that compute all sequences together."""
        del count
        return []


class Proposer(ABC):
    """A drafter. Its proposals change the speed of a stream, never its tokens."""

    name: str
    cheap = True  # whether it may propose for one sequence at a time
    follows = False  # whether it needs `computed`, so that speculative steps are better than ordinary ones

    def reserve(self, total_blocks: int, layout: KVLayout) -> int:
        """Take memory out of that of `total_blocks` KV blocks. Return the number of blocks that are left."""
        del layout
        return total_blocks

    @abstractmethod
    def begin(self, tokens: Sequence[int], row: Row) -> Source:
        """Return the source of a sequence with these tokens, a list that grows, and with the inputs of its draws."""

    def read(self, sources: Sequence[Source]) -> None:
        """Read some known tokens of the sequences of a step, if proposals need it."""
        del sources

    def computed(self, sources: Sequence[Source], counts: Sequence[int]) -> None:
        """Take what it needs of the forward that just ended: the last known token of each sequence and its proposals,
        `counts[i]` rows together. Called before any of their draws.
        """
        del sources, counts

    @abstractmethod
    def propose(self, sources: Sequence[Source], counts: Sequence[int]) -> list[list[int]]:
        """Return up to `counts[i]` token ids that may follow sequence i. Each count is at least 1."""
