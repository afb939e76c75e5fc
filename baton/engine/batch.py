"""Input of one forward: any mix of prompt chunks and decode sequences, flattened to one row per new token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Listener = Callable[[int], None]


@dataclass(slots=True, eq=False)
class Injection:
    """Additional input and output of a forward of a model that thinks."""

    states: Tensor  # [N, hidden_size], the model's dtype; added to each row after layer `input_layer`
    rows: Tensor | None = None  # int64 [M]: rows with wanted hidden states
    hidden: Tensor | None = None  # [M, hidden_size]: these after layer `output_layer`; the forward sets it


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """States of the sequences of a batch that recurrent layers read and update: rows `slots` of `memory`."""

    memory: Tensor  # float32 [all slots, state_size]
    slots: list[int]  # B different ones, except in a check of bits, whose other sequences share one
    counts: list[int]  # new tokens of each
    index: Tensor  # int64 [B]: `slots` on the device
    starts: list[int] | None = None  # the first row of each sequence, in a batch with padding between them
    fixed: bool = False  # the batch is; `counts` are then without padding
    on_grid: bool = False  # it is a chunk of one prompt, in whole chunks of the recurrent layers

    @property
    def single(self) -> bool:
        """Whether each row is the one token of a sequence."""
        return self.starts is None and max(self.counts) == 1


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """N new tokens of B sequences. Tokens of one sequence are adjacent and in the order of their positions.
    If it is `fixed`, its shape is one of `FixedShapes`: a row's bits depend only on its position and the tokens before.
    """

    token_ids: Tensor  # int64 [N]
    positions: Tensor  # int64 [N], from 0, within the sequence
    slot_mapping: Tensor  # int64 [N]: slot of the token's K and V: block * block_size + offset
    query_lens: list[int]  # B lengths that sum to N; each at least 1
    context_lens: list[int]  # B lengths: KV positions that are valid after this forward's own writes
    query_starts: Tensor  # int32 [B + 1]: first row of each sequence, and N
    kv_lens: Tensor  # int32 [B]: `context_lens`, on the device
    block_tables: Tensor  # int32 [B, max_blocks], padded with 0
    logit_rows: Tensor  # int64 [L]: the rows of N with wanted logits, in ascending order, each once
    on_layer: Listener | None = None  # called with each layer once its K and V are written, or issued
    fixed: bool = False
    sensitive: bool = False  # for checks: indexers select by the last bits of scores, so that other bits show
    thinking: Injection | None = None  # set if the model thinks
    states: StateRows | None = None  # set if the model has recurrent layers
