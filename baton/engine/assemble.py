"""From a plan to the tensors of one forward."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch

from baton.engine.batch import Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.engine.backend import ModelBackend
    from baton.engine.scheduler import Work


def assemble(work: Sequence[Work], tokens: Sequence[list[int]], backend: ModelBackend) -> Batch:
    """The batch for `work`; `tokens[i]` are all known tokens of its i-th sequence."""
    block_size = backend.layout.block_size
    starts = np.array([item.sequence.computed for item in work])
    counts = np.array([item.count for item in work])
    tables = _tables([item.sequence.allocation.blocks if item.sequence.allocation else [] for item in work])
    ends = counts.cumsum()
    sequence = np.arange(len(work)).repeat(counts)
    positions = np.arange(ends[-1]) - (ends - counts - starts)[sequence]
    slots = tables[sequence, positions // block_size].astype(np.int64) * block_size + positions % block_size
    new = [known[start : start + count] for known, start, count in zip(tokens, starts, counts, strict=True)]
    rows = ends[[item.completes for item in work]] - 1
    return Batch(
        token_ids=torch.tensor(list(chain.from_iterable(new)), dtype=torch.int64).to(backend.device),
        positions=torch.from_numpy(positions).to(backend.device),
        slot_mapping=torch.from_numpy(slots).to(backend.device),
        query_lens=counts.tolist(),
        context_lens=(starts + counts).tolist(),
        query_starts=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)).to(backend.device),
        kv_lens=torch.from_numpy((starts + counts).astype(np.int32)).to(backend.device),
        block_tables=torch.from_numpy(tables).to(backend.device),
        logit_rows=torch.from_numpy(rows).to(backend.device),
    )


def _tables(blocks: Sequence[list[int]]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    tables = np.zeros((len(blocks), max(len(row) for row in blocks)), dtype=np.int32)
    for i, row in enumerate(blocks):
        tables[i, : len(row)] = row
    return tables
