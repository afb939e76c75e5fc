"""A batch as numbers: what rank 0 tells the others before each forward.

    lengths, on the host           N, B, W, L, fixed, query_lens, context_lens
    body, where the batch lies     token_ids, positions, slot_mapping, logit_rows, query_starts, kv_lens, block_tables

No pickle: sizes come first, and what is sent is one tensor of int64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from baton.engine.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor


def lengths(batch: Batch) -> list[int]:
    """All that the host must know: 5 + 2 B numbers."""
    rows, width = batch.block_tables.shape
    counts = [len(batch.token_ids), rows, width, len(batch.logit_rows), int(batch.fixed)]
    return [*counts, *batch.query_lens, *batch.context_lens]


def body(batch: Batch) -> Tensor:
    """The tensors, one after another, int64."""
    wide = (batch.token_ids, batch.positions, batch.slot_mapping, batch.logit_rows)
    return torch.cat((*wide, batch.query_starts.long(), batch.kv_lens.long(), batch.block_tables.long().flatten()))


def unpack(numbers: list[int], tensors: Tensor) -> Batch:
    """The batch of `lengths` and `body`; it keeps views of the body."""
    tokens, rows, width, wanted, fixed = numbers[:5]
    sizes = [tokens, tokens, tokens, wanted, rows + 1, rows, rows * width]
    ids, positions, slots, logit_rows, starts, lens, tables = torch.split(tensors, sizes)
    return Batch(
        token_ids=ids,
        positions=positions,
        slot_mapping=slots,
        query_lens=numbers[5 : 5 + rows],
        context_lens=numbers[5 + rows : 5 + 2 * rows],
        query_starts=starts.int(),
        kv_lens=lens.int(),
        block_tables=tables.int().view(rows, width),
        logit_rows=logit_rows,
        fixed=bool(fixed),
    )
