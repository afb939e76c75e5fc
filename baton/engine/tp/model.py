"""A rank's part of a model, and its heads of the KV cache."""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from baton.engine.kv import DTYPES, KVCache
from baton.engine.model.build import load_model
from baton.engine.tp.shard import ShardedParts, ShardedWeights, divided

if TYPE_CHECKING:
    from baton.core import KVLayout
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
    )


def rank_layout(layout: KVLayout, size: int) -> KVLayout:
    """What one of `size` ranks has of a cache."""
    return replace(layout, kv_heads=layout.kv_heads // size)


def rank_cache(plan: Plan, rank: int, layout: KVLayout, total_blocks: int) -> tuple[KVCache, KVCache]:
    """The cache that the engine sees, and what this rank's model sees of it. `layout` is that of the whole model.

    On a CPU one piece of shared memory holds the KV of all heads, and a rank sees its own: so a handoff is the same
    whatever the number of ranks at either end. On GPUs each rank has a cache of its own, and both are that one.
    """
    own = rank_layout(layout, plan.size)
    if plan.kv < 0:
        cache = KVCache(own, total_blocks, plan.device_of(rank))
        return cache, cache
    shape = (len(layout.tensors), layout.layers, total_blocks, layout.block_size, layout.kv_heads, layout.head_dim)
    count = math.prod(shape)
    nbytes = count * layout.itemsize
    if rank == 0 and os.fstat(plan.kv).st_size < nbytes:
        os.ftruncate(plan.kv, nbytes)
    memory = mmap.mmap(plan.kv, nbytes)
    tensors = list(torch.frombuffer(memory, dtype=DTYPES[layout.dtype], count=count).view(shape))
    heads = [tensor.narrow(3, rank * own.kv_heads, own.kv_heads) for tensor in tensors]
    return KVCache(layout, total_blocks, storage=tensors), KVCache(own, total_blocks, storage=heads)
