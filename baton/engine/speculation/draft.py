"""Proposals of a small model with the vocabulary of the large one. Its KV is a cache of this worker alone.

It draws with the noise of the request's next positions. If its distribution is that of the large model, it draws the
same tokens, at any temperature. Its KV follows the known tokens lazily: positions of rejected proposals are computed
again, and a prompt is read in slices. A sequence that loses its blocks to others begins from its first token.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from baton.core import KVLayout
from baton.engine.batch import Batch
from baton.engine.determinism.checks import FixedRow, fixed_batch
from baton.engine.kernels.select import fused_draw
from baton.engine.kv_cache import KVCache
from baton.engine.model_backend import ModelBackend
from baton.engine.sampling.logits import Row
from baton.engine.sampling.sampler import Sampler
from baton.engine.speculation.proposer import Proposer, Source

SLICE = 256  # known tokens that one step reads for a sequence


class DraftSource(Source):
    """The KV of one sequence in the small model: `computed` positions in `blocks`, of which proposals may be wrong."""

    __slots__ = ("__weakref__", "_longest", "base", "blocks", "computed", "proposed", "row", "tokens")

    def __init__(self, tokens: Sequence[int], row: Row, longest: int) -> None:
        self.tokens, self.row, self._longest = tokens, row, longest
        self.blocks: list[int] = []
        self.computed = self.base = 0
        self.proposed: list[int] = []  # behind `base` tokens

    def available(self, limit: int) -> int:
        return max(0, min(limit, self._longest - len(self.tokens))) if self.unread <= SLICE else 0

    @property
    def unread(self) -> int:
        """Number of known tokens without KV."""
        return len(self.tokens) - self.computed

    @property
    def needs_reading(self) -> bool:
        """Whether more known tokens lack KV than one step computes, and proposals may follow them."""
        return self.unread > SLICE and len(self.tokens) < self._longest

    @property
    def places(self) -> int:
        """Number of entries of the cache that the known tokens need."""
        return len(self.tokens)

    @property
    def is_read(self) -> bool:
        """Whether the last step computed the row of the next draw."""
        return self.unread <= 0

    def settle(self) -> None:
        """Forget the positions whose tokens were rejected."""
        right = 0
        for token, known in zip(self.proposed, self.tokens[self.base : self.base + len(self.proposed)], strict=False):
            if token != known:
                break
            right += 1
        right = self.base + right if self.proposed else self.computed
        self.computed = min(self.computed, right, len(self.tokens) - 1)  # the last token is computed for its logits
        self.proposed = []

    def drop(self) -> list[int]:
        """Return the blocks, which others take."""
        freed, self.computed, self.proposed = list(self.blocks), 0, []
        self.blocks.clear()
        return freed

    def noise(self, ahead: int) -> Row:
        """Return the row of a later draw, with its position and filters, but without rules that depend on tokens."""
        row = copy(self.row)
        row.seen, row.guide, row.bad_words = None, None, ()
        return row.at(ahead)


class DraftModel(Proposer):
    """The small model of one engine. Call `reserve` before the first proposal."""

    name, cheap = "draft", False
    kind = DraftSource

    def __init__(self, backend: ModelBackend) -> None:
        self.backend = backend
        self._sampler = Sampler(fused_draw(backend.device))
        self._free: list[int] = []
        self._used: list[weakref.ref[DraftSource]] = []  # the least recently used first
        self._kv: KVCache

    def reserve(self, total_blocks: int, layout: KVLayout) -> int:
        """Make a cache for as many tokens as remain for the large model."""
        blocks = shared_blocks(total_blocks, layout, self.backend.layout)
        self._kv, self._free = self.backend.make_cache(blocks), list(range(blocks))
        return blocks

    def begin(self, tokens: Sequence[int], row: Row) -> DraftSource:
        source = self.kind(tokens, row, self.backend.max_model_len)
        weakref.finalize(source, self._free.extend, source.blocks)
        return source

    @torch.inference_mode()
    def propose(self, sources: Sequence[Source], counts: Sequence[int]) -> list[list[int]]:
        """Return proposals. A sequence has none if the cache has too few blocks for it."""
        mine = [source for source in sources if isinstance(source, DraftSource)]
        ready = [(s, count) for s, count in zip(mine, counts, strict=True) if self._has_room(s, count, mine)]
        found: dict[int, list[int]] = {}
        rounds = 0
        while ready:
            drawn = iter(self._step([source for source, _ in ready], found))
            for source, _ in ready:
                if source.is_read and (token := next(drawn)) is not None:
                    found.setdefault(id(source), []).append(token)
            rounds += 1  # a sequence without a draw, because its logits are not finite, proposes no more
            ready = [(s, count) for s, count in ready if rounds == len(found.get(id(s), ())) < count]
        for source in mine:
            source.base, source.proposed = len(source.tokens), found.get(id(source), [])
        return [found.get(id(source), []) for source in mine]

    @torch.inference_mode()
    def read(self, sources: Sequence[Source]) -> None:
        """Read up to `SLICE` known tokens, of the sequences with the fewest unread ones first."""
        mine = [source for source in sources if isinstance(source, DraftSource)]
        left, reading = SLICE, list[DraftSource]()
        for source in sorted((each for each in mine if each.needs_reading), key=lambda each: each.unread):
            if left > 0 and self._has_room(source, 0, mine):
                reading.append(source)
                left -= SLICE
        if reading:
            self._step(reading, {})

    def _step(self, sources: Sequence[DraftSource], found: dict[int, list[int]]) -> list[int | None]:
        """Compute the next tokens of each sequence. Return draws for those that have no known token left."""
        rows = list[FixedRow]()
        for source in sources:
            ahead = found.get(id(source), [])
            new = [*source.tokens[source.computed : source.computed + SLICE], *ahead[-1:]]
            rows.append(FixedRow(new, source.computed, source.blocks))
            source.computed += len(new)
        drawing = [at for at, source in enumerate(sources) if source.is_read]
        logits = self.backend.forward(self.batch_of(rows, drawing), self._kv)
        return self.drawn(logits, [sources[at] for at in drawing], found)

    def batch_of(self, rows: Sequence[FixedRow], drawing: Sequence[int]) -> Batch:
        """Return the batch of these rows, with logits for the last token of those whose numbers are in `drawing`."""
        ends = list(accumulate(len(row.tokens) for row in rows))
        width = max(len(row.blocks) for row in rows)
        padded = [row._replace(blocks=row.blocks + [0] * (width - len(row.blocks))) for row in rows]
        wanted = [ends[at] - 1 for at in drawing]
        batch = fixed_batch(padded, wanted, self.backend.layout.block_size, self.backend.device)
        return replace(batch, fixed=False)

    def drawn(self, logits: Tensor, sources: Sequence[DraftSource], found: dict[int, list[int]]) -> list[int | None]:
        """Return the draws from `logits` [len(sources), vocab] with the noise of each next position."""
        noises = [source.noise(len(found.get(id(source), []))) for source in sources]
        return [each.token_id for each in self._sampler.sample(logits, noises)] if noises else []

    def _has_room(self, source: DraftSource, count: int, busy: list[DraftSource]) -> bool:
        """Return whether a sequence has blocks for its tokens and proposals. Takes those of idle sequences."""
        source.settle()
        self._used = [each for each in self._used if each() not in {None, source}] + [weakref.ref(source)]
        missing = self.backend.layout.blocks_for(source.places + count) - len(source.blocks)
        for each in list(self._used):
            other = each()
            if len(self._free) < missing and other is not None and all(other is not one for one in busy):
                self._free += other.drop()
        if len(self._free) < missing:
            return False
        source.blocks += [self._free.pop() for _ in range(missing)]
        return True


def shared_blocks(total: int, layout: KVLayout, small: KVLayout) -> int:
    """Return how many blocks of both models fit into the memory of `total` blocks of the large one."""
    return max(1, total * layout.block_bytes // (layout.block_bytes + small.block_bytes))
