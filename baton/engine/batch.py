"""One forward's worth of work: any mix of prompt chunks and decode rows, flattened to one row per new token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(slots=True, eq=False)
class Injection:
    """What goes into a forward of a model that thinks, and what comes out of it beside logits.

    states  [N, hidden_size]  of the model's dtype; added to each row behind layer `input_layer`
    rows    int64 [M]         the rows whose hidden rows are wanted; None: none
    hidden  [M, hidden_size]  these, behind layer `output_layer`: written by the forward
    """

    states: Tensor
    rows: Tensor | None = None
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """N new tokens of B sequences, the tokens of one sequence side by side, in the order of their positions.

    token_ids     int64 [N]
    positions     int64 [N]   from 0, within the sequence
    slot_mapping  int64 [N]   where the token's K and V go: block * block_size + offset
    query_lens    B lengths that sum to N; each at least 1 (on the host)
    context_lens  B lengths: KV positions that are valid once this forward has written its own (on the host)
    query_starts  int32 [B + 1]   first row of each sequence, and N
    kv_lens       int32 [B]       `context_lens`, on the device
    block_tables  int32 [B, max_blocks], padded with 0
    logit_rows    int64 [L]   the rows of N whose logits are wanted
    on_layer      called with the number of each layer as soon as its K and V are written; on a GPU, issued to be
    thinking      of a model that thinks
    fixed         of a shape of `FixedShapes`: a row's bits may depend on its position and what is before it alone
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_lens: list[int]
    context_lens: list[int]
    query_starts: Tensor
    kv_lens: Tensor
    block_tables: Tensor
    logit_rows: Tensor
    on_layer: Callable[[int], None] | None = None
    fixed: bool = False
    thinking: Injection | None = None
