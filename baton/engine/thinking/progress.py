"""Thinking progress of one sequence: numbers and thoughts, without tensors except those that a handoff carries.

A sequence is cut into chunks of `chunk_size` tokens. A thought follows each chunk, and determines the state for the
next chunk; chunk 0 has none. Chunks that are not thought about count as empty thoughts. So a position depends only on
the tokens before it and on thoughts.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from baton.core import Thought

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from baton.engine.sequence import Sequence as Progress

ALL = 2**31  # more than any sequence has chunks, or tokens


@dataclass(slots=True, eq=False)
class Thinking:
    """Thoughts about the first `until` chunks: those of the prompt, or all. `thoughts` are those made so far.

    Other sequences with the same tokens may use the KV of the first `shared` tokens; later KV was computed without
    thoughts. A forward goes up to `ahead` tokens beyond the open chunk, that of the next position. It assumes empty
    thoughts for them. If set, `cheap` is the number of almost free rows, and `ahead` follows recent progress.
    """

    chunk_size: int
    until: int
    shared: int
    ahead: int = ALL
    cheap: int | None = None
    thoughts: list[tuple[int, ...]] = field(default_factory=list)
    told: int = 0  # thoughts returned by `news`
    rows: Tensor | None = None  # hidden rows of the open chunk so far, [offset, hidden_size], if it is thought about
    carried: tuple[int, Tensor] | None = None  # number and state of the open chunk at the handoff

    @property
    def settled(self) -> bool:
        """Whether no thought is left to make."""
        return len(self.thoughts) >= self.until

    @property
    def last(self) -> int:
        """Number of the last chunk with a state that may differ from that of an empty thought."""
        return max(len(self.thoughts), self.carried[0] if self.carried is not None else 0)

    def most(self, computed: int) -> int:
        """Return how many tokens a forward may compute after `computed` ones."""
        if self.settled:
            return ALL
        return self.chunk_size - computed % self.chunk_size + self.ahead

    def came(self, tokens: int, *, stopped: bool) -> None:
        """Record that a forward computed `tokens` tokens. If `stopped`, a thought prevented more."""
        if self.cheap is not None:
            self.ahead = min(ALL, max(self.cheap, 2 * tokens if stopped else 2 * self.ahead))

    def news(self) -> list[Thought]:
        """Return the thoughts that were not returned before."""
        found = [Thought(chunk, self.thoughts[chunk]) for chunk in range(self.told, len(self.thoughts))]
        self.told = max(self.told, len(self.thoughts))
        return found

    def begin(self, cached: Sequence[tuple[int, ...]]) -> None:
        """Start over after the KV was lost, except for whole cached chunks with these thoughts."""
        self.thoughts[:], self.rows, self.carried = cached, None, None


class Notes:
    """Thoughts about the chunks of cached blocks, by block hash, for at most `most` blocks. A block without a note
    counts as not cached, because no sequence could continue from its end.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._notes: OrderedDict[bytes, tuple[tuple[int, ...], ...]] = OrderedDict()

    def publish(self, names: Sequence[bytes], thinking: Thinking, first: int, block_size: int) -> None:
        """Note consecutive blocks of a sequence, from its block number `first` on."""
        chunks = block_size // thinking.chunk_size
        for block, name in enumerate(names, first):
            # Chunks that are not thought about have no entry, so that all sequences note the same.
            self._notes[name] = tuple(thinking.thoughts[block * chunks : (block + 1) * chunks])
            self._notes.move_to_end(name)
            if len(self._notes) > self._most:
                self._notes.popitem(last=False)

    def known(self, names: Iterable[bytes]) -> Iterator[bytes]:
        """Return these hashes, up to the first without a note."""
        return takewhile(self._notes.__contains__, names)

    def begin(self, sequence: Progress, block_size: int) -> None:
        """Begin a sequence behind blocks that are `known`: all before its `computed` position."""
        assert sequence.thinking is not None
        blocks, chain = sequence.computed // block_size, sequence.chain
        names = [] if chain is None else [chain.digest(block) for block in range(blocks)]
        sequence.thinking.begin([thought for name in names for thought in self._notes[name]])
        for name in names:
            self._notes.move_to_end(name)
