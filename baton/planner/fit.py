"""From what was measured on a live cluster to the numbers of a profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import NamedTuple

import numpy as np

from baton.core import Pace
from baton.planner.profile import Line, Piece

LEAST = 0.1  # of a decode step: what is left of it without its context, however much that is thought to be
FACTORS = 200  # so many equally likely ones: enough for a 99th percentile


class Steps(NamedTuple):
    """Steps of one kind and size, on average: what one computed, attended to, and took in seconds."""

    tokens: float
    context: float
    seconds: float

    @classmethod
    def of(cls, pace: Pace) -> Steps:
        """Of at least one step."""
        return cls(pace.tokens / pace.steps, pace.context / pace.steps, pace.seconds / pace.steps)


class Slower(NamedTuple):
    """How many times longer what is computed of prompts and of decode rows took."""

    prompts: float = 1.0
    decode: float = 1.0


@dataclass(frozen=True, slots=True)
class Gaps:
    """Seconds between tokens of requests that decoded together: so many rows with so much context in all."""

    rows: float
    context: float
    seconds: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.seconds) / len(self.seconds)


def fit_line(steps: Sequence[Steps]) -> Line:
    """Least squares of relative errors, no number below 0: of all ways to leave some out, the best that is allowed.

    Where steps of different contexts all computed as many tokens (chunks smaller than any prompt), no cost is that of a
    token: most of what small steps take is reading the weights.
    """
    alike = len(steps) > 1 and len({one.tokens for one in steps}) == 1
    x = np.array([(1.0, one.tokens, one.context) for one in steps])
    seconds = np.array([one.seconds for one in steps])
    x /= seconds[:, None]
    best, found = math.inf, np.zeros(3)
    for kept in product((False, True), (False,) if alike else (False, True), (False, True)):
        columns = [place for place, keep in enumerate(kept) if keep]
        part = np.linalg.lstsq(x[:, columns], np.ones(len(steps)), rcond=None)[0] if columns else np.zeros(0)
        numbers = np.zeros(3)
        numbers[columns] = part
        loss = float(((x @ numbers - 1.0) ** 2).sum())
        if (part >= 0).all() and loss < best - 1e-12:
            best, found = loss, numbers
    return Line(step_s=float(found[0]), token_s=float(found[1]), context_s=float(found[2]))


def fit_decode(points: Sequence[Gaps]) -> tuple[Piece, ...]:
    """Through what was measured at each number of rows, straight between them; `context_s` is the same everywhere."""
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
    """Of as many rows with different contexts, by least squares of relative differences: what more rows cost, which is
    no line, is not in it. Without such: of a line through all.
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
    """By which factors gaps differ from their mean: quantiles of all points together, each of the same weight, however
    many gaps it has; their mean made 1.
    """
    shares = (np.arange(FACTORS) + 0.5) / FACTORS
    each = [np.quantile(np.array(one.seconds) / one.mean, shares) for one in points]
    factors = np.quantile(np.concatenate(each), shares)
    return tuple(round(float(factor), 4) for factor in factors / factors.mean())


def fit_joint(prompts: Line, decode: Line, joint: Pace, beside: Pace, slower: Slower) -> float | None:
    """What a step with prompts and decode rows takes more than one that only decodes and the prompts' tokens; None:
    there were none. `slower`: by what other workers did meanwhile.
    """
    if not joint.steps:
        return None
    alone = decode.step_s * joint.steps + decode.token_s * beside.tokens + decode.context_s * beside.context
    new = prompts.token_s * joint.tokens + prompts.context_s * joint.context
    rest = (joint.seconds - alone * slower.decode) / slower.prompts
    return max((rest - new) / joint.steps, 0.0)


def seconds_of(line: Line, steps: Steps) -> float:
    """What a line says of such a step."""
    return line.step_s + line.token_s * steps.tokens + line.context_s * steps.context
