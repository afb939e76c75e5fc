"""Measurements that `baton profile --live` takes of a cluster in several rounds, and the profile that fits them."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise, product
from operator import attrgetter
from statistics import median_high, median_low
from typing import NamedTuple, TypeVar

import numpy as np

from baton.client.types import ClusterStatus
from baton.core import Pace, Role
from baton.errors import NoWorker
from baton.planner.profile import Layout, Line, Link, Piece, Profile, RequestOverheads
from baton.planner.sim.scenario import Slowed

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


SHORT = 16  # tokens of a prompt
BESIDE = 4  # sequences that decode while prompts are computed
AS_USUAL = 1.25  # times the median round; slower measurements were disturbed

Part = TypeVar("Part")


@dataclass(slots=True)
class Seen:
    """One request: send time, token times on the same clock, and the `worker` that computed its prompt."""

    sent: float
    times: list[float] = field(default_factory=list)
    worker: str = ""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Requests with prompts of one length, sent one by one, and the step totals that workers reported for them."""

    length: int
    seen: tuple[Seen, ...]
    pace: Pace


@dataclass(slots=True)
class Measured:
    """All measurements. Lists have an entry per round."""

    single: dict[int, list[Prompts]] = field(default_factory=dict)
    together: dict[tuple[int, int], list[Gaps]] = field(default_factory=dict)
    busy: list[Gaps] = field(default_factory=list)  # decoding while (other) workers computed prompts
    busy_prompts: list[Pace] = field(default_factory=list)  # these prompts
    alone: list[Gaps] = field(default_factory=list)  # one worker with both roles decoded and all others were idle
    joint: Pace = field(default_factory=Pace)  # prompts of mixed steps
    beside: Pace = field(default_factory=Pace)  # decoding sequences of mixed steps

    @property
    def parts(self) -> int:
        parts = sum(map(len, self.single.values())) + sum(map(len, self.together.values()))
        return parts + len(self.busy) + len(self.busy_prompts) + len(self.alone)

    def undisturbed(self) -> Measured:
        """Return the measurements without those far above the median round (the faster one of two), because other work
        comes in bursts and only slows down. Mixed steps vary from round to round, so all are kept.
        """
        return replace(
            self,
            single={size: usual(parts, lambda one: seconds_a_step(one.pace)) for size, parts in self.single.items()},
            together={key: usual(parts, attrgetter("mean")) for key, parts in self.together.items()},
            busy=usual(self.busy, attrgetter("mean")),
            busy_prompts=usual(self.busy_prompts, seconds_a_step),
            alone=usual(self.alone, attrgetter("mean")),
        )


def usual(parts: Sequence[Part], seconds: Callable[[Part], float]) -> list[Part]:
    """Return the parts that took at most `AS_USUAL` times the median of all parts above 0 seconds."""
    most = AS_USUAL * median_low([seconds(one) for one in parts if seconds(one)] or [0.0])
    return [one for one in parts if seconds(one) <= most]


def together(seen: Sequence[Seen], rows: int, length: int) -> Gaps:
    """Return the gaps from the last request's first token to the first request's end, or all gaps if none."""
    begin, end = max(one.times[0] for one in seen), min(one.times[-1] for one in seen)
    kept = [
        later - earlier
        for one in seen
        for earlier, later in pairwise(one.times[1:])
        if begin <= earlier and later <= end
    ]
    every = kept or [later - earlier for one in seen for earlier, later in pairwise(one.times)]
    tokens = sum(len(one.times) for one in seen) / len(seen)
    return Gaps(rows, rows * (length + tokens / 2), tuple(every))


def summed(*paces: Pace) -> Pace:
    """Return the totals of several paces."""
    return Pace(
        sum(one.steps for one in paces),
        sum(one.tokens for one in paces),
        sum(one.context for one in paces),
        sum(one.seconds for one in paces),
    )


def seconds_a_step(pace: Pace) -> float:
    """Return the mean seconds per step, or 0.0 without steps."""
    return pace.seconds / pace.steps if pace.steps else 0.0


@dataclass(frozen=True, slots=True)
class Decoding:
    """Decode costs of one worker."""

    pieces: tuple[Piece, ...]  # while all other workers are idle
    spread: tuple[float, ...]  # factors of their step times
    beside_prompts: Slowed  # slowdown while others compute prompts
    beside_decode: Slowed | None = None  # slowdown while others decode, or None if not measured


def fit_colocated(points: Sequence[Gaps], alone: Gaps, busy: Gaps | None) -> Decoding:
    """Return the decode costs of workers with both roles. `points`: all decoded equally many sequences. `alone`: one
    decoded one. `busy`: another one computed prompts; None means not measured, and the slowdown by decoding is used.
    """
    same_rows = min((one for one in points if one.rows == alone.rows), key=lambda one: one.context)
    longer = max(1.0, same_rows.mean / alone.mean)
    each = [replace(one, seconds=tuple(seconds / longer for seconds in one.seconds)) for one in points]
    pieces = fit_decode(each)
    decoding = Slowed(factor=longer, spread=fit_spread(points))
    return Decoding(pieces, fit_spread([alone]), _slowdown(pieces, busy) if busy else decoding, decoding)


