"""Fits the numbers of a profile to measurements of a live cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import NamedTuple

import numpy as np

from baton.core import Pace
from baton.planner.profile import Line, Piece

LEAST = 0.1  # share of a decode step that is kept, at least, when the cost of its context is subtracted
FACTORS = 200  # equally likely factors of a spread: enough for a 99th percentile


class Steps(NamedTuple):
    """Mean tokens, context (positions attended to) and seconds of steps of one kind and size."""

    tokens: float
    context: float
    seconds: float

    @classmethod
    def of(cls, pace: Pace) -> Steps:
        """Return the means of a pace, which must have at least one step."""
        return cls(pace.tokens / pace.steps, pace.context / pace.steps, pace.seconds / pace.steps)


class Slower(NamedTuple):
    """Factors by which prompts and decoding took longer."""

    prompts: float = 1.0
    decode: float = 1.0


@dataclass(frozen=True, slots=True)
class Gaps:
    """Seconds between tokens of requests that decoded together, with the batch size (`rows`) and its total context."""

    rows: float
    context: float
    seconds: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.seconds) / len(self.seconds)


def fit_line(steps: Sequence[Steps]) -> Line:
    """Fit a line by least squares of relative errors: the best fit over all subsets of coefficients, none negative.
    `token_s` is 0 if steps of different contexts have equal tokens, because small steps mostly read the weights.
    """
    same_tokens = len(steps) > 1 and len({one.tokens for one in steps}) == 1
    x = np.array([(1.0, one.tokens, one.context) for one in steps])
    seconds = np.array([one.seconds for one in steps])
    x /= seconds[:, None]
    best, found = math.inf, np.zeros(3)
    for kept in product((False, True), (False,) if same_tokens else (False, True), (False, True)):
        columns = [place for place, keep in enumerate(kept) if keep]
        part = np.linalg.lstsq(x[:, columns], np.ones(len(steps)), rcond=None)[0] if columns else np.zeros(0)
        numbers = np.zeros(3)
        numbers[columns] = part
        loss = float(((x @ numbers - 1.0) ** 2).sum())
        if (part >= 0).all() and loss < best - 1e-12:
            best, found = loss, numbers
    return Line(step_s=float(found[0]), token_s=float(found[1]), context_s=float(found[2]))


def fit_decode(points: Sequence[Gaps]) -> tuple[Piece, ...]:
    """Interpolate linearly between the measured batch sizes. All pieces have the same `context_s`."""
    context_s = _context_s(points)
    at: dict[float, list[float]] = {}
    for one in points:
        rest = max(one.mean - context_s * one.context, one.mean * LEAST)
        at.setdefault(one.rows, []).append(rest)
    knots = [(rows, sum(rests) / len(rests)) for rows, rests in sorted(at.items())]
    if len(knots) == 1:
        return (Piece(step_s=max(knots[0][1], 0.0), token_s=0.0, context_s=context_s),)
    pieces = []
    for (rows, rest), (more_rows, more) in pairwise(knots):
        token_s = max((more - rest) / (more_rows - rows), 0.0)
        below = math.ceil(more_rows) if more_rows < knots[-1][0] else None
        pieces.append(Piece(step_s=rest - token_s * rows, token_s=token_s, context_s=context_s, rows_below=below))
    return tuple(pieces)


def _context_s(points: Sequence[Gaps]) -> float:
    """Return the cost per position, from pairs of points with equal batch size and different context. Relative
    differences cancel the non-linear cost of the batch size. Without such pairs, fit a line through all points.
    """
    product_sum = square_sum = 0.0
    for one, other in combinations(points, 2):
        if one.rows == other.rows and one.context != other.context:
            more = (other.context - one.context) / one.mean
            product_sum += more * (other.mean / one.mean - 1.0)
            square_sum += more * more
    if not square_sum:
        return fit_line([Steps(one.rows, one.context, one.mean) for one in points]).context_s
    return max(product_sum / square_sum, 0.0)


def fit_spread(points: Sequence[Gaps]) -> tuple[float, ...]:
    """Return `FACTORS` quantiles of gap / mean, scaled to mean 1. Every point has the same weight."""
    shares = (np.arange(FACTORS) + 0.5) / FACTORS
    each = [np.quantile(np.array(one.seconds) / one.mean, shares) for one in points]
    factors = np.quantile(np.concatenate(each), shares)
    return tuple(round(float(factor), 4) for factor in factors / factors.mean())


def fit_joint(prompts: Line, decode: Line, joint: Pace, beside: Pace, slower: Slower) -> float | None:
    """Return the extra seconds of a mixed step, or None without such steps. `slower`: slowdown by other workers."""
    if not joint.steps:
        return None
    alone = decode.step_s * joint.steps + decode.token_s * beside.tokens + decode.context_s * beside.context
    new = prompts.token_s * joint.tokens + prompts.context_s * joint.context
    rest = (joint.seconds - alone * slower.decode) / slower.prompts
    return max((rest - new) / joint.steps, 0.0)


def seconds_of(line: Line, steps: Steps) -> float:
    """Return the seconds that a line predicts for such a step."""
    return line.step_s + line.token_s * steps.tokens + line.context_s * steps.context
