"""Planner of fixed forwards: the part of a deterministic sequence that is computed next. Pure, like the scheduler.

A sequence is *due*, and waits for a verify pass, if it has `W - 1` candidates or one that ends it. Spare rows of a pass
go to others with candidates. Each step has at most one pass, so that other sequences wait for no more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from baton.engine.determinism.shapes import FixedShapes
from baton.engine.sampling.prompt_logprobs import PromptScores, scores_of
from baton.engine.sequence import UNLIMITED, ScheduledSequence, Sequence, SequencePolicy, VerifyWork

PATIENCE = 4  # steps that a due sequence waits for others to join


@dataclass(slots=True)
class Verifying:
    """Verify passes of one sequence: their number, their total time, and how many rejected a candidate."""

    passes: int = 0
    seconds: float = 0.0
    rollbacks: int = 0


@dataclass(slots=True, eq=False)
class VerifiedProgress(SequencePolicy):
    """Final part of a deterministic sequence: `verified` tokens, and the KV of its first `final` positions."""

    shapes: FixedShapes
    prompt: int  # length; its positions are computed on the grid, all others in verify passes
    verified: int
    final: int = 0
    ended: bool = False  # no candidate can follow the last one
    waited: int = 0  # steps since it became due
    holds: bool = False  # it ends with one more token, which needs no candidate
    verifying: Verifying = field(default_factory=Verifying)
    own_forwards: ClassVar[bool] = True

    @property
    def shareable(self) -> int:
        # KV of verify passes is right for this sequence alone, because other prompts are computed on the grid.
        return min(self.final, self.prompt)

    @property
    def cacheable(self) -> int:
        return self.prompt

    @property
    def on_grid(self) -> bool:
        return self.final < self.prompt

    def due(self, known: int) -> bool:
        """Return whether only a verify pass can continue it, with `known` tokens including candidates."""
        if self.on_grid:
            return False
        replays = self.verified - self.final > 1  # delivered tokens without KV here
        return replays or self.ended or self.holds or known - self.verified >= self.shapes.tokens - 1

    def ordinary(self, known: int) -> int:
        return 0 if self.on_grid or self.due(known) else UNLIMITED

    def confirmed(self, known: int) -> bool:
        """Return whether all `known` tokens are final, with final KV for all of them but the last."""
        return self.verified == known == self.final + 1

    def aligned(self, cached: int, block_size: int) -> int:
        while cached < self.prompt and self.shapes.chunk(cached).start != cached:
            cached -= block_size
        return cached

    def admitted(self, sequence: Sequence, block_size: int) -> None:
        self.final = sequence.computed

    def preempted(self, sequence: Sequence) -> None:
        sequence.known = self.verified  # candidates are lost with their KV
        self.final, self.ended, self.waited = 0, False, 0


@dataclass(frozen=True, slots=True)
class ExactForwards(SequencePolicy):
    """Policy of a deterministic sequence where every forward is exact: it is in fixed forwards, but of any shape."""


def progress_of(sequence: Sequence) -> VerifiedProgress:
    """Return the progress of a deterministic sequence."""
    progress = sequence.policy(VerifiedProgress)
    assert progress is not None
    return progress


class WindowPlanner:
    """Planner of the next fixed forward."""

    def __init__(self) -> None:
        self._grid_was_last = False

    def next(self, running: Iterable[Sequence], ready: Callable[[Sequence], bool]) -> list[VerifyWork]:
        """Return the windows of one forward, or none. `ready` tests whether a sequence has blocks for all tokens."""
        fixed = [sequence for sequence in running if sequence.own_forwards and ready(sequence)]
        if not fixed:
            return []
        grid, verify = begin(fixed), self._verify(fixed, idle=not any(sequence.ordinary for sequence in running))
        self._grid_was_last = bool(grid) and not (verify and self._grid_was_last)
        return grid if self._grid_was_last else verify

    def _verify(self, sequences: list[Sequence], *, idle: bool) -> list[VerifyWork]:
        due = [sequence for sequence in sequences if progress_of(sequence).due(sequence.known)]
        if not due:
            return []
        for sequence in due:
            progress_of(sequence).waited += 1
        shapes = progress_of(due[0]).shapes
        rows = shapes.rows
        waited = max(progress_of(sequence).waited for sequence in due)
        if len(due) < rows and waited <= PATIENCE and not (idle or shapes.stalls):
            return []
        others = [s for s in sequences if not progress_of(s).on_grid and _candidates(s) and s not in due[:rows]]
        joined = due[:rows] + sorted(others, key=_candidates, reverse=True)[: max(0, rows - len(due))]
        return [_window(sequence) for sequence in joined]


def begin(sequences: list[Sequence]) -> list[VerifyWork]:
    """Return the next grid chunk of the first sequence that has one left."""
    for sequence in sequences:
        fixed = progress_of(sequence)
        if fixed.on_grid:
            chunk = fixed.shapes.chunk(fixed.final)
            count = min(chunk.stop, fixed.prompt) - chunk.start
            return [VerifyWork(sequence, chunk.start, count, len(chunk), on_grid=True)]
    return []


def _window(sequence: Sequence) -> VerifyWork:
    fixed = progress_of(sequence)
    tokens = fixed.shapes.tokens
    return VerifyWork(sequence, fixed.final, min(sequence.known - fixed.final, tokens), tokens, on_grid=False)


def _candidates(sequence: Sequence) -> int:
    return sequence.known - progress_of(sequence).verified


class Part(NamedTuple):
    """Work of one forward. It is fixed if `exact`. `scores` need the logits of all rows of its one sequence."""

    work: list[ScheduledSequence]
    exact: bool
    scores: PromptScores | None = None


def split_exact(work: list[ScheduledSequence], rows: int) -> list[Part]:
    """Return the forwards of an ordinary batch: one for each prompt that is scored, and those of the rest."""
    scored = [(item, scores_of(item.sequence)) for item in work if item.sequence.policies]
    parts = [Part([item], item.sequence.policy(ExactForwards) is not None, s) for item, s in scored if s is not None]
    if not parts:
        return _split_exact(work, rows)
    alone = {id(part.work[0]) for part in parts}
    rest = [item for item in work if id(item) not in alone]
    return parts + (_split_exact(rest, rows) if rest else [])


def _split_exact(work: list[ScheduledSequence], rows: int) -> list[Part]:
    """Return the forwards of the rest: exact ones for sequences that need that, filled up to `rows` with other decode
    sequences, and one more for the others. A sequence of which every forward is exact makes that of the batch so.
    """
    if any(item.sequence.policy(ExactForwards) is not None for item in work):
        return [Part(work, True)]
    needing = [item for item in work if rows and _final(item)]
    if not needing:
        return [Part(work, False)]
    plain = [item for item in work if item.count == 1 and item.completes and not _final(item)]
    exact = needing + plain[: -len(needing) % rows]
    if len(exact) == len(work) <= rows:
        return [Part(work, True)]
    inside = set(map(id, exact))
    rest = [item for item in work if id(item) not in inside]
    found = [Part(exact[at : at + rows], True) for at in range(0, len(exact), rows)]
    return [*found, Part(rest, False)] if rest else found


def _final(item: ScheduledSequence) -> bool:
    """Return whether all that it reads is final, so that its results can be final."""
    progress = item.sequence.policy(VerifiedProgress) if item.count == 1 else None
    return progress is not None and progress.confirmed(item.sequence.known)
