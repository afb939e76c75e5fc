"""Thinking progress of one sequence: numbers and thoughts, without tensors except those that a handoff carries.

A sequence is cut into chunks of `chunk_size` tokens. A thought follows each chunk, and determines the state for the
next chunk; chunk 0 has none. Chunks that are not thought about count as empty thoughts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from baton.core import Thought
from baton.engine.sequence import UNLIMITED, SequencePolicy
from baton.engine.sequence import Sequence as Progress

if TYPE_CHECKING:
    from torch import Tensor


ALL = UNLIMITED  # also more than the chunks of any sequence


class Notes:
    """Thoughts about the chunks of at most `most` cached blocks. A block without a note counts as not cached."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._notes: OrderedDict[bytes, tuple[tuple[int, ...], ...]] = OrderedDict()

    def put(self, block_hash: bytes, thoughts: Sequence[tuple[int, ...]]) -> None:
        self._notes[block_hash] = tuple(thoughts)
        self._notes.move_to_end(block_hash)
        if len(self._notes) > self._most:
            self._notes.popitem(last=False)

    def known(self, hashes: Iterable[bytes]) -> Iterator[bytes]:
        """Return these hashes, up to the first without a note."""
        return takewhile(self._notes.__contains__, hashes)

    def thoughts(self, hashes: Iterable[bytes]) -> list[tuple[int, ...]]:
        """Return the thoughts about consecutive blocks that are `known`, and keep their notes for longer."""
        found = list[tuple[int, ...]]()
        for block_hash in hashes:
            found += self._notes[block_hash]
            self._notes.move_to_end(block_hash)
        return found


@dataclass(slots=True, eq=False)
class Thinking(SequencePolicy):
    """Thoughts of one sequence. A forward assumes empty thoughts for up to `ahead` tokens beyond the open chunk."""

    notes: Notes
    chunk_size: int
    until: int  # number of chunks that are thought about: those of the prompt, or ALL
    shared: int  # leading tokens with KV that others may use; later KV was computed without thoughts
    ahead: int = ALL  # the open chunk is that of the next position
    cheap: int | None = None  # number of almost free rows; if set, `ahead` follows recent progress
    thoughts: list[tuple[int, ...]] = field(default_factory=list)  # made so far
    reported: int = 0  # thoughts that `new_thoughts` has returned
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

    @property
    def shareable(self) -> int:
        return self.shared

    @property
    def cacheable(self) -> int:
        return self.shared

    def most(self, computed: int) -> int:
        if self.settled:
            return ALL
        return self.chunk_size - computed % self.chunk_size + self.ahead

    def update_ahead(self, tokens: int, *, stopped: bool) -> None:
        """Adapt `ahead` to a forward that computed `tokens` tokens. If `stopped`, a thought prevented more."""
        if self.cheap is not None:
            self.ahead = min(ALL, max(self.cheap, 2 * tokens if stopped else 2 * self.ahead))

    def usable(self, hashes: Iterable[bytes]) -> Iterator[bytes]:
        return self.notes.known(hashes)

    def admitted(self, sequence: Progress, block_size: int) -> None:
        """Start over behind the cached blocks, with the thoughts about them."""
        blocks, chain = sequence.computed // block_size, sequence.chain
        hashes = [] if chain is None else [chain.digest(block) for block in range(blocks)]
        self.thoughts[:], self.rows, self.carried = self.notes.thoughts(hashes), None, None

    def published(self, hashes: Sequence[bytes], first: int, block_size: int) -> None:
        chunks = block_size // self.chunk_size
        for block, block_hash in enumerate(hashes, first):
            # Chunks that are not thought about have no entry, so that all sequences note the same.
            self.notes.put(block_hash, self.thoughts[block * chunks : (block + 1) * chunks])

    def new_thoughts(self) -> list[Thought]:
        found = [Thought(chunk, self.thoughts[chunk]) for chunk in range(self.reported, len(self.thoughts))]
        self.reported = max(self.reported, len(self.thoughts))
        return found


def thinking_of(sequence: Progress) -> Thinking:
    """Return the progress of a sequence of a model that thinks."""
    thinking = sequence.policy(Thinking)
    assert thinking is not None
    return thinking
