"""The shapes in which deterministic requests are computed, so that no result depends on what else is computed.

A row of a forward has the same bits in every slot of one fixed shape, whatever the other rows are; between shapes it
has not. So their prompts are computed on a grid, each chunk in a forward of its own, and their output tokens are drawn
from verify passes of exactly `rows` x `tokens`. All of it is a function of positions alone.

Some kernels give a row the same bits in every shape up to some size. There a decode step may be *exact* (`exact_rows`):
what it computes is what a verify pass would, so that none is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

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
