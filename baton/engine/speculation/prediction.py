"""Proposals of a checkpoint's own layer for multi-token prediction, from the rows that the model just computed.

The row of position i and token i + 1 give token i + 2. The layer's own results take the place of rows for the proposals
behind the first. Its KV is a cache of this worker alone. It begins with the first row that a speculative step computes,
so a handoff carries nothing of it, and rows of other steps are missing. Entries have the rotations of their positions,
so missing ones only make proposals worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.engine.determinism.checks import FixedRow
from baton.engine.models.decoder import PredictionHead
from baton.engine.models.loading import TransformerBackend
from baton.engine.sampling.logits import Row
from baton.engine.speculation.draft import DraftModel, DraftSource
from baton.engine.speculation.proposer import Source

KEPT = 64  # rows without proposals behind them; more would only help the next proposal


class PredictionSource(DraftSource):
    """Entries of one sequence in the cache, and `rows` [n, hidden] of positions from `first` on, which follow them."""

    __slots__ = ("entries", "first", "last", "read", "rows")

    def __init__(self, tokens: Sequence[int], row: Row, longest: int) -> None:
        super().__init__(tokens, row, longest)
        self.entries = self.first = self.read = 0  # `read` rows have entries behind the final ones
        self.rows: Tensor | None = None
        self.last: Tensor | None = None  # [1, hidden]: the row of the last proposal

    @property
    def fresh(self) -> int:
        """Number of rows whose next token is known, or 0 if some are missing."""
        known = len(self.tokens) - 1 - self.first
        return known if self.rows is not None and known <= len(self.rows) else 0

    @property
    def places(self) -> int:
        return self.entries + self.fresh

    @property
    def is_read(self) -> bool:
        return True

    def available(self, limit: int) -> int:
        return max(0, min(limit, self._longest - len(self.tokens))) if self.fresh else 0

    def settle(self) -> None:
        """Do nothing, because `add` forgets rejected positions."""

    def drop(self) -> list[int]:
        self.entries = self.read = 0
        return super().drop()

    def add(self, rows: Tensor) -> None:
        """Add the rows of a step, the first of which is that of the last known token."""
        fresh, end = self.fresh, len(self.tokens) - 1 + len(rows)
        done = min(self.read, fresh)
        self.entries, self.read = self.entries + done, 0
        if self.rows is not None and fresh:
            rows = torch.cat((self.rows[done:fresh], rows))[-KEPT:]
        self.first, self.rows = end - len(rows), rows

    def next(self, ahead: list[int]) -> tuple[FixedRow, range, Tensor]:
        """Return tokens and entries, positions and rows of the layer's next input, behind the proposals `ahead`."""
        if not ahead:
            self.read = fresh = self.fresh
            new, start, place, rows = list(self.tokens[self.first + 1 :]), self.entries, self.first, self.rows
            assert rows is not None
            return FixedRow(new, start, self.blocks), range(place, place + fresh), rows[:fresh]
        behind = self.read + len(ahead) - 1
        assert self.last is not None
        place = self.first + behind
        return FixedRow(ahead[-1:], self.entries + behind, self.blocks), range(place, place + 1), self.last


class PredictionModel(DraftModel):
    """The layer of one engine's model. Call `reserve` before the first proposal."""

    name, follows, kind = "mtp", True, PredictionSource

    def __init__(self, backend: TransformerBackend, head: PredictionHead) -> None:
        super().__init__(replace(backend, layout=replace(backend.layout, layers=1)))
        self._head = head

    def read(self, sources: Sequence[Source]) -> None:
        """Do nothing, because there is nothing to read before the rows of a step."""

    def computed(self, sources: Sequence[Source], counts: Sequence[int]) -> None:
        parts = self._head.model.hidden.clone().split_with_sizes(list(counts))
        for source, rows in zip(sources, parts, strict=True):
            assert isinstance(source, PredictionSource)
            source.add(rows)

    def _step(self, sources: Sequence[DraftSource], found: dict[int, list[int]]) -> list[int | None]:
        mine = [source for source in sources if isinstance(source, PredictionSource)]
        rows, spans, hidden = zip(*(each.next(found.get(id(each), [])) for each in mine), strict=True)
        positions = torch.tensor([position for span in spans for position in span])
        batch = self.batch_of(rows, range(len(rows)))
        logits, last = self._head.forward(replace(batch, positions=positions), torch.cat(hidden), self._kv)
        for at, each in enumerate(mine):
            each.last = last[at : at + 1].clone()
        return self.drawn(logits, mine, found)
