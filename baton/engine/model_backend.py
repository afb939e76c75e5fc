"""What the engine asks of a model: the transformer and the oracle both answer it."""

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
    """A model that keeps its state in paged KV and nowhere else. One thread at a time.

    `nondeterminism`: why the bits of its fixed forwards depend on more than they may, in words, as far as is known
    (`baton.engine.determinism.checks` looks when a worker has loaded it); "": they do not.
    `thinker`: what a model that thinks about its prompts does that with.
    """

    nondeterminism: str
    thinker: Thinker | None

    @property
    def name(self) -> str:
        """The model's name, for people."""

    @property
    def layout(self) -> KVLayout:
        """The shape of the KV cache that `forward` takes."""

    @property
    def vocab_size(self) -> int:
        """The width of the logits; token ids are below it."""

    @property
    def max_model_len(self) -> int:
        """The most positions a sequence may have, prompt and output together."""

    @property
    def device(self) -> torch.device:
        """Where the tensors of a batch and the KV cache live."""

    @property
    def fingerprint(self) -> str:
        """Equal on two workers only if KV written by one is right for the other: weights, dtype, layout."""

    def facts(self, rows: Sequence[int]) -> tuple[str, ...]:
        """What the bits of fixed forwards depend on beside `fingerprint`, torch, threads and the device.

        That is the kernels that layers take for so many rows, and how many ranks there are.
        """

    def steady_rows(self) -> int:
        """Fixed forwards of at most so many rows give a row the same bits however many there are; 0: they may not.

        By the way its kernels work: `baton.engine.determinism.checks` looks whether it is so.
        """

    def make_cache(self, total_blocks: int) -> KVCache:
        """The cache that `forward` takes, finite everywhere; the one before it must not be used any more."""

    def forward(self, batch: Batch, kv: KVCache) -> torch.Tensor:
        """Write the batch's K and V through `slot_mapping`, then return logits, float32 [L, vocab_size]."""

    def check(self) -> None:
        """Looked at between steps: raises RankLost if the model cannot be computed any more."""

    def close(self) -> None:
        """End what else computes for it, if anything does. The last call."""
