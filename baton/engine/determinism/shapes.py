"""Decode steps that are computed as a verify pass would: their tokens of deterministic requests are final at once.

Where the kernels give a row the same bits in every shape up to `FixedShapes.exact_rows` rows (`selfcheck.py` looks), a
decode row in a fixed forward reads final KV, writes final KV, and draws the verified token. So no candidate comes into
being, and nothing is left to verify. Who has candidates all the same, or tokens to replay, goes on by verify passes.

Candidates of a deterministic request: what the ordinary batch drew, until a verify pass has drawn it again.

The shapes in which deterministic requests are computed, so that no result depends on what else is computed.

A row of a forward has the same bits in every slot of one fixed shape, whatever the other rows are; between shapes it
has not. So their prompts are computed on a grid, each chunk in a forward of its own, and their output tokens are drawn
from verify passes of exactly `rows` x `tokens`. All of it is a function of positions alone.

Some kernels give a row the same bits in every shape up to some size. There a decode step may be *exact* (`exact_rows`):
what it computes is what a verify pass would, so that none is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from baton.engine.choice import OutputState
    from baton.engine.sequence import ScheduledSequence


class CandidateTokens:
    """`tokens` are prompt, verified output and candidates. `ended`: by what is known here, nothing follows the last,
    since the next one ends the request by its id, or is none (`stopped`), or since there is no room for more.

    Stop strings are left to the choice itself: candidates behind one are drawn in vain, and text is made once.
    """

    def __init__(self, choice: OutputState) -> None:
        self.tokens = list(choice.tokens)
        self.row = choice.row.copy()
        self._choice = choice
        self.stopped = False

    @property
    def ended(self) -> bool:
        guide = self.row.guide
        full = self.row.produced >= self._choice.max_output or (guide is not None and (guide.complete or guide.broken))
        return self.stopped or full

    def push(self, token_id: int | None) -> None:
        """One more candidate; None, or one that ends the request by its id, is for the verify pass to find out."""
        if token_id is None or self._choice.ends_by_id(token_id) is not None:
            self.stopped = True
            return
        self.stopped = False  # a verify pass knows better
        self.tokens.append(token_id)
        self.row.advance(token_id)


class Part(NamedTuple):
    """What one forward computes; `exact`: in a fixed one."""

    work: list[ScheduledSequence]
    exact: bool


def split_exact(work: list[ScheduledSequence], rows: int) -> list[Part]:
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


def _final(item: ScheduledSequence) -> bool:
    """Whether all that it reads is final, so that what it writes and draws may be."""
    return item.count == 1 and item.sequence.confirmed


SHORT, SHORT_UNTIL = 64, 256  # a short prompt is not padded to a long chunk


@dataclass(frozen=True, slots=True)
class FixedShapes:
    """`rows` G and `tokens` W of a verify pass; constant for a worker's life, and part of what its bits depend on."""

    rows: int = 2
    tokens: int = 32
    exact_rows: int = 0  # a decode step of at most so many rows gives the bits of a verify pass; 0: none does
    stalls: bool = False  # to compare with: verify at once, whatever waits for it

    def __post_init__(self) -> None:
        if self.rows < 1 or self.tokens < 2 or self.rows * self.tokens % 32:
            text = "verify passes need 1 row, 2 tokens, and a multiple of 32 tokens in all"
            raise ValueError(f"{text}, got {self.rows} x {self.tokens}")

    @property
    def largest(self) -> int:
        """The most tokens that any of these forwards has."""
        return max(SHORT_UNTIL, self.rows * self.tokens)

    @staticmethod
    def chunk(position: int) -> range:
        """The positions of the grid's chunk that `position` is in."""
        size = SHORT if position < SHORT_UNTIL else SHORT_UNTIL
        start = position // size * size
        return range(start, start + size)
