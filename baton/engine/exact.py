"""Decode steps that are computed as a verify pass would: their tokens of deterministic requests are final at once.

Where the kernels give a row the same bits in every shape up to `FixedShapes.exact_rows` rows (`selfcheck.py` looks), a
decode row in a fixed forward reads final KV, writes final KV, and draws the verified token. So no candidate comes into
being, and nothing is left to verify. Who has candidates all the same, or tokens to replay, goes on by verify passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from baton.engine.sequence import Work


class Part(NamedTuple):
    """What one forward computes; `exact`: in a fixed one."""

    work: list[Work]
    exact: bool


def parts(work: list[Work], rows: int) -> list[Part]:
    """The forwards of an ordinary batch: one, but where that would not be exact and somebody needs it to be so.

    Decode rows of others fill the exact ones up to `rows`; prompts, and who does not fit, have a forward of their own.
    """
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


def _final(item: Work) -> bool:
    """Whether all that it reads is final, so that what it writes and draws may be."""
    return item.count == 1 and item.sequence.confirmed
