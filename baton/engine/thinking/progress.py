"""How far one sequence of a model that thinks is thought about: numbers and thoughts, no tensors but what is carried.

A sequence is cut into chunks of `chunk_size` tokens. Behind each chunk stands a thought, and from it follows the state
that the next chunk is computed with; chunk 0 has none, and chunks that are not thought about count as if nothing had
been thought. So all that a position depends on, beside the tokens before it, are the thoughts.
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
    """The first `until` chunks are thought about: those of the prompt, or all. `thoughts` are those made so far.

    Others with the same tokens may use the KV of the first `shared` of them: behind these, it was computed as if
    nothing were thought. A forward goes no further than to the end of the open chunk, that of the next position, and
    `ahead` tokens behind it, which assume that nothing is thought; with `cheap`, which a forward has for next to
    nothing, `ahead` follows from how far the last forwards came.
    """

    chunk_size: int
    until: int
    shared: int
    ahead: int = ALL
    cheap: int | None = None
    thoughts: list[tuple[int, ...]] = field(default_factory=list)
    told: int = 0  # thoughts that came out of the engine
    rows: Tensor | None = None  # hidden rows of the open chunk so far, [offset, hidden_size], if it is thought about
    carried: tuple[int, Tensor] | None = None  # number and state of the chunk that was open when it was handed over

    @property
    def settled(self) -> bool:
        """Whether no thought is left to make."""
        return len(self.thoughts) >= self.until

    @property
    def last(self) -> int:
        """The number of the last chunk whose state may not be that of an empty thought."""
        return max(len(self.thoughts), self.carried[0] if self.carried is not None else 0)

    def most(self, computed: int) -> int:
        """How many tokens a forward may compute behind so many computed ones."""
        if self.settled:
            return ALL
        return self.chunk_size - computed % self.chunk_size + self.ahead

    def came(self, tokens: int, *, stopped: bool) -> None:
        """A forward came so far, and no further because of a thought, if it was `stopped`."""
        if self.cheap is not None:
            self.ahead = min(ALL, max(self.cheap, 2 * tokens if stopped else 2 * self.ahead))

    def news(self) -> list[Thought]:
        """Thoughts that did not come out of the engine yet, once."""
        found = [Thought(chunk, self.thoughts[chunk]) for chunk in range(self.told, len(self.thoughts))]
        self.told = max(self.told, len(self.thoughts))
        return found

    def begin(self, cached: Sequence[tuple[int, ...]]) -> None:
        """Its KV is gone, but for that of whole chunks from the cache, about which this was thought."""
        self.thoughts[:], self.rows, self.carried = cached, None, None


class Notes:
    """What was thought about the chunks of cached blocks, by the names of these: as many as there are blocks.

    A block whose note is gone is as good as not cached: nobody could go on from its end.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._notes: OrderedDict[bytes, tuple[tuple[int, ...], ...]] = OrderedDict()

    def publish(self, names: Sequence[bytes], thinking: Thinking, first: int, block_size: int) -> None:
        """Of consecutive blocks of a sequence, from its block number `first` on."""
        chunks = block_size // thinking.chunk_size
        for block, name in enumerate(names, first):
            # Chunks that are not thought about are not noted: then it is the same for all.
            self._notes[name] = tuple(thinking.thoughts[block * chunks : (block + 1) * chunks])
            self._notes.move_to_end(name)
            if len(self._notes) > self._most:
                self._notes.popitem(last=False)

    def known(self, names: Iterable[bytes]) -> Iterator[bytes]:
        """The first of these names, as far as there are notes."""
        return takewhile(self._notes.__contains__, names)

    def begin(self, sequence: Progress, block_size: int) -> None:
        """It begins behind blocks that are `known`: all before its `computed` position."""
        assert sequence.thinking is not None
        blocks, chain = sequence.computed // block_size, sequence.chain
        names = [] if chain is None else [chain.digest(block) for block in range(blocks)]
        sequence.thinking.begin([thought for name in names for thought in self._notes[name]])
        for name in names:
            self._notes.move_to_end(name)
