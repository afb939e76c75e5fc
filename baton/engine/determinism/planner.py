"""Planner of fixed forwards: the part of a deterministic sequence that is computed next. Pure, like the scheduler.

A sequence is *due*, and waits for a verify pass, if it has `W - 1` candidates or one that ends it. The rest of a
pass goes to others with candidates, those with the least certain ones first. If windows may have any lengths, a pass
also runs before the next candidates exceed it, so that all can join it. Each step has at most one pass or some grid
chunks, so that other sequences wait for no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from baton.core import HandoffId
from baton.engine.determinism.shapes import FixedShapes
from baton.engine.sampling.prompt_logprobs import PromptScores, scores_of
from baton.engine.sequence import UNLIMITED, ScheduledSequence, Sequence, SequencePolicy, VerifyWork

PATIENCE = 4  # steps that a due sequence waits for others to join
GRID_TOKENS = 512  # of prompts on the grid in one step, if other prompts need a part of it


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
    proposed: int = 0  # tokens that a proposer expects behind the known ones
    margin: float = math.inf  # the least lead of a candidate's logit over the second best
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
        expected = known + self.proposed * self.shapes.ragged  # other passes take no proposals
        return replays or self.ended or self.holds or expected - self.verified >= self.shapes.tokens - 1

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
        self.final, self.ended, self.waited, self.proposed, self.margin = 0, False, 0, 0, math.inf


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

    def next(
        self,
        running: Iterable[Sequence],
        ready: Callable[[Sequence], bool],
        grid_tokens: Callable[[], int] = lambda: GRID_TOKENS,
        *,
        idle: bool = False,
    ) -> list[VerifyWork]:
        """Return the windows of one forward, or none. `ready` tests whether a sequence has blocks for all tokens, and
        `grid_tokens` returns how many tokens of prompts a step may have.
        """
        fixed = [sequence for sequence in running if sequence.own_forwards and ready(sequence)]
        if not fixed:
            return []
        started = [s for s in map(_Started.of, fixed) if not s.progress.on_grid and (s.inputs > 1 or s.due)]
        verify = _verify(started, idle=idle or not any(sequence.ordinary for sequence in running)) if started else []
        grid = begin(fixed, grid_tokens())
        self._grid_was_last = bool(grid) and not (verify and self._grid_was_last)
        return grid if self._grid_was_last else verify


class _Started(NamedTuple):
    """A sequence behind its prompt, as `WindowPlanner` sees it in one step."""

    sequence: Sequence
    progress: VerifiedProgress
    inputs: int  # of a pass: a verified token, candidates and proposals
    due: bool

    @classmethod
    def of(cls, sequence: Sequence) -> _Started:
        progress, known = progress_of(sequence), sequence.known
        inputs = known - progress.final + progress.proposed
        return cls(sequence, progress, inputs, progress.due(known))

    @property
    def window(self) -> VerifyWork:
        final, shapes = self.progress.final, self.progress.shapes
        inputs = self.sequence.known - final
        size = min(inputs, shapes.total) if shapes.ragged else shapes.tokens
        return VerifyWork(self.sequence, final, min(inputs, size), size, on_grid=False)


def _verify(started: list[_Started], *, idle: bool) -> list[VerifyWork]:
    """Return the windows of a pass, if one is full, or a due sequence has waited long enough or need not wait."""
    due, shapes = [each for each in started if each.due], started[0].progress.shapes
    for each in due:
        each.progress.waited += 1
    if not _is_full(due, started, shapes):
        waited = max((each.progress.waited for each in due), default=0)
        if waited <= PATIENCE and not (due and (idle or shapes.stalls)):
            return []
    return _joined(due, [each for each in started if not each.due], shapes)


def _is_full(due: list[_Started], started: list[_Started], shapes: FixedShapes) -> bool:
    """Return whether a pass is worth its cost now: with windows of one length, only due sequences fill it."""
    if not shapes.ragged:
        return len(due) >= shapes.rows
    more = max(1, sum(not (each.due or each.progress.proposed) for each in started))  # candidates of the next step
    longest = sorted((each.inputs for each in started), reverse=True)[: shapes.most]  # more do not fit into a pass
    return sum(longest) + min(more, shapes.most) > shapes.total


def _joined(due: list[_Started], others: list[_Started], shapes: FixedShapes) -> list[VerifyWork]:
    """Return the windows of a pass: of due sequences, longest wait first, then of those with the least certain
    candidate, because its error would waste what follows it. A window that does not fit waits for the next pass.
    """
    due = sorted(due, key=lambda each: -each.progress.waited)
    others = sorted(others, key=lambda each: (each.progress.margin, -each.inputs))
    found, left = list[VerifyWork](), shapes.total
    for window in (each.window for each in (*due, *others)):
        if window.size <= left and len(found) < shapes.most:
            found.append(window)
            left -= window.size
    return found


def begin(sequences: list[Sequence], tokens: int) -> list[VerifyWork]:
    """Return the next grid chunks of one step: one for each sequence that has any left, up to `tokens` in total."""
    found, left = list[VerifyWork](), tokens
    for sequence in sequences:
        fixed = progress_of(sequence)
        if left > 0 and fixed.on_grid:
            chunk = fixed.shapes.chunk(fixed.final)
            if found and len(chunk) > left:
                break
            count = min(chunk.stop, fixed.prompt) - chunk.start
            found.append(VerifyWork(sequence, chunk.start, count, len(chunk), on_grid=True))
            left -= len(chunk)
    return found


def forwards_of(windows: list[VerifyWork], present: Container[HandoffId]) -> Iterator[list[VerifyWork]]:
    """Yield the windows of each forward, without sequences that are no longer present: each grid chunk has its own."""
    grid = [[window] for window in windows if window.on_grid]
    for forward in grid or [windows]:
        if kept := [window for window in forward if window.sequence.key in present]:
            yield kept


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
