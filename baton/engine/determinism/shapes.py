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


SHORT, SHORT_UNTIL = 128, 256  # short chunks first, because a prompt is padded to whole chunks
MOST = 64  # sequences of a pass whose windows have any lengths


@dataclass(frozen=True, slots=True)
class FixedShapes:
    """Verify passes of `rows` (G) x `tokens` (W). Constant for a worker's life, because bits depend on them. `ragged`
    means that bits depend on the product alone. W is then only the number of tokens at which a sequence is due.
    """

    rows: int = 2
    tokens: int = 32
    exact_rows: int = 0  # decode steps of up to so many rows give the bits of a verify pass; 0 means none
    everywhere: bool = False  # every forward gives those bits, so prompts leave the grid and no pass is planned
    ragged: bool = False  # windows of a pass may have any lengths, because only their total matters for bits
    stalls: bool = False  # for comparisons: verify immediately, even if others wait

    def __post_init__(self) -> None:
        if self.rows < 1 or self.tokens < 2 or self.rows * self.tokens % 32:
            text = "a verify pass needs at least 1 row and 2 tokens, and a multiple of 32 tokens in total"
            raise ValueError(f"{text}, got {self.rows} x {self.tokens}")

    @property
    def total(self) -> int:
        return self.rows * self.tokens

    @property
    def most(self) -> int:
        """Return the most sequences of a pass."""
        return min(self.total, MOST) if self.ragged else self.rows

    @property
    def largest(self) -> int:
        return max(SHORT_UNTIL, self.total)

    @staticmethod
    def chunk(position: int) -> range:
        """Return the positions of the grid chunk that contains `position`."""
        size = SHORT if position < SHORT_UNTIL else SHORT_UNTIL
        start = position // size * size
        return range(start, start + size)


class CandidateTokens:
    """Prompt, verified output and candidates (`tokens`) of one request. It is `stopped` if the next token is an end or
    cannot be drawn. Stop strings are left to `OutputState`; candidates behind one are wasted. `proposals` are expected
    behind the candidates. A pass that has tokens to spare takes them as candidates that no decode step drew.
    """

    def __init__(self, choice: OutputState) -> None:
        self.tokens = list(choice.tokens)
        self.row = choice.row.copy()
        self.row.with_margin = True
        self.proposals: list[int] = []
        self.drawn = len(self.tokens)  # tokens before those taken from proposals
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
            self.stopped, self.proposals = True, []
            return
        self.stopped = False  # a verified token followed
        self.proposals = self.proposals[1:] if self.proposals[:1] == [token_id] else []
        self.tokens.append(token_id)
        self.row.advance(token_id)
        self.drawn = len(self.tokens)

    def take_proposals(self, most: int) -> int:
        """Make up to `most` proposals candidates, without ends and constraints. Return their number."""
        drawn = self.drawn
        while len(self.tokens) - drawn < most and self.proposals and self._may_follow(self.proposals[0]):
            self.push(self.proposals[0])
        self.drawn = drawn
        return len(self.tokens) - drawn

    def _may_follow(self, token_id: int) -> bool:
        return not self.ended and self.row.guide is None and self._choice.ends_by_id(token_id) is None
