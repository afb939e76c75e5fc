"""Interface between the engine and a model, which the transformer and the oracle implement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from baton.core import KVLayout
from baton.engine.batch import Batch
from baton.engine.kv_cache import KVCache
from baton.engine.models.thinking import Thinker


class ModelBackend(Protocol):
    """A model that keeps its state in paged KV and nowhere else. Used by one thread at a time."""

    name: str  # for people
    layout: KVLayout  # of the cache that `forward` takes
    vocab_size: int  # width of the logits
    max_model_len: int  # limit of a sequence, prompt and output together
    device: torch.device  # of the cache and of a batch's tensors
    fingerprint: str  # of weights, dtype and layout; workers with equal ones can use each other's KV
    nondeterminism: str  # known reason why bits of its fixed forwards vary, or ""
    thinker: Thinker | None  # set if the model thinks about its prompts

    def facts(self, rows: Sequence[int]) -> tuple[str, ...]:
        """Return what else the bits of fixed forwards depend on: the kernels for `rows`, and the number of ranks."""

    def steady_rows(self) -> int:
        """Return up to how many rows the kernels give a row the same bits in every fixed shape (tested at startup)."""

    def make_cache(self, total_blocks: int) -> KVCache:
        """Create the cache that `forward` takes, with finite values. The previous one must not be used again."""

    def forward(self, batch: Batch, kv: KVCache) -> torch.Tensor:
        """Write the batch's K and V through `slot_mapping`, then return logits, float32 [L, vocab_size]."""

    def check(self) -> None:
        """Raise RankLost if the model can no longer be computed. Called between steps."""

    def close(self) -> None:
        """Stop everything else that computes for the model, if anything does. This is the last call."""
