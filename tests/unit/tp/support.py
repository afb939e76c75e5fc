"""Caches of ranks in main memory, with known bytes at each place."""

from dataclasses import replace
from typing import Any

import torch

from baton.core import KVLayout
from baton.engine.kv_cache import KVCache
from baton.engine.tp.kv_memory import ShardedCache, rank_layout
from baton.engine.tp.sharding import Heads
from tests.support.transports import Log, MainMemory

POISON = float("nan")
GQA = KVLayout(layers=5, kv_heads=8, head_dim=3, block_size=4, dtype="float32")
LATENT = KVLayout(layers=5, kv_heads=1, head_dim=6, block_size=4, dtype="float32", tensors=("latent",))
LAYOUTS = (GQA, replace(GQA, kv_heads=2), replace(GQA, kv_heads=1), replace(GQA, dtype="bfloat16"), LATENT)


def poisoned(layout: KVLayout, size: int, total_blocks: int) -> ShardedCache:
    """Return a cache full of NaN."""
    ranks = [KVCache(rank_layout(layout, size), total_blocks) for _ in range(size)]
    for tensor in (tensor for cache in ranks for tensor in cache.tensors):
        tensor.fill_(POISON)
    return ShardedCache(layout, ranks)


def whole(layout: KVLayout, tokens: int, seed: int) -> torch.Tensor:
    """Return KV of a sequence, all heads: [layers, tensors, tokens, kv_heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.layers, len(layout.tensors), tokens, layout.kv_heads, layout.head_dim)
    return torch.randn(shape, generator=generator).to(getattr(torch, layout.dtype))


def put(cache: ShardedCache, blocks: list[int], kv: torch.Tensor) -> None:
    """Write a sequence like the ranks' models: position by position, each rank its own heads."""
    size, heads = cache.layout.block_size, Heads(cache.layout.kv_heads, len(cache.ranks))
    for rank, own in enumerate(cache.ranks):
        held = heads.held(rank)
        for n, tensor in enumerate(own.tensors):
            for position in range(kv.shape[2]):
                here = kv[:, n, position, held.start : held.stop]
                tensor[:, blocks[position // size], position % size] = here


def wire_of(kv: torch.Tensor, layers: range, begin: int, end: int) -> torch.Tensor:
    """Return the wire's bytes of a part of a sequence, as they are defined."""
    return kv[layers.start : layers.stop, :, begin:end].contiguous().view(torch.uint8).flatten()


def same(a: ShardedCache, b: ShardedCache) -> bool:
    """Return whether all ranks have the same bits everywhere, NaNs included."""
    left, right = ([t.view(torch.uint8) for rank in cache.ranks for t in rank.tensors] for cache in (a, b))
    return len(left) == len(right) and all(map(torch.equal, left, right))


def gpus(size: int) -> tuple[list[Any], Log]:
    """Return one GPU for each rank, made of main memory, and the log of its events."""
    log: Log = []
    return [MainMemory(rank, log) for rank in range(size)], log
