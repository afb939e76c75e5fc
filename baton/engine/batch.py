"""Input of one forward: any mix of prompt chunks and decode sequences, flattened to one row per new token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(slots=True, eq=False)
class Injection:
    """Additional input and output of a forward of a model that thinks.

    states  [N, hidden_size]  the model's dtype; added to each row after layer `input_layer`
    rows    int64 [M]         rows with wanted hidden states, or None
    hidden  [M, hidden_size]  these hidden states after layer `output_layer`; the forward writes them
    """

    states: Tensor
    rows: Tensor | None = None
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """N new tokens of B sequences. Tokens of one sequence are adjacent and in the order of their positions.

    token_ids     int64 [N]
    positions     int64 [N]   from 0, within the sequence
    slot_mapping  int64 [N]   slot of the token's K and V: block * block_size + offset
    query_lens    B lengths that sum to N; each at least 1 (on the host)
    context_lens  B lengths: KV positions that are valid after this forward's own writes (on the host)
    query_starts  int32 [B + 1]   first row of each sequence, and N
    kv_lens       int32 [B]       `context_lens`, on the device
    block_tables  int32 [B, max_blocks], padded with 0
    logit_rows    int64 [L]   the rows of N with wanted logits
    on_layer      called with each layer's number once its K and V are written (on a GPU: once the writes are issued)
    thinking      set if the model thinks
    fixed         the shape is one of `FixedShapes`: a row's bits depend only on its position and the tokens before it
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
