"""Planner of fixed forwards: the part of a deterministic sequence that is computed next. Pure, like the scheduler.

Such a sequence has candidates behind its verified tokens. The ordinary batch continues as if they were right, and a
verify pass checks them. A sequence is *due*, and waits for a pass, if it has `W - 1` candidates or one that ends it. A
pass takes sequences that are due; spare rows go to others with candidates. Each step has at most one pass, so that
other sequences wait for no more than one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.engine.determinism.shapes import FixedShapes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from baton.engine.sequence import Sequence

PATIENCE = 4  # steps that a due sequence waits for others to join


@dataclass(slots=True)
class Verifying:
    """Verify passes of one sequence: their number, their total time, and how many rejected a candidate."""

    passes: int = 0
    seconds: float = 0.0
    rollbacks: int = 0


@dataclass(slots=True, eq=False)
class VerifiedProgress:
    """Final part of a deterministic sequence: `verified` tokens, and the KV of its first `final` positions. KV behind
    `final` is that of candidates. The ordinary batch writes it, and a verify pass writes it again.
    """

    shapes: FixedShapes
    prompt: int  # length; its positions are computed on the grid, all others in verify passes
    verified: int
    final: int = 0
    ended: bool = False  # no candidate can follow the last one
    waited: int = 0  # steps since it became due
    holds: bool = False  # it ends with one more token, which needs no candidate
    verifying: Verifying = field(default_factory=Verifying)

    @property
    def on_grid(self) -> bool:
        """Whether the prompt is not computed yet."""
        return self.final < self.prompt

    def due(self, known: int) -> bool:
        """Return whether only a verify pass can continue it, with `known` tokens including candidates."""
        replays = self.verified - self.final > 1  # delivered tokens without KV here
        return not self.on_grid and (
            replays or self.ended or self.holds or known - self.verified >= self.shapes.tokens - 1
        )

    def aligned(self, cached: int, block_size: int) -> int:
        """Return how many of `cached` tokens, in whole blocks, end where the grid can continue."""
        while cached < self.prompt and self.shapes.chunk(cached).start != cached:
            cached -= block_size
        return cached

    def forget(self) -> None:
        """Drop the KV, and the candidates with it."""
        self.final, self.ended, self.waited = 0, False, 0


@dataclass(frozen=True, slots=True)
class VerifyWork:
    """Work of one row: `count` known tokens of `sequence` from position `start` on, padded to `size`."""

    sequence: Sequence
    start: int
    count: int
    size: int


class WindowPlanner:
    """Planner of the next fixed forward."""

    def __init__(self) -> None:
        self._grid_was_last = False

    def next(self, running: Iterable[Sequence], ready: Callable[[Sequence], bool]) -> list[VerifyWork]:
        """Return the windows of one forward: one on the grid, or some to verify, or none if no forward is worth it.
        `running` is in order of rank; `ready` tests whether a sequence has blocks for all known tokens.
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
    """Return the next grid chunk of the first sequence that has one left."""
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
