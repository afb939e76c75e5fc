"""A rank's part of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.engine.model.build import load_model
from baton.engine.tp.shard import ShardedParts, ShardedWeights, divided

if TYPE_CHECKING:
    import torch

    from baton.engine.kernels.base import Kernels
    from baton.engine.model.build import TransformerBackend
    from baton.engine.model.config import ModelConfig
    from baton.engine.model.layers import Parts
    from baton.engine.model.loader import Checkpoint, Progress
    from baton.engine.tp.ranks import Plan, Ranks


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Implements `baton.engine.model.build.Split` for one rank."""

    plan: Plan
    ranks: Ranks

    @property
    def names_the_model(self) -> bool:
        return self.ranks.rank == 0

    def config(self, whole: ModelConfig) -> ModelConfig:
        return divided(whole, self.plan.size, self.plan.key)

    def parts(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> Parts:
        weights = ShardedWeights(checkpoint, dtype, device, self.ranks.rank, self.plan.size)
        return ShardedParts(weights, kernels, self.ranks.exchange)


def load_rank(plan: Plan, ranks: Ranks, progress: Progress | None = None) -> TransformerBackend:
    """The model of this rank. Its layout and fingerprint are those of the whole. Raises as `load_model`."""
    return load_model(
        plan.folder,
        dtype=plan.dtype,
        device=ranks.device,
        block_size=plan.block_size,
        max_model_len=plan.max_model_len,
        progress=progress,
        split=Split(plan, ranks),
        attention_splits=plan.splits,
    )
