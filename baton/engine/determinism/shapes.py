"""Shapes of the forwards for deterministic requests (docs/design/determinism.md).

A row has the same bits in every slot of one fixed shape, whatever the other rows are. So prompts are computed on a
grid, each chunk in its own forward, and output tokens are drawn from verify passes of exactly `rows` x `tokens`. Tokens
that the ordinary batch drew are candidates until then. Some kernels give a row the same bits in every shape up to
`exact_rows` rows. There a decode step with final KV is *exact*: its token needs no verification. Products of integers
give the same bits in every shape. Then every forward is exact, and deterministic requests need none of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.engine.sampling.output import OutputState


SHORT, SHORT_UNTIL = 64, 256  # short chunks first, because a prompt is padded to whole chunks


@dataclass(frozen=True, slots=True)
class FixedShapes:
    """Verify passes of `rows` (G) x `tokens` (W). Constant for a worker's life, because bits depend on them."""

    rows: int = 2
    tokens: int = 32
    exact_rows: int = 0  # decode steps of up to so many rows give the bits of a verify pass; 0 means none
    everywhere: bool = False  # every forward gives those bits, so prompts leave the grid and no pass is planned
    stalls: bool = False  # for comparisons: verify immediately, even if others wait

    def __post_init__(self) -> None:
        if self.rows < 1 or self.tokens < 2 or self.rows * self.tokens % 32:
            text = "a verify pass needs at least 1 row and 2 tokens, and a multiple of 32 tokens in total"
            raise ValueError(f"{text}, got {self.rows} x {self.tokens}")

    @property
    def largest(self) -> int:
        return max(SHORT_UNTIL, self.rows * self.tokens)

    @staticmethod
    def chunk(position: int) -> range:
        """Return the positions of the grid chunk that contains `position`."""
        size = SHORT if position < SHORT_UNTIL else SHORT_UNTIL
        start = position // size * size
        return range(start, start + size)


class CandidateTokens:
    """Prompt, verified output and candidates (`tokens`) of one request. It is `stopped` if the next token is an end or
    cannot be drawn. Stop strings are left to `OutputState`; candidates behind one are wasted.
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
        """Add a candidate. None, or a token that ends the request by id, is left to the verify pass."""
        if token_id is None or self._choice.ends_by_id(token_id) is not None:
            self.stopped = True
            return
        self.stopped = False  # a verified token followed
        self.tokens.append(token_id)
        self.row.advance(token_id)
