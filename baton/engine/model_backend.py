"""Interface between the engine and a model, which the transformer and the oracle implement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from baton.core import KVLayout
from baton.engine.kv_cache import KVCache

if TYPE_CHECKING:
    from baton.engine.models.thinking import Thinker


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


class ModelBackend(Protocol):
    """A model that keeps its state in paged KV and nowhere else. Used by one thread at a time.

    `nondeterminism` is the known reason why bits of its fixed forwards vary, in words, or "" if they do not.
    `baton.engine.determinism.checks` tests this at startup. `thinker` is set if the model thinks about its prompts.
    """

    name: str  # for people
    layout: KVLayout  # of the cache that `forward` takes
    vocab_size: int  # width of the logits
    max_model_len: int  # limit of a sequence, prompt and output together
    device: torch.device  # of the cache and of a batch's tensors
    fingerprint: str  # of weights, dtype and layout; workers with equal ones can use each other's KV
    nondeterminism: str
    thinker: Thinker | None

    def facts(self, rows: Sequence[int]) -> tuple[str, ...]:
        """Return what else the bits of fixed forwards depend on: kernels used for each of `rows`, and number of ranks.
        Not included are `fingerprint`, torch, threads and the device.
        """

    def steady_rows(self) -> int:
        """Return up to how many rows fixed forwards give a row the same bits in every shape, or 0. This follows from
        how the kernels work; `baton.engine.determinism.checks` tests it.
        """

    def make_cache(self, total_blocks: int) -> KVCache:
        """Create the cache that `forward` takes, with finite values. The previous one must not be used again."""

    def forward(self, batch: Batch, kv: KVCache) -> torch.Tensor:
        """Write the batch's K and V through `slot_mapping`, then return logits, float32 [L, vocab_size]."""

    def check(self) -> None:
        """Raise RankLost if the model can no longer be computed. Called between steps."""

    def close(self) -> None:
        """Stop everything else that computes for the model, if anything does. This is the last call."""
