"""Interface between the engine and a model. The transformer and the oracle implement it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from baton.core import KVLayout
    from baton.engine.batch import Batch
    from baton.engine.kv_cache import KVCache
    from baton.engine.models.thinking import Thinker


class ModelBackend(Protocol):
    """A model that keeps its state in paged KV and nowhere else. Used by one thread at a time.

    `nondeterminism` is the known reason why bits of its fixed forwards vary, in words, or "" if they do not.
    `baton.engine.determinism.checks` tests this at startup. `thinker` is set if the model thinks about its prompts.
    """

    nondeterminism: str
    thinker: Thinker | None

    @property
    def name(self) -> str:
        """Model name, for people."""

    @property
    def layout(self) -> KVLayout:
        """Shape of the KV cache that `forward` takes."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits; token ids are below it."""

    @property
    def max_model_len(self) -> int:
        """Largest number of positions of a sequence, prompt and output together."""

    @property
    def device(self) -> torch.device:
        """Device of the KV cache and of a batch's tensors."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of weights, dtype and layout. Workers with equal ones can use each other's KV."""

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
