"""Which part of a deterministic sequence a forward of a fixed shape computes next. Pure, like the scheduler.

Such a sequence has candidates behind its verified tokens: the ordinary batch goes on as if they were right, and a
verify pass says whether they are. `W - 1` of them, or an end among them, and the sequence is *due*: it waits for the
pass. Passes are for those who are due, and when they are fewer than the rows, for others on the way. One pass at most
goes into a step, so that nobody else waits for more than one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.engine.determinism.shapes import FixedShapes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from baton.engine.sequence import Sequence

PATIENCE = 4  # steps that one who is due waits for company


@dataclass(slots=True)
class Verifying:
    """The verify passes that one sequence was part of: how many, how long they took, and how many disagreed with it."""

    passes: int = 0
    seconds: float = 0.0
    rollbacks: int = 0


@dataclass(slots=True, eq=False)
class VerifiedProgress:
    """What is final of a deterministic sequence: `verified` tokens, and the KV of its first `final` positions.

    KV behind `final` is of candidates, written by the ordinary batch, and is written again by a verify pass.
    """

    shapes: FixedShapes
    prompt: int  # tokens; their positions are computed on the grid, all others in verify passes
    verified: int
    final: int = 0
    ended: bool = False  # no candidate can follow the last one
    waited: int = 0  # steps since it is due
    holds: bool = False  # it ends with one more token, which needs no candidate
    verifying: Verifying = field(default_factory=Verifying)

    @property
    def on_grid(self) -> bool:
        """Whether the prompt is not computed yet."""
        return self.final < self.prompt

    def due(self, known: int) -> bool:
        """Whether it goes on by a verify pass alone, with so many tokens, candidates among them."""
        replays = self.verified - self.final > 1  # tokens that were delivered, and whose KV is not here
        return not self.on_grid and (
            replays or self.ended or self.holds or known - self.verified >= self.shapes.tokens - 1
        )

    def aligned(self, cached: int, block_size: int) -> int:
        """Of `cached` tokens, in whole blocks, those from behind which the grid can go on."""
        while cached < self.prompt and self.shapes.chunk(cached).start != cached:
            cached -= block_size
        return cached

    def forget(self) -> None:
        """Its KV is gone, and candidates with it."""
        self.final, self.ended, self.waited = 0, False, 0


@dataclass(frozen=True, slots=True)
class VerifyWork:
    """`count` known tokens of `sequence` from position `start` on, in a row of `size` tokens."""

    sequence: Sequence
    start: int
    count: int
    size: int


class WindowPlanner:
    """Chooses the next forward of a fixed shape."""

    def __init__(self) -> None:
        self._grid_was_last = False

    def next(self, running: Iterable[Sequence], ready: Callable[[Sequence], bool]) -> list[VerifyWork]:
        """Windows of one forward, all on the grid (one) or all to verify; none: nothing is worth one now.

        `running` in order of rank; `ready`: it has the blocks for what it knows.
        """
        fixed = [sequence for sequence in running if sequence.fixed is not None and ready(sequence)]
        if not fixed:
            return []
        grid, verify = begin(fixed), self._verify(fixed, idle=not any(sequence.ordinary for sequence in running))
        self._grid_was_last = bool(grid) and not (verify and self._grid_was_last)
        return grid if self._grid_was_last else verify

    def _verify(self, sequences: list[Sequence], *, idle: bool) -> list[VerifyWork]:
        due = [sequence for sequence in sequences if _of(sequence).due(sequence.known)]
        if not due:
            return []
        for sequence in due:
            _of(sequence).waited += 1
        shapes = _of(due[0]).shapes
        rows = shapes.rows
        waited = max(_of(sequence).waited for sequence in due)
        if len(due) < rows and waited <= PATIENCE and not (idle or shapes.stalls):
            return []
        others = [s for s in sequences if not _of(s).on_grid and _candidates(s) and s not in due[:rows]]
        joined = due[:rows] + sorted(others, key=_candidates, reverse=True)[: max(0, rows - len(due))]
        return [_window(sequence) for sequence in joined]


def begin(sequences: list[Sequence]) -> list[VerifyWork]:
    """The next chunk of the grid for the first of them that has one to come."""
    for sequence in sequences:
        fixed = _of(sequence)
        if fixed.on_grid:
            chunk = fixed.shapes.chunk(fixed.final)
            return [VerifyWork(sequence, chunk.start, min(chunk.stop, fixed.prompt) - chunk.start, len(chunk))]
    return []


def _window(sequence: Sequence) -> VerifyWork:
    fixed = _of(sequence)
    return VerifyWork(
        sequence, fixed.final, min(sequence.known - fixed.final, fixed.shapes.tokens), fixed.shapes.tokens
    )


def _candidates(sequence: Sequence) -> int:
    return sequence.known - _of(sequence).verified


def _of(sequence: Sequence) -> VerifiedProgress:
    assert sequence.fixed is not None
    return sequence.fixed