def _slowdown(pieces: tuple[Piece, ...], busy: Gaps) -> Slowed:
    usual_s = seconds_of(piece_of(pieces, busy.rows), Steps(busy.rows, busy.context, 0.0))
    return Slowed(factor=max(1.0, busy.mean / usual_s), spread=fit_spread([busy]))


def piece_of(pieces: Sequence[Piece], rows: float) -> Piece:
    """Return the piece for a batch of `rows` sequences."""
    return next((one for one in pieces if one.rows_below is None or rows < one.rows_below), pieces[-1])


def merged(gaps: Sequence[Gaps]) -> Gaps:
    """Return the gaps of all rounds with the same batch as one."""
    return Gaps(gaps[0].rows, gaps[0].context, tuple(gap for one in gaps for gap in one.seconds))


MEMORY_BYTES_PER_S = 25e9  # between workers without a probed channel, which share a process


def fitted(seen: Measured, cluster: ClusterStatus, tensor_parallel: int, name: str) -> Profile:
    """Return the profile that fits the measurements. Raises NoWorker if no decoding worker is connected."""
    paces = [summed(*(one.pace for one in parts)) for parts in seen.single.values()]
    prompt = fit_line([Steps.of(pace) for pace in paces if pace.steps])
    points = [merged(gaps) for gaps in seen.together.values()]
    if seen.alone:
        decoding = fit_colocated(points, merged(seen.alone), merged(seen.busy) if seen.busy else None)
    else:  # separate pools: `points` without prompts, `busy` with prompts elsewhere
        pieces = fit_decode(points)
        decoding = Decoding(pieces, fit_spread(points), _slowdown(pieces, merged(seen.busy)))
    busy = summed(*seen.busy_prompts)
    busy_prompt = max(1.0, seconds_a_step(busy) / seconds_of(prompt, Steps.of(busy))) if busy.steps else 1.0
    beside = Slower(busy_prompt, decoding.beside_decode.factor) if decoding.beside_decode else Slower()
    worker = next((one.info for one in cluster.workers if decodes(one.info.role, cluster)), None)
    if worker is None:
        raise NoWorker("no worker that decodes is connected")
    layout = Layout(
        tensor_parallel=tensor_parallel,
        kv_tokens=worker.total_blocks * worker.layout.block_size,
        prompt=prompt,
        decode=decoding.pieces,
        joint_extra_s=fit_joint(prompt, piece_of(decoding.pieces, BESIDE), seen.joint, seen.beside, beside),
        spread=decoding.spread,
        host_workers=len(cluster.workers),
        busy_prompt=busy_prompt,
        beside_prompts=decoding.beside_prompts,
        beside_decode=decoding.beside_decode,
    )
    speeds = [channel.bytes_per_s for one in cluster.workers for channel in one.load.channels]
    return Profile(
        name=name,
        model=cluster.model,
        hardware=f"{platform.processor() or platform.machine()}, {len(cluster.workers)} workers",
        source=f"baton profile --live, Baton {cluster.version}",
        level=worker.cpu_level,
        dtype="" if worker.layout.dtype == "int8" else worker.layout.dtype,  # int8 is that of KV only
        quantize=worker.quantize,
        token_bytes=worker.layout.layers * worker.layout.layer_token_bytes,  # of all ranks
        layers=worker.layout.layers,
        link=Link(bytes_per_s=max(speeds, default=MEMORY_BYTES_PER_S)),
        overheads=_overheads(seen, prompt, seconds_of(piece_of(decoding.pieces, 1), Steps(1, SHORT, 0.0))),
        layouts=(layout,),
    )


def decodes(role: Role, cluster: ClusterStatus) -> bool:
    """Return whether workers of that role decode: decode workers, or all if there is only one role."""
    return role is Role.DECODE or all(worker.info.role is role for worker in cluster.workers)


def _overheads(seen: Measured, prompt: Line, step_s: float) -> RequestOverheads:
    """Return the median excess of the first token over its prompt step, and of the second over a decode step."""
    first, second = [], []
    for one in (one for parts in seen.single.values() for one in parts):
        pace = one.pace
        computed = pace.seconds / len(one.seen) if pace.steps else seconds_of(prompt, Steps(one.length, 0.0, 0.0))
        first += [request.times[0] - request.sent - computed for request in one.seen if request.times]
        second += [request.times[1] - request.times[0] - step_s for request in one.seen if len(request.times) > 1]
    admit_s, commit_s = (max(median_high(excess or [0.0]), 0.0) for excess in (first, second))
    return RequestOverheads(admit_s=admit_s, commit_s=commit_s)
