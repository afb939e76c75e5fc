"""Number of proposals per step: as many as make the expected tokens per second rise.

A proposal at depth j is accepted if all before it are, so j proposals with acceptance `p` give `p + p² + ... + p^j`
more tokens on average (Leviathan et al., 2023, equation 1). One more row makes a step longer by `row_s`. The next
proposal pays if it has more expected tokens per second than the step without it. Both figures are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

from baton.engine.speculation.proposer import Source

HOPE = 0.8  # acceptance before anything is measured
PRIOR = 2.0  # proposals that the prior of a sequence counts as
KEPT, KEPT_OF_ALL = 0.85, 0.98  # weight of earlier proposals after a step
RELAX = 0.01  # share of the way back to HOPE in a step whose possible proposals did not pay
KEPT_S = 0.9  # weight of the mean step after another step
MOST_INFORMATION = 400.0  # squared rows; more makes the slope slow to change
OUTLIER = 3.0  # times the mean step, or the mean proposal
EVEN = 0.5  # acceptance that a verify pass needs


@dataclass(slots=True)
class Acceptance:
    """Share of accepted proposals, with exponential forgetting toward a prior."""

    kept: float = KEPT
    right: float = 0.0
    tried: float = 0.0

    def note(self, proposed: int, accepted: int) -> None:
        """Count a step. Proposals behind the first wrong one were not tried."""
        self.right = self.right * self.kept + accepted
        self.tried = self.tried * self.kept + min(accepted + 1, proposed)

    def share(self, prior: float) -> float:
        return (self.right + PRIOR * prior) / (self.tried + PRIOR)

    def relax(self) -> None:
        """Forget a little, so that proposals which did not pay are tried again some time."""
        self.right, self.tried = self.right * (1 - RELAX), self.tried * (1 - RELAX)


class Speculating:
    """Speculation of one request: its source, its acceptance, and the proposal of the step under way."""

    __slots__ = ("acceptance", "base", "candidates", "proposal", "source")

    def __init__(self, source: Source) -> None:
        self.source, self.acceptance = source, Acceptance()
        self.proposal: list[int] = []
        self.candidates: list[int] = []  # proposed to a verify pass, behind `base` tokens
        self.base = 0


@dataclass(slots=True)
class StepSeconds:
    """Seconds of a step by its rows: a line through the mean step. Steps like the mean do not change its slope. Before
    steps differ, the slope is 0, so that proposals are tried.
    """

    rows: float = 0.0
    seconds: float = 0.0
    _variance: float = 1e-9
    _covariance: float = 0.0

    def note(self, rows: int, seconds: float) -> None:
        if not self.seconds:
            self.rows, self.seconds = float(rows), seconds
            return
        more, longer = rows - self.rows, min(seconds, OUTLIER * self.seconds) - self.seconds
        self._variance += more * more
        self._covariance += more * longer
        if self._variance > MOST_INFORMATION:
            share = MOST_INFORMATION / self._variance
            self._variance, self._covariance = self._variance * share, self._covariance * share
        self.rows += (1 - KEPT_S) * more
        self.seconds += (1 - KEPT_S) * longer

    @property
    def row_s(self) -> float:
        return max(self._covariance / self._variance, 0.0)

    def of(self, rows: int) -> float:
        """Return the seconds of a step with this many rows."""
        return max(self.seconds + (rows - self.rows) * self.row_s, self.seconds * 0.1)


@dataclass(slots=True)
class ProposalControl:
    """Measurements of one engine, and the choice of its numbers of proposals."""

    steps: StepSeconds = field(default_factory=StepSeconds)
    overall: Acceptance = field(default_factory=lambda: Acceptance(KEPT_OF_ALL))
    proposal_s: float = 0.0  # seconds of the drafter per proposal

    def counts(self, each: Sequence[Acceptance], possible: Sequence[int], rows: int) -> list[int]:
        """Return numbers of proposals for sequences with these acceptances, each at most `possible[i]`, and at most
        `rows` together. The best proposal is added first, until the best one left does not pay.
        """
        found, prior = [0] * len(each), self.overall.share(HOPE)
        shares = [acceptance.share(prior) for acceptance in each]
        heap = [(-share, index) for index, share in enumerate(shares) if possible[index]]
        heapify(heap)
        tokens, seconds, cost = float(len(each)), self.steps.of(len(each)), self.steps.row_s + self.proposal_s
        pays = True
        while heap and rows > 0 and pays:
            gain, index = -heap[0][0], heap[0][1]
            if not (pays := gain * seconds > cost * tokens):
                continue
            found[index] += 1
            rows, tokens, seconds = rows - 1, tokens + gain, seconds + cost
            left = found[index] < possible[index]
            heapreplace(heap, (-gain * shares[index] if left else 0.0, index))
        idle = [acceptance for acceptance, most, count in zip(each, possible, found, strict=True) if most and not count]
        if idle and not pays:  # else there were no rows left for them
            self.relax(idle)
        return found

    def relax(self, idle: Sequence[Acceptance]) -> None:
        """Forget a little of the measurements that prevent proposals of these sequences."""
        for acceptance in (*idle, self.overall):
            acceptance.relax()
        self.proposal_s *= 1 - RELAX

    def pays(self, acceptance: Acceptance) -> bool:
        """Return whether proposals of this sequence fill verify passes with more right tokens than wrong ones."""
        if acceptance.share(self.overall.share(HOPE)) >= EVEN:
            return True
        self.relax([acceptance])
        return False

    def note_step(self, rows: int, seconds: float) -> None:
        """Count a step of this many rows. Its seconds include the draws, but not the drafter."""
        self.steps.note(rows, seconds)

    def note_drafter(self, proposals: int, seconds: float) -> None:
        if proposals:
            each = seconds / proposals
            each = min(each, OUTLIER * self.proposal_s) if self.proposal_s else each
            self.proposal_s += (1 - KEPT_S) * (each - self.proposal_s)
