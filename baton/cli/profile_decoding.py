"""What `baton profile --live` makes of gaps between tokens: decode steps by themselves, and beside busy workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.profile import Piece
from simulator.profile_fit import Gaps, Steps, fit_decode, fit_spread, seconds_of


@dataclass(frozen=True, slots=True)
class Decoding:
    """`pieces` and `spread` are of steps while no other worker does anything; while others do, steps take `busy` times
    as long, and differ by the factors of `busy_spread`.
    """

    pieces: tuple[Piece, ...]
    spread: tuple[float, ...]
    busy: float
    busy_spread: tuple[float, ...]


def beside_prompts(points: Sequence[Gaps], busy: Gaps) -> Decoding:
    """Of pools: `points` while none computed a prompt, `busy` while one did."""
    pieces = fit_decode(points)
    usual_s = seconds_of(piece_of(pieces, busy.rows), Steps(busy.rows, busy.context, 0.0))
    return Decoding(pieces, fit_spread(points), max(1.0, busy.mean / usual_s), fit_spread([busy]))


def beside_each_other(points: Sequence[Gaps], alone: Gaps) -> Decoding:
    """Of workers that do both: `points` while all of them decoded as many rows each, `alone` while one did, one row."""
    beside = min((one for one in points if one.rows == alone.rows), key=lambda one: one.context)
    busy = max(1.0, beside.mean / alone.mean)
    each = [replace(one, seconds=tuple(seconds / busy for seconds in one.seconds)) for one in points]
    return Decoding(fit_decode(each), fit_spread([alone]), busy, fit_spread(points))


def piece_of(pieces: Sequence[Piece], rows: float) -> Piece:
    """That is for so many rows."""
    return next((one for one in pieces if one.rows_below is None or rows < one.rows_below), pieces[-1])


def merged(gaps: Sequence[Gaps]) -> Gaps:
    """Of as many rows in all rounds."""
    return Gaps(gaps[0].rows, gaps[0].context, tuple(gap for one in gaps for gap in one.seconds))
