"""What `baton profile --live` makes of gaps between tokens: decode steps by themselves, and beside busy workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.profile import Busy, Piece
from simulator.profile_fit import Gaps, Steps, fit_decode, fit_spread, seconds_of


@dataclass(frozen=True, slots=True)
class Decoding:
    """`pieces` and `spread` are of steps while no other worker does anything. `beside_prompts`, `beside_decode`: what
    becomes of them while others compute prompts, or decode; None: this was not seen.
    """

    pieces: tuple[Piece, ...]
    spread: tuple[float, ...]
    beside_prompts: Busy
    beside_decode: Busy | None = None


def of_pools(points: Sequence[Gaps], busy: Gaps) -> Decoding:
    """`points` while no worker computed a prompt, `busy` while one did."""
    pieces = fit_decode(points)
    return Decoding(pieces, fit_spread(points), _beside(pieces, busy))


def of_workers_alike(points: Sequence[Gaps], alone: Gaps, busy: Gaps | None) -> Decoding:
    """Of workers that do both: `points` while all of them decoded as many rows each, `alone` while one did, one row,
    and `busy` while another one computed prompts; None: that was not seen, and they are thought of as decoding.
    """
    beside = min((one for one in points if one.rows == alone.rows), key=lambda one: one.context)
    longer = max(1.0, beside.mean / alone.mean)
    each = [replace(one, seconds=tuple(seconds / longer for seconds in one.seconds)) for one in points]
    pieces = fit_decode(each)
    decoding = Busy(factor=longer, spread=fit_spread(points))
    return Decoding(pieces, fit_spread([alone]), _beside(pieces, busy) if busy else decoding, decoding)


def _beside(pieces: tuple[Piece, ...], busy: Gaps) -> Busy:
    usual_s = seconds_of(piece_of(pieces, busy.rows), Steps(busy.rows, busy.context, 0.0))
    return Busy(factor=max(1.0, busy.mean / usual_s), spread=fit_spread([busy]))


def piece_of(pieces: Sequence[Piece], rows: float) -> Piece:
    """That is for so many rows."""
    return next((one for one in pieces if one.rows_below is None or rows < one.rows_below), pieces[-1])


def merged(gaps: Sequence[Gaps]) -> Gaps:
    """Of as many rows in all rounds."""
    return Gaps(gaps[0].rows, gaps[0].context, tuple(gap for one in gaps for gap in one.seconds))
